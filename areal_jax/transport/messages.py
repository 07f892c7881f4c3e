"""What samplers and the trainer say to each other, and its bounded encoding (msgpack).

A sampler sends a Report and gets one Reply. Everything received is checked against the Limits before it is used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np

from areal_jax.types import Lease, Prompt, Trajectory


class ProtocolError(Exception):
    """A message that is malformed or over a bound; it is refused whole."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on what is received."""

    max_message_bytes: int
    max_sequence_length: int
    """Tokens of a trajectory."""


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """Running totals of one sampler since its start (`step` intervals are differences of two reports)."""

    generated_tokens: int = 0
    """Training tokens; evaluation is not counted."""
    decoded_slot_steps: int = 0
    """Rows x decode steps of the training engine, useful or not."""
    busy_seconds: float = 0.0
    """Time of turns with something to decode; talking to the trainer counts where a chunk was in flight meanwhile."""
    wall_seconds: float = 0.0
    swaps: int = 0
    swap_seconds: float = 0.0
    """For which swaps kept decoding from going on."""
    compiles_after_warmup: int = 0
    graded: int = 0
    """Training and evaluation samples."""
    grading_timeouts: int = 0
    """Grades that were killed or ran out of time; they count as wrong."""


@dataclasses.dataclass(frozen=True)
class Report:
    """From a sampler: what it finished and what it wants."""

    sampler: str
    incarnation: str
    """New with every start of the process, so that a restarted sampler's old leases are issued again."""
    run: str
    """The trainer's run that the trajectories were drawn for; '' before the first reply."""
    sequence: int
    """Counts this incarnation's reports from 1; a report sent again keeps its number."""
    version: int
    """The policy version that the sampler draws with."""
    loading: int
    """The version that it is reading; -1 for none. The trainer keeps it."""
    want: int
    """Training samples that it could take, some of them to wait for a slot."""
    want_evaluation: int
    """And evaluation samples."""
    trajectories: tuple[Trajectory, ...]
    stats: SamplerStats


@dataclasses.dataclass(frozen=True)
class Reply:
    """To a sampler: acknowledges the report of the same sequence number, trajectories included."""

    sequence: int
    run: str
    """New with every start of the trainer: a sampler that meets another run drops all it holds."""
    version: int
    """The newest published policy version."""
    leases: tuple[Lease, ...]
    credits: int
    """How many training trajectories the next report may carry (back-pressure; evaluation is exempt)."""
    stop: bool


def encode(message: Report | Reply | Trajectory) -> bytes:
    return msgpack.packb(dataclasses.asdict(message), default=_encode_array)


def decode_report(data: bytes, limits: Limits) -> Report:
    """Raises ProtocolError."""
    fields = _unpack(data, limits)
    try:
        fields["trajectories"] = tuple(_trajectory(t, limits) for t in fields["trajectories"])
        fields["stats"] = SamplerStats(**fields["stats"])
        report = Report(**fields)
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"malformed report: {error}") from error
    _require_types(report)
    if not all(len(name) <= 128 for name in (report.sampler, report.incarnation, report.run)) or not report.sampler:
        raise ProtocolError("malformed report: its sampler, incarnation or run is no short name")
    if min(report.want, report.want_evaluation) < 0:
        raise ProtocolError("malformed report: it wants less than nothing")
    return report


def decode_reply(data: bytes, limits: Limits) -> Reply:
    """Raises ProtocolError."""
    fields = _unpack(data, limits)
    try:
        fields["leases"] = tuple(_lease(x, limits) for x in fields["leases"])
        reply = Reply(**fields)
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"malformed reply: {error}") from error
    _require_types(reply)
    return reply


def decode_trajectory(data: bytes, limits: Limits) -> Trajectory:
    """Raises ProtocolError."""
    try:
        return _trajectory(_unpack(data, limits), limits)
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"malformed trajectory: {error}") from error


def _unpack(data: bytes, limits: Limits) -> dict[str, Any]:
    if len(data) > limits.max_message_bytes:
        raise ProtocolError(f"message of {len(data)} bytes; at most {limits.max_message_bytes} are accepted")
    try:
        fields = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack message: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("not a msgpack map")
    return fields


SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "int | None": (int, type(None)),
    "FinishReason": (str,),
}
"""Annotation -> what msgpack may have made of it."""


def _require_types(record: Any) -> None:
    """Raises ProtocolError for a field of another type than its annotation says; looks into records and tuples."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item):
                _require_types(item)
            elif not isinstance(value, tuple) and not isinstance(item, SCALARS.get(str(field.type), object)):
                raise ProtocolError(f"{type(record).__name__}.{field.name} is {item!r}; expected {field.type}")


def _encode_array(value: Any) -> Any:
    """Arrays travel as raw little-endian bytes; their dtype follows from the field."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _array(data: Any, dtype: str, limits: Limits) -> np.ndarray:
    if not isinstance(data, bytes):
        raise ProtocolError(f"an array arrived as {type(data).__name__}")
    array = np.frombuffer(data, dtype)
    if not 0 < len(array) <= limits.max_sequence_length:
        raise ProtocolError(f"a sequence of {len(array)} tokens; expected 1 to {limits.max_sequence_length}")
    return array


def _trajectory(fields: dict[str, Any], limits: Limits) -> Trajectory:
    for name, dtype in (
        ("tokens", "<i4"),
        ("behaviour_logprobs", "<f4"),
        ("policy_versions", "<i4"),
        ("loss_mask", "<f4"),
    ):
        fields[name] = _array(fields[name], dtype, limits)
    trajectory = Trajectory(**fields)
    sizes = {len(trajectory.tokens), len(trajectory.behaviour_logprobs), len(trajectory.policy_versions)}
    if sizes != {len(trajectory.loss_mask)} or trajectory.finish_reason not in ("stop", "length"):
        raise ProtocolError(f"sample {trajectory.sample_id}: arrays of different lengths, or an unknown finish reason")
    if not np.isfinite(trajectory.behaviour_logprobs).all() or not np.isfinite(trajectory.reward):
        raise ProtocolError(f"sample {trajectory.sample_id}: a log-prob or the reward is not finite")
    return trajectory


def _lease(fields: dict[str, Any], limits: Limits) -> Lease:
    prompt = fields["prompt"]
    prompt["tokens"] = _array(prompt["tokens"], "<i4", limits)
    fields["prompt"] = Prompt(**prompt)
    fields["sample_ids"] = tuple(fields["sample_ids"])
    return Lease(**fields)
