"""`--dry_run`: what a run would put where, and whether it fits, without reading weights.

State (parameters, optimizer, gradients, caches) is counted exactly from the shapes and shardings. What a step holds for
a while is estimated from what the plain XLA program keeps; `tests/plan_test.py` compares it with XLA's own figure.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import AbstractMesh, AxisType, Mesh

from areal_jax import build, sharding
from areal_jax.launch.processes import MEMORY_SHARE
from areal_jax.models.attention import QUERY_BLOCK
from areal_jax.models.critic import build_critic
from areal_jax.models.transformer import Model, TransformerConfig, build_model
from areal_jax.trainer.train_step import logprob_columns
from areal_jax.types import Params, UserError

GIB = 1 << 30
SCORE_BYTES = 12  # of one attention score during a forward and backward: three float32 arrays
LOGIT_BYTES = 12  # of one logit: itself, its log-prob and their gradient
VERSIONS = 3  # that a sampler holds at once: it draws with one, reads the next, and an evaluation is pinned to another


@dataclasses.dataclass(frozen=True)
class Slice:
    """The devices of one role."""

    devices: int
    bytes_per_device: int
    is_cpu: bool = False


@dataclasses.dataclass(frozen=True)
class RolePlan:
    """One role's mesh and memory, in bytes per device."""

    role: str
    slice: Slice
    mesh: dict[str, int]
    parameters: int
    items: dict[str, int]
    layout: list[str]
    """Where each parameter lands: a line for each, those of all layers on one."""

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        return self.total <= MEMORY_SHARE * self.slice.bytes_per_device


def parse_slice(text: str) -> Slice:
    """'8x80': 8 devices of 80 GiB. Raises UserError."""
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if not match or int(match[1]) < 1:
        raise UserError(f"a slice is {text!r}; expected DEVICESxGIB, such as 8x80")
    return Slice(int(match[1]), int(float(match[2]) * GIB))


def this_machine() -> Slice:
    """The devices that jax sees here."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        with open("/proc/meminfo") as file:
            kib = int(re.search(r"MemTotal:\s+(\d+)", file.read())[1])  # type: ignore[index]
        return Slice(len(devices), kib * 1024 // len(devices), is_cpu=True)
    return Slice(len(devices), int((devices[0].memory_stats() or {})["bytes_limit"]))


def make_plan(
    config: ml_collections.ConfigDict, trainer: Slice, sampler: Slice, colocated: bool = False
) -> list[RolePlan]:
    """Both roles; in `colocated` the sampler uses the trainer's model. Raises UserError for a mesh that its devices, or
    the model, do not allow."""
    model_config = build.find_model(config)[1]
    if colocated:
        model = _model(config, "trainer", model_config, trainer)
        return [_trainer_plan(config, model, trainer), _sampler_plan(config, model, trainer, colocated=True)]
    return [
        _trainer_plan(config, _model(config, "trainer", model_config, trainer), trainer),
        _sampler_plan(config, _model(config, "sampler", model_config, sampler), sampler),
    ]


def report(plans: list[RolePlan], share_devices: bool) -> str:
    """The plan as text. Raises UserError, with the text, if a role does not fit.

    share_devices: both roles are on the same devices (colocated, or the cores of one machine).
    """
    lines = [f"parameters: {plans[0].parameters:,}"]
    for p in plans:
        mesh = " x ".join(f"{axis} {size}" for axis, size in p.mesh.items())
        kind = "CPU device(s)" if p.slice.is_cpu else "device(s)"
        lines += ["", f"{p.role}: {p.slice.devices} {kind} of {_size(p.slice.bytes_per_device)}, mesh {mesh}"]
        lines += [f"  {name:<44}{_size(size):>12}" for name, size in p.items.items()]
        lines += [f"  {'per device':<44}{_size(p.total):>12}"]
        lines += ["", *(f"  {line}" for line in p.layout)]
    lacking = [p for p in plans if not p.fits]
    if share_devices and not lacking:
        needed, present = sum(p.total for p in plans), plans[0].slice.bytes_per_device
        lines += ["", f"both roles on the same devices: {_size(needed)} of {_size(present)}"]
        lacking = plans if needed > MEMORY_SHARE * present else []
    text = "\n".join(lines)
    if lacking:
        p = max(lacking, key=lambda p: p.total)
        largest = max(p.items, key=lambda k: p.items[k])
        raise UserError(
            f"this does not fit\n{text}\n\nthe {' and the '.join(p.role for p in lacking)} would need more than the "
            f"{_size(int(MEMORY_SHARE * p.slice.bytes_per_device))} that a program can have of a device; the largest "
            f"part is {largest!r}. {REMEDIES[p.role]}"
        )
    return text + "\n\nit fits (activations are an estimate)"


REMEDIES = {
    "trainer": "Shard it over more devices (mesh.trainer.fsdp, tensor, context), shorten trainer.row_length, lower "
    "trainer.micro_batch_rows, or set trainer.remat='full'",
    "sampler": "Shard it over more devices (mesh.sampler.tensor), lower rollout.slots, or shorten "
    "rollout.max_response_length",
}


def _model(config: ml_collections.ConfigDict, role: str, model_config: TransformerConfig, devices: Slice) -> Model:
    shape = sharding.mesh_sizes(config.mesh[role].to_dict(), devices.devices)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return build.model_on(cast(Mesh, mesh), config, role, model_config, on_cpu=devices.is_cpu)


def _bytes(params: Params) -> int:
    """Of (abstract) parameters on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params))


