"""Hugging Face checkpoints in and out: safetensors, streamed slice by slice into and out of the mesh's shards."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError, safe_open

from areal_jax.models.families import TensorMap, is_redundant, tensor_maps
from areal_jax.models.linear import SUFFIX, LoraConfig
from areal_jax.models.transformer import Model, TransformerConfig
from areal_jax.types import Params, UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
BLOCK_BYTES = 16 << 20  # of a tensor that is being converted
FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightSource(Protocol):
    """Tensors under Hugging Face's names and in its layout."""

    where: str
    """What error messages call it."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice of a tensor, in the dtype that it is stored in."""


class SafetensorsSource:
    """The safetensors files of a directory, one or several with an index."""

    def __init__(self, directory: pathlib.Path):
        """Raises UserError when there are none, or one is missing or damaged."""
        self.where = str(directory)
        self._files: dict[str, pathlib.Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._opened = threading.local()  # a handle per thread
        for path in _safetensors_files(directory):
            with _readable(path), safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    part = file.get_slice(name)
                    if part.get_dtype() not in FLOATS:
                        raise UserError(
                            f"{path}: {name} is stored as {part.get_dtype()}; expected one of {sorted(FLOATS)} "
                            "(quantised weights are not supported)"
                        )
                    self._files[name], self._shapes[name] = path, tuple(part.get_shape())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        path = self._files[name]
        handles: dict[pathlib.Path, Any] = self._opened.__dict__.setdefault("handles", {})
        with _readable(path):
            if path not in handles:
                handles[path] = safe_open(path, framework="numpy")
            return np.asarray(handles[path].get_slice(name)[index])


def load_params(model: Model, source: WeightSource) -> Params:
    """The model's parameters, without adapters, each device's part read straight from the file into its shard.

    Nothing but this host's shards and blocks of BLOCK_BYTES is ever in memory. Raises UserError listing every tensor
    that is missing, unexpected or of another shape.
    """
    maps = tensor_maps(model.config)
    check_tensors(maps, source, model.config)
    wanted = model.abstract_base
    params: Params = jax.tree.map(lambda x: None, wanted)
    for tensor in maps:
        abstract = _at(wanted, tensor.path)
        part = functools.partial(_part, source, tensor, abstract, {})
        value = jax.make_array_from_callback(abstract.shape, abstract.sharding, part)
        _put(params, tensor.path, jax.block_until_ready(value))
    return params


def check_tensors(maps: list[TensorMap], source: WeightSource, config: TransformerConfig) -> None:
    """Raises UserError listing what is missing, unexpected or of another shape in the source."""
    found, wanted = source.shapes(), {m.name: m.hf_shape for m in maps}
    faults = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in wanted and not is_redundant(name, config)]
    faults += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise UserError(
            f"{source.where} does not hold the tensors that its config.json asks for: {'; '.join(faults[:20])}{more}"
        )


