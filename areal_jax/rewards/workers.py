"""The worker processes of the grading pool, seen from their parent: started, replaced, killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

STARTUP_SECONDS = 60.0
MAX_NURSERIES = 5  # deaths of the nursery in a row before giving up


@dataclasses.dataclass
class Worker:
    """One process. `job` is what it is busy with, None if it is idle."""

    connection: Connection
    pid: int
    hostile: bool
    """Whether it is for hostile questions, at the lowest priority."""
    job: Any = None
    started: float = 0.0


class Workers:
    """Keeps so many harmless and hostile workers alive. Not thread-safe; `close` ends all processes."""

    def __init__(self, wanted: Mapping[bool, int], memory_mb: int, seconds: float):
        """wanted: hostile -> number of workers. memory_mb, seconds: of a worker and of a grade (see grader.py)."""
        self._wanted = wanted
        self._arguments = (str(memory_mb), str(seconds))
        self._directory = tempfile.TemporaryDirectory(prefix="areal-grading-")
        self._address = str(pathlib.Path(self._directory.name) / "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        """Readable when a new worker has connected: call `welcome`."""
        self.listener.bind(self._address)
        self.listener.listen(64)
        self.alive: list[Worker] = []
        self._attempts = 0
        self._forking = {False: 0, True: 0}  # asked for and not yet here
        self._ready_by = 0.0
        self._nursery = self._start_nursery()

    def welcome(self) -> None:
        """Takes in a worker that has connected; the first thing that it says is its process id and what it is for."""
        connection = Connection(self.listener.accept()[0].detach())
        try:
            if connection.poll(1.0):
                pid, hostile = connection.recv()
                self.alive.append(Worker(connection, pid, hostile))
                self._forking[hostile] -= 1
                self._attempts = 1
                return
        except (EOFError, OSError):
            pass  # it died young; `replenish` notices that it never came
        connection.close()

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
        self.listener.close()  # a worker that has not connected yet finds nobody, and ends
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