def layout(model: Model) -> list[str]:
    """A table of the parameters: name, shape, for each axis that is split the mesh axis, and bytes on one device. What
    is the same in all layers is on one line, with its number."""
    groups: dict[tuple[Any, ...], int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(model.abstract_params):
        name = ".".join("*" if isinstance(key.key, int) else str(key.key) for key in path)
        entry = (name, x.shape, x.sharding.spec, math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize)
        groups[entry] = groups.get(entry, 0) + 1
    lines = [f"{'parameter':<34}{'shape':<20}{'split over':<26}{'per device':>12}"]
    for (name, shape, spec, size), count in groups.items():
        divided = [(n, axis) for n, axis in zip(shape, spec, strict=False) if axis and model.mesh.shape[axis] > 1]
        split = ", ".join(f"{n}: {axis}" for n, axis in divided) or "-"
        times = f"{count} x " if count > 1 else ""
        lines.append(f"{name:<34}{' x '.join(map(str, shape)):<20}{split:<26}{times + _size(size):>12}")
    return lines


def _trainer_plan(config: ml_collections.ConfigDict, model: Model, devices: Slice) -> RolePlan:
    shape = dict(model.mesh.shape)
    frozen, trained = model.split(model.abstract_params)
    state = _bytes(trained)
    rows, row = config.trainer.micro_batch_rows, config.trainer.row_length
    if config.warm_start.enabled:
        rows = max(rows, -(-config.warm_start.rows // sharding.row_shards(model.mesh)))
    columns = logprob_columns(config.trainer.logprob_chunk, rows, row)
    vocabulary = model.config.vocab_size // shape["tensor"]
    first = config.optimizer.first_moment_dtype
    kept = first if first == "float32" else f"{first}, float32"
    base = {f"parameters under adapters ({model.config.compute_dtype})": _bytes(frozen)} if frozen else {}
    items = {
        **base,
        "adapters (float32)" if frozen else "parameters (float32)": state,
        f"optimizer state ({kept})": (jnp.dtype(first).itemsize + 4) * state // 4,
        "gradients (sum and micro-batch, float32)": 2 * state,
        "activations of a micro-batch": activation_bytes(model.config, rows, row, shape["tensor"]) // shape["context"],
        "logits of a chunk of tokens": rows * columns * vocabulary * LOGIT_BYTES,
        "output layer's gradient of a chunk": 0 if frozen else 4 * model.config.d_model * vocabulary,
    }
    if config.trainer.scan_layers:
        items["layers' parameters side by side, for the loop"] = _bytes(model.abstract_params["layers"])
    if config.loss.kl_coefficient or config.reward.kl_coefficient:
        items["reference's parameters (float32)"] = state
    critic = build_critic(model, config.critic.kind)
    if critic is not None and critic.backbone is not None:
        items["critic: parameters, optimizer, gradients"] = 5 * _bytes(critic.backbone.abstract_params)
        items["critic: activations of a micro-batch"] = items["activations of a micro-batch"]
    if frozen and config.warm_start.enabled:
        alone = ml_collections.ConfigDict(config.to_dict())  # neither a reference nor a critic is there yet
        alone.loss.kl_coefficient, alone.reward.kl_coefficient, alone.critic.kind = 0.0, 0.0, "none"
        whole = build_model(dataclasses.replace(model.config, lora=None), model.mesh)
        more = _trainer_plan(alone, whole, devices).total - sum(items.values())
        items["more for the warm start, which trains all"] = max(0, more)
    return RolePlan("trainer", devices, shape, model.parameter_count(), items, layout(model))


def activation_bytes(c: TransformerConfig, rows: int, row_length: int, tensor: int) -> int:
    """What the backward of a micro-batch of [rows, row_length] needs of its forward, on one device."""
    size = jnp.dtype(c.compute_dtype).itemsize
    tokens = rows * row_length
    wide = (4 * c.heads + 4 * c.kv_heads) * c.head_dim + 4 * c.d_ff  # sharded over `tensor`
    kept = tokens * (6 * c.d_model * size + wide * size // tensor)
    scores = rows * c.heads * min(row_length, QUERY_BLOCK) * row_length * SCORE_BYTES // tensor
    scores = scores if c.attention == "xla" else 0  # no other kernel has them all at once
    if row_length > QUERY_BLOCK:  # of one block of one layer at a time
        return _with_remat(c, tokens, kept, wide // tensor) + scores
    return _with_remat(c, tokens, kept + scores, wide // tensor)


def _with_remat(c: TransformerConfig, tokens: int, layer: int, wide: int) -> int:
    """Bytes over all layers, if `layer` is what one keeps without rematerialisation."""
    size = jnp.dtype(c.compute_dtype).itemsize
    inputs = tokens * c.d_model * size
    between = {"none": layer, "dots": inputs + tokens * wide * size // 2, "full": inputs}[c.remat]
    return c.layers * between + (0 if c.remat == "none" else layer)


def _sampler_plan(config: ml_collections.ConfigDict, model: Model, devices: Slice, colocated: bool = False) -> RolePlan:
    c, shape = model.config, dict(model.mesh.shape)
    data, tensor = sharding.row_shards(model.mesh), shape["tensor"]
    frozen, trained = model.split(model.abstract_params)
    engine = build.engine_config(config, (), data)
    size = jnp.dtype(c.compute_dtype).itemsize
    token = 2 * c.layers * c.kv_heads * c.head_dim * size  # keys and values of one
    paging, fewer = engine.paging, max(engine.fewer, default=0)
    positions = paging.blocks * paging.block_size if paging else engine.slots * engine.max_length
    cache = token * positions // (data * tensor)
    tables = 3 * 4 * engine.slots * engine.max_length
    apart = (tables + (0 if paging else cache)) * fewer // engine.slots  # blocks stay where they are
    tokens = min(engine.row_ladder[-1] * engine.max_length, engine.prefill_tokens)
    scores = tokens * c.heads * min(engine.max_length, QUERY_BLOCK) * 8 if c.attention == "xla" else 0
    prefill = tokens * 3 * c.d_model * size + (tokens * 2 * c.d_ff * size + scores) // tensor
    prefill += token * tokens // tensor
    if engine.max_length > engine.longest_refill:  # a piece looks at the whole row, which is gathered for it
        scores = c.heads * min(tokens, QUERY_BLOCK) * engine.max_length * 8 + tokens * engine.max_length
        prefill = max(prefill, (scores + token * engine.max_length) // tensor)
    logits = engine.slots * c.vocab_size * LOGIT_BYTES // tensor
    base = {"parameters under adapters, and those of the warm-up": 2 * _bytes(frozen)}  # or the trainer's
    items = {
        **(base if frozen and not colocated else {}),
        f"{'adapters' if frozen else 'parameters'}, {VERSIONS} versions": VERSIONS * _bytes(trained),
        f"keys and values ({config.rollout.cache}), tokens": cache + tables,
        "those of the last slots alive, computed apart": apart,
        "the same, of an evaluation beside training": cache + tables,
        "prefill or decode step": max(prefill, logits),
    }
    return RolePlan("sampler", devices, shape, model.parameter_count(), items, layout(model))


def _size(size: int) -> str:
    if size >= GIB / 10:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:,.1f} KiB"


def run(config: ml_collections.ConfigDict, trainer: str, sampler: str, kind: str) -> str:
    """The text of `--dry_run`: for the slices given as DEVICESxGIB, or the devices of this machine where ''.

    kind: 'colocated' or 'local'. On one machine `local` shares its accelerators out, half to each role.
    """
    here: Any = None if trainer and sampler else this_machine()
    share_devices = kind == "colocated" or (here is not None and here.is_cpu)
    if here is not None and not share_devices and here.devices > 1:
        here = dataclasses.replace(here, devices=here.devices // 2)
    slices = (parse_slice(trainer) if trainer else here, parse_slice(sampler) if sampler else here)
    plans = make_plan(config, *slices, colocated=kind == "colocated")
    return report(plans, share_devices)