def save_params(
    params: Params, config: TransformerConfig, directory: pathlib.Path, dtype: str, max_shard_bytes: int
) -> None:
    """Writes model*.safetensors, with an index if there are several; one file's tensors are in host memory at a time.

    dtype: 'float32' or 'bfloat16'.
    """
    from safetensors.numpy import save_file

    itemsize = jax.numpy.dtype(dtype).itemsize
    files: list[list[TensorMap]] = [[]]
    total = room = 0
    for tensor in tensor_maps(config):
        size = int(np.prod(tensor.hf_shape)) * itemsize
        if files[-1] and size > room:
            files.append([])
        if not files[-1]:
            room = max_shard_bytes
        files[-1].append(tensor)
        room, total = room - size, total + size
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    weight_map: dict[str, str] = {}
    for name, tensors in zip(names, files, strict=True):
        values = {t.name: to_hf_layout(np.asarray(jax.device_get(_at(params, t.path))), t, dtype) for t in tensors}
        save_file(values, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o644)  # it writes for its owner alone
        weight_map |= {t.name: name for t in tensors}
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def save_adapters(
    adapters: Params,
    config: TransformerConfig,
    lora: LoraConfig,
    base: str,
    revision: str,
    directory: pathlib.Path,
    dtype: str,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json as PEFT reads them: lora_A [rank, in], lora_B [out,
    rank].

    base, revision: of the model that they are of; dtype: 'float32' or 'bfloat16'.
    """
    from safetensors.numpy import save_file

    names = {t.path: t.name.removesuffix(".weight") for t in tensor_maps(config)}
    tensors = {}
    for (*where, adapter, matrix), x in flatten_dict(adapters).items():
        module = names[*where, adapter.removesuffix(SUFFIX)]
        value = np.asarray(jax.device_get(x))
        value = value.reshape(-1, value.shape[-1]) if matrix == "a" else value.reshape(value.shape[0], -1)
        tensors[f"base_model.model.{module}.lora_{matrix.upper()}.weight"] = np.ascontiguousarray(
            value.T.astype(jax.numpy.dtype(dtype))
        )
    save_file(tensors, directory / ADAPTERS, metadata={"format": "pt"})
    (directory / ADAPTERS).chmod(0o644)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")


def to_hf_layout(value: np.ndarray, tensor: TensorMap, dtype: str) -> np.ndarray:
    """Our parameter as the checkpoint has it: the inverse of the map's split and permutation."""
    inverse = np.argsort(tensor.permutation)
    return np.ascontiguousarray(value.transpose(inverse).reshape(tensor.hf_shape).astype(jax.numpy.dtype(dtype)))


def _part(
    source: WeightSource, tensor: TensorMap, like: jax.ShapeDtypeStruct, read: dict[Any, np.ndarray], index: Any
) -> np.ndarray:
    """The part of a parameter at `index`; `read` keeps what has been read of it, so that replicas are read once."""
    key = tuple(s.indices(n) for s, n in zip(index, like.shape, strict=True))
    if key not in read:
        read[key] = _read_part(source, tensor, like.shape, like.dtype, index)
    return read[key]


def _read_part(
    source: WeightSource, tensor: TensorMap, shape: tuple[int, ...], dtype: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """One shard of a parameter in our layout, converted block by block."""
    ours = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    out = np.empty([stop - start for start, stop in ours], dtype)
    bounds = [ours[list(tensor.permutation).index(f)] for f in range(len(shape))]  # of each factor
    split, f = [], 0
    for sizes in tensor.factors:  # only the first factor of a dimension is ever sharded
        split.append([bounds[f + i] for i in range(len(sizes))])
        f += len(sizes)
    theirs = [_joined(b, sizes) for b, sizes in zip(split, tensor.factors, strict=True)]
    factors = out.transpose(np.argsort(tensor.permutation))  # a view of `out`, one axis per factor of theirs
    row_factor = int(np.prod(tensor.factors[0][1:]))  # rows of theirs to one step of the first factor
    start, stop = bounds[0]
    row_bytes = 4 * row_factor * int(np.prod([e - b for b, e in theirs[1:]]))
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for begin in range(start, stop, step):
        end = min(stop, begin + step)
        rows = slice(begin * row_factor, end * row_factor)
        block = source.read(tensor.name, (rows, *(slice(*b) for b in theirs[1:])))
        view = factors[begin - start : end - start]
        view[...] = block.reshape(view.shape)
    return out


def _joined(bounds: list[tuple[int, int]], sizes: tuple[int, ...]) -> tuple[int, int]:
    """The range of a whole dimension from the ranges of its factors, of which only the first may be a part."""
    inner = int(np.prod(sizes[1:]))
    if any(b != (0, n) for b, n in zip(bounds[1:], sizes[1:], strict=True)):
        raise ValueError(f"{bounds} of {sizes}: only the first factor of a dimension can be sharded")
    return bounds[0][0] * inner, bounds[0][1] * inner


def _safetensors_files(directory: pathlib.Path) -> list[pathlib.Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is damaged ({error!r}); download the model again") from error
        missing = [n for n in names if not (directory / n).exists()]
        if missing:
            raise UserError(f"{directory} lacks {', '.join(missing)}, named in {INDEX}; download the model again")
        return [directory / n for n in names]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    raise UserError(f"{directory} holds no {SINGLE} and no {INDEX}; expected a model in the safetensors format")


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Any:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); it may be cut short: download it again") from error


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    _at(tree, path[:-1])[path[-1]] = value
