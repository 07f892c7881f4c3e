"""The device mesh and the rules from logical axis names to mesh axes.

Every parameter and activation names its axes logically ("embed", "heads", ...); one table maps those names to the mesh
axes `data`, `fsdp`, `tensor` and `context`. Changing how a model is laid out means changing this table and nothing
else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from areal_jax.types import UserError

MESH_AXES = ("data", "fsdp", "tensor", "context")

BATCH_AXES = ("data", "fsdp")

RULES: dict[str | None, str | None] = {
    # activations; "batch" goes over BATCH_AXES
    "length": "context",
    "keys": None,  # the positions that attention looks at: each device of `context` sees all keys, for its own queries
    # parameters
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "norm": None,
    "rank": None,
    # an activation's feature axis stays whole: only the weights' `embed` axis is sharded over fsdp
    "feature": None,
    None: None,
}

Axes = tuple[str | None, ...]


def make_mesh(shape: dict[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes (data, fsdp, tensor, context).

    shape: sizes by axis name, 1 where one is not named; one may be -1: what the others leave of the devices.
    Raises UserError if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = list(mesh_sizes(shape, len(devices)).values())
    return Mesh(np.array(devices).reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_sizes(shape: dict[str, int], devices: int) -> dict[str, int]:
    """The sizes of MESH_AXES on so many devices, a -1 filled in. Raises UserError as `make_mesh` does."""
    sizes = [shape.get(axis, 1) for axis in MESH_AXES]
    known = int(np.prod([s for s in sizes if s != -1]))
    if sizes.count(-1) > 1 or devices % known or (-1 not in sizes and known != devices):
        asked = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
        raise UserError(
            f"mesh {asked} does not fit {devices} device(s): the sizes must multiply to that number "
            "(one of them may be -1, the rest)"
        )
    return {axis: devices // known if s == -1 else s for axis, s in zip(MESH_AXES, sizes, strict=True)}


def row_shards(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def spec(axes: Axes) -> PartitionSpec:
    """The PartitionSpec of an array whose axes carry these logical names."""
    return PartitionSpec(*(BATCH_AXES if name == "batch" else RULES[name] for name in axes))


def named(mesh: Mesh, axes: Axes) -> NamedSharding:
    return NamedSharding(mesh, spec(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place(arrays: Any, shardings: Any) -> Any:
    """Moves a tree of host arrays, which every process of the mesh has whole, to the mesh; no process waits for
    another. What lies on a mesh already is moved as it must."""

    def put(array: Any, where: Sharding) -> jax.Array:
        if isinstance(array, jax.Array) or where.is_fully_addressable:
            return jax.device_put(array, where)
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

    return jax.tree.map(put, arrays, shardings)


def fetch(tree: Any) -> Any:
    """The whole of arrays on a mesh, as host arrays in every process; all processes must ask."""

    def get(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
            return jax.device_get(array)
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(get, tree)


def constrain(x: jax.Array, mesh: Mesh | None, axes: Axes) -> jax.Array:
    """Pins an activation's layout under jit; no effect on a single device. Of a length that `context` does not divide
    (one token, in decoding), every device has the whole."""
    if mesh is None or mesh.size == 1:
        return x
    whole = [n == "length" and size % mesh.shape["context"] != 0 for n, size in zip(axes, x.shape, strict=True)]
    axes = tuple(None if w else n for w, n in zip(whole, axes, strict=True))
    return jax.lax.with_sharding_constraint(x, named(mesh, axes))


def on_each_device(
    run: Callable[..., Any], mesh: Mesh | None, axes: tuple[Axes, ...], result: Axes
) -> Callable[..., Any]:
    """`run` on each device's own part of its arguments, for what XLA does not split itself (a kernel); on a single
    device `run` itself. axes: of each argument; result: of what it returns."""
    if mesh is None or mesh.size == 1:
        return run
    specs = tuple(spec(a) for a in axes)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec(result), check_vma=False)


def copied(tree: Any) -> Any:
    """Arrays of their own where those of the tree are: for what a training step will take."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)


def parameter_sharding(mesh: Mesh, shape: tuple[int, ...], axes: Axes) -> NamedSharding:
    """The layout of a parameter; a dimension that its mesh axis does not divide (an odd vocabulary) stays whole."""
    rules = [RULES[name] for name in axes]
    divides = [r is None or n % mesh.shape[r] == 0 for n, r in zip(shape, rules, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*(r if ok else None for r, ok in zip(rules, divides, strict=True))))
