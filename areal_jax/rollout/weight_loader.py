"""Reads weights beside decoding; the processes of a group take them up in the same turn."""

from __future__ import annotations

import concurrent.futures
import logging

from areal_jax.transport.broadcast import Broadcast
from areal_jax.transport.weights import VersionGone, WeightChannel
from areal_jax.types import Params, PolicySnapshot

log = logging.getLogger(__name__)

NOTHING, READ, GONE = b"nothing", b"read", b"gone"
"""What has come of reading: process 0 of a group says it to the others at each `collect`."""


class WeightLoader:
    """Reads one version at a time from the channel, in a thread of its own. Its methods are for one caller."""

    def __init__(
        self,
        channel: WeightChannel,
        abstract_params: Params,
        wait: bool = False,
        broadcast: Broadcast | None = None,
    ):
        """wait: `begin` returns only when the version is read, so that nothing depends on how long that takes.
        broadcast: of the sampler's processes, if it has several; process 0 says when a version is taken up.
        """
        self._broadcast = broadcast
        self._channel, self._abstract_params, self._wait = channel, abstract_params, wait
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "weights")
        self._reading: concurrent.futures.Future[PolicySnapshot | None] | None = None
        self._version: int | None = None

    @property
    def loading(self) -> int | None:
        """The version that is being read, or read and not yet collected."""
        return self._version

    def begin(self, version: int) -> None:
        """Starts to read a version. Raises RuntimeError while another one is under way."""
        if self._reading is not None:
            raise RuntimeError(f"version {self._version} is being read; collect it before version {version}")
        self._version = version
        self._reading = self._thread.submit(self._read, version)
        if self._wait:
            concurrent.futures.wait([self._reading])

    def collect(self, timeout: float | None) -> tuple[int, PolicySnapshot | None] | None:
        """The version that has been read, with its weights, or with None if it was gone already. None if nothing has
        been read after `timeout` seconds (None: however long it takes).

        In a group, process 0's time is what counts, and the others wait for as long as they need to have what it has.
        Raises what reading raised, and VersionGone for what process 0 could still read.
        """
        if self._version is None or self._reading is None:
            return None
        state = self._agree(self._reading, timeout)
        if state == NOTHING:
            return None
        version, snapshot = self._version, self._reading.result()
        if state == READ and snapshot is None:
            raise VersionGone(f"policy version {version} is gone, and process 0 has taken it up")
        if self._broadcast is not None:
            self._broadcast.meet("weights")  # until all have read them, process 0 reports them as being read
        self._reading = self._version = None
        return version, None if state == GONE else snapshot

    def forget(self) -> None:
        """Drops what is under way, and what the channel keeps of a run that is over."""
        self.collect(timeout=None)
        self._channel.forget()

    def close(self) -> None:
        """Waits for what is under way."""
        self._thread.shutdown()

    def _agree(self, reading: concurrent.futures.Future[PolicySnapshot | None], timeout: float | None) -> bytes:
        """What has come of reading, here or, in a group, at process 0."""
        if self._broadcast is not None and not self._broadcast.leads:
            return self._broadcast.receive()
        done = concurrent.futures.wait([reading], timeout).done
        state = NOTHING if not done else GONE if reading.result() is None else READ
        if self._broadcast is not None:
            self._broadcast.send(state)
        return state

    def _read(self, version: int) -> PolicySnapshot | None:
        try:
            return self._channel.load(version, self._abstract_params)
        except VersionGone as error:  # this sampler was given up: the next reply names newer ones
            log.warning("%s; waiting for a newer one", error)
            return None
