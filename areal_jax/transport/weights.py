"""The weight channel: versioned parameters from the trainer to the samplers, in memory or through Orbax.

A reader loads only versions that it was told of: the newest one (announced with the queue's replies after its commit)
or a pinned one (an evaluation's). The publisher removes a version only below everything that a reader may still be
loading, and moves it out of sight first, so that a half-removed step is never taken for a whole one.
"""

from __future__ import annotations

import pathlib
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

from areal_jax import sharding
from areal_jax.types import Params, PolicySnapshot


class VersionGone(Exception):
    """The version has been retired."""


class WeightChannel(Protocol):
    """Both ends of the channel."""

    def publish(self, snapshot: PolicySnapshot) -> None:
        """Makes the parameters available under their version; returns once they are committed."""

    def load(self, version: int, abstract_params: Params) -> PolicySnapshot:
        """The parameters of a version, laid out as `abstract_params` say. Raises VersionGone."""

    def retire(self, keep: Iterable[int]) -> None:
        """Removes the versions older than the newest but one and than everything in `keep`."""

    def forget(self) -> None:
        """For a reader: what it has kept is of a run that is over."""


def retired_versions(available: Iterable[int], keep: Iterable[int]) -> list[int]:
    """The versions that may go: older than the newest but one and than every one in `keep`."""
    versions = sorted(available)
    return [v for v in versions if v < min([*versions[-2:], *keep])]


class MemoryChannel:
    """Within one process. Parameters are copied, since the trainer donates its own to the next step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _snapshots
        self._snapshots: dict[int, PolicySnapshot] = {}

    def publish(self, snapshot: PolicySnapshot) -> None:
        copy = PolicySnapshot(snapshot.version, sharding.copied(snapshot.params))
        with self._lock:
            self._snapshots[snapshot.version] = copy

    def load(self, version: int, abstract_params: Params) -> PolicySnapshot:
        with self._lock:
            found = self._snapshots.get(version)
        if found is None:
            raise VersionGone(f"policy version {version} is not in memory")
        shardings = jax.tree.map(lambda x: x.sharding, abstract_params)
        return PolicySnapshot(version, jax.device_put(found.params, shardings))

    def retire(self, keep: Iterable[int]) -> None:
        with self._lock:
            for version in retired_versions(self._snapshots, keep):
                del self._snapshots[version]

    def forget(self) -> None:
        """Nothing is kept by readers."""


class PartChannel:
    """A channel in which the part of the parameters travels that is trained; readers join it to the rest, which they
    read once. The publisher's snapshots have that part alone."""

    def __init__(
        self,
        channel: WeightChannel,
        split: Callable[[Params], tuple[Params, Params]],
        join: Callable[[Params, Params], Params],
        read_rest: Callable[[Params], Params],
    ):
        """split: parameters -> (the rest, what travels); join: its inverse; read_rest: the rest, laid out as its
        argument says."""
        self._channel, self._split, self._join, self._read_rest = channel, split, join, read_rest
        self._rest: Params = None

    def publish(self, snapshot: PolicySnapshot) -> None:
        self._channel.publish(snapshot)

    def load(self, version: int, abstract_params: Params) -> PolicySnapshot:
        rest, part = self._split(abstract_params)
        found = self._channel.load(version, part)
        if self._rest is None:
            try:
                self._rest = self._read_rest(rest)
            except Exception:  # Orbax raises many kinds when the files go: a trainer that starts anew removes both
                self._channel.load(version, part)
                raise
        return PolicySnapshot(version, self._join(self._rest, found.params))

    def retire(self, keep: Iterable[int]) -> None:
        self._channel.retire(keep)

    def forget(self) -> None:
        self._rest = None
        self._channel.forget()


class OrbaxChannel:
    """Through a directory that both roles see: `<directory>/<version>/` per version, in OCDBT + Zarr3, uncompressed."""

    TRASH = "trash"

    def __init__(self, directory: pathlib.Path, fresh: bool = False, publishes: bool = True):
        """fresh: remove what an earlier run left; for the publisher, before any reader.
        publishes: False for readers; each process of a sampler group reads its own part then and waits for no other.
        """
        self._directory = directory.absolute()
        if fresh and self._directory.exists():
            old = self._directory.with_name(f"{self._directory.name}.{uuid.uuid4().hex}")
            self._directory.rename(old)  # out of the sight of those who read it, at once
            shutil.rmtree(old)
        self._directory.mkdir(parents=True, exist_ok=True)
        processes = ocp.options.MultiprocessingOptions() if publishes else _alone()
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=True, use_compression=False, multiprocessing_options=processes
        )
        self._checkpointer = ocp.Checkpointer(handler, multiprocessing_options=processes)

    def publish(self, snapshot: PolicySnapshot) -> None:
        path = self._directory / str(snapshot.version)
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(snapshot.params), force=True)

    def load(self, version: int, abstract_params: Params) -> PolicySnapshot:
        path = self._directory / str(version)
        if not path.is_dir():
            raise VersionGone(f"policy version {version} is not in {self._directory}")
        try:
            return PolicySnapshot(version, restore(self._checkpointer, path, abstract_params))
        except Exception as error:  # Orbax raises a bare Exception when the files go while it reads them
            if path.is_dir():
                raise
            raise VersionGone(f"policy version {version} was removed while it was read") from error

    def retire(self, keep: Iterable[int]) -> None:
        available = [int(p.name) for p in self._directory.iterdir() if p.name.isdigit()]
        trash = self._directory / self.TRASH
        trash.mkdir(exist_ok=True)
        for version in retired_versions(available, keep):
            moved = trash / str(version)
            (self._directory / str(version)).rename(moved)
            shutil.rmtree(moved)

    def forget(self) -> None:
        """Nothing is kept by readers."""


def _alone() -> ocp.options.MultiprocessingOptions:
    """Of a checkpointer that waits for no other process."""
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process-{here}"
    )


def read_alone(path: pathlib.Path, abstract: Any) -> Any:
    """`restore`, in a process that waits for no other."""
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone())
    return restore(ocp.Checkpointer(handler, multiprocessing_options=_alone()), path.absolute(), abstract)


def restore(checkpointer: ocp.Checkpointer, path: pathlib.Path, abstract: Any) -> Any:
    """Reads a tree saved by `checkpointer`, each array with the dtype and sharding of its place in `abstract`."""
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=abstract, restore_args=args))
