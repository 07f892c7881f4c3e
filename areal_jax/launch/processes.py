"""Child processes that cannot outlive their parent, and the lines that they say."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

SUPERVISED = "AREAL_JAX_SUPERVISED"
CORES = "AREAL_JAX_CORES"
TERMINATE_SECONDS = 5.0
MEMORY_SHARE = 0.92
"""Of a GPU's memory, for jax (its own default is 0.75)."""


class Child:
    """A process of ours. Its standard input is a pipe that only its parent holds: when that closes, it ends itself.

    Standard output carries one JSON record a line, put into `events` as (name, record); what is not JSON, and standard
    error, go to the log file.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log_path: pathlib.Path,
        events: queue.Queue[tuple[str, dict[str, Any]]],
    ):
        self.name = name
        self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment, SUPERVISED: "1"},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
        )
        self._reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. All it said has been read once it is not None."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=5)
        return code

    def end(self) -> None:
        """Terminates it, and kills it if it does not go (SIGTERM is swallowed under jax.distributed)."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(timeout=5)
        self._log.close()

    def _read(self, events: queue.Queue[tuple[str, dict[str, Any]]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                record = json.loads(line)
            except ValueError:
                self._log.write(line)
                continue
            events.put((self.name, record))


def supervised() -> bool:
    """Whether this process is a Child."""
    return os.environ.get(SUPERVISED) == "1"


def enter_child() -> None:
    """First thing in any process: on a GPU, lets jax have what `--dry_run` counts on. In a supervised child it also
    takes its cores, and ends with its parent."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))
    if not supervised():
        return
    if os.environ.get(CORES):
        os.sched_setaffinity(0, [int(c) for c in os.environ[CORES].split(",")])

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)  # the parent is gone, however it went

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
