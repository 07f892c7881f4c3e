"""The worker processes of the grading pool, seen from their parent: started, replaced, killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

STARTUP_SECONDS = 60.0
LONGEST_DIRECTORY = 70  # characters; the address of a socket has 108 at most
MAX_NURSERIES = 5  # deaths of the nursery in a row before giving up


@dataclasses.dataclass
class Worker:
    """One process. `job` is what it is busy with, None if it is idle."""

    connection: Connection
    pid: int
    hostile: bool
    """Whether it is for hostile questions, at a lower priority."""
    inherited: int
    """Bytes of memory that it came with."""
    job: Any = None
    started: float = 0.0


def resident_bytes(pid: int) -> int:
    """Memory in use by a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


class Workers:
    """Keeps so many harmless and hostile workers alive. Not thread-safe; `close` ends all processes."""

    def __init__(self, wanted: Mapping[bool, int], memory_mb: int, seconds: float):
        """wanted: hostile -> number of workers. memory_mb, seconds: of a worker and of a grade (see grader.py)."""
        self._wanted = wanted
        self._arguments = (str(memory_mb), str(seconds))
        short = len(tempfile.gettempdir()) < LONGEST_DIRECTORY
        self._directory = tempfile.TemporaryDirectory(prefix="areal-grading-", dir=None if short else "/tmp")
        self._address = str(pathlib.Path(self._directory.name) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(64)
        self._arriving: list[Connection] = []  # connected, and have not said yet what they are
        self.alive: list[Worker] = []
        self.have_come = {False: False, True: False}
        """Whether a worker of this kind has ever come."""
        self._attempts = 0
        self._forking = {False: 0, True: 0}  # asked for and not yet here
        self._ready_by = 0.0
        self._nursery = self._start_nursery()

    def sources(self) -> list[Any]:
        """What is readable when a worker comes: then call `welcome`."""
        return [self._listener, *self._arriving]

    def welcome(self, ready: Sequence[Any]) -> None:
        """Takes in the workers among the sources that are ready; the first thing that one says is its process id and
        what it is for, or why it cannot work (RuntimeError)."""
        for connection in [c for c in self._arriving if c in ready]:
            self._arriving.remove(connection)
            try:
                pid, hostile, fault = connection.recv()
            except (EOFError, OSError):
                connection.close()  # it died young; `replenish` notices that it never came
                continue
            if fault:
                raise RuntimeError(f"a grading process cannot work: {fault}")
            self.alive.append(Worker(connection, pid, hostile, resident_bytes(pid)))
            self._forking[hostile] -= 1
            self.have_come[hostile] = True
            self._attempts = 1
        if self._listener in ready:
            self._arriving.append(Connection(self._listener.accept()[0].detach()))

    def discard(self, worker: Worker) -> None:
        """Kills a worker, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        worker.connection.close()
        self.alive.remove(worker)

    def replenish(self) -> None:
        """Asks for workers in the place of those that are gone. Raises RuntimeError if none can be started."""
        overdue = any(self._forking.values()) and time.monotonic() > self._ready_by
        if self._nursery.poll() is not None or overdue:
            if self._attempts >= MAX_NURSERIES:
                raise RuntimeError(
                    f"the grading processes cannot be started ({MAX_NURSERIES} attempts); is math-verify installed?"
                )
            self._end_nursery()
            self._nursery = self._start_nursery()
        assert self._nursery.stdin is not None
        for hostile, count in self._wanted.items():
            missing = count - sum(w.hostile == hostile for w in self.alive) - self._forking[hostile]
            if missing > 0:
                with contextlib.suppress(OSError):  # it has just died: the next turn sees that
                    self._nursery.stdin.write((b"hostile\n" if hostile else b"harmless\n") * missing)
                    self._nursery.stdin.flush()
                    self._forking[hostile] += missing
                    self._ready_by = time.monotonic() + STARTUP_SECONDS

    def close(self) -> None:
        self._end_nursery()
        for worker in list(self.alive):
            self.discard(worker)
        for connection in self._arriving:
            connection.close()
        self._listener.close()  # a worker that has not connected yet finds nobody, and ends
        self._directory.cleanup()

    def _start_nursery(self) -> subprocess.Popen[bytes]:
        self._attempts += 1
        self._forking = {False: 0, True: 0}
        self._ready_by = time.monotonic() + STARTUP_SECONDS
        return subprocess.Popen(
            [sys.executable, "-m", "areal_jax.rewards.grader", self._address, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=pathlib.Path(__file__).parents[2],  # where the package is found
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
        )

    def _end_nursery(self) -> None:
        self._nursery.kill()
        self._nursery.wait()
        assert self._nursery.stdin is not None
        with contextlib.suppress(OSError):
            self._nursery.stdin.close()
