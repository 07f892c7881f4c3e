"""Symbolic grading in worker processes that can be killed, so that no answer can hang, eat or stall anything else.

Questions wait in two lines, each with workers of its own. What looks as if it might take for ever (towers of powers,
factorials, deep nesting, sheer length) is graded at the lowest priority, and is given up `timeout_seconds` after it was
asked even if its turn has not come. So every grade is back in bounded time, and ordinary ones hardly notice the others.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait

from areal_jax.rewards.math import Question

STARTUP_SECONDS = 60.0
MAX_NURSERIES = 5  # deaths of the nursery before the pool gives up

_SUSPICIOUS = re.compile(
    r"!|\*\*|\^[^^]{0,40}\^|\^\s*\{?\s*-?\d{3,}|\d{40,}|\\(?:int|sum|prod|lim|binom|infty|Gamma)|[^\x00-\x7f]"
)


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """The keys of `config.reward` that bound the pool."""

    workers: int = 2
    """Harmless questions graded at once, at least 1; one more process is kept warm, and half as many (at least one)
    take the hostile ones."""
    timeout_seconds: float = 2.0
    memory_mb: int = 1024
    """Of one worker, beside what it starts with."""


def looks_hostile(question: Question) -> bool:
    """Whether a question goes into the line of those that may take for ever."""
    text = question.answer
    if len(text) > (300 if question.boxed else 2000) or _SUSPICIOUS.search(text):
        return True
    depth = deepest = 0
    for character in text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest > 10


@dataclasses.dataclass
class _Job:
    question: Question
    hostile: bool
    asked: float
    future: concurrent.futures.Future[bool | None]
    deaths: int = 0
    """Workers that died over it. The first may have been killed by somebody else: it is asked once more."""


@dataclasses.dataclass
class _Worker:
    connection: Connection
    pid: int
    hostile: bool
    """Which line it serves."""
    job: _Job | None = None
    started: float = 0.0


class GradingPool:
    """Starts with the first question. `close` ends its processes; so does the death of this one."""

    def __init__(self, config: PoolConfig):
        if config.workers < 1:
            raise ValueError(f"workers is {config.workers}: expected at least 1")
        self._config = config
        self._lock = threading.Lock()  # guards _asked, _closing and _error
        self._asked: collections.deque[_Job] = collections.deque()
        self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # below: the thread's own
        self._lines: dict[bool, collections.deque[_Job]] = {False: collections.deque(), True: collections.deque()}
        self._workers: list[_Worker] = []
        self._forking = {False: 0, True: 0}
        self._nurseries = 0
        self._ready_by = 0.0

    def ask(self, question: Question) -> concurrent.futures.Future[bool | None]:
        """The verdict, once there is one; None if the grade timed out or was killed. An exception says that the pool
        itself has failed."""
        job = _Job(question, looks_hostile(question), time.monotonic(), concurrent.futures.Future())
        with self._lock:
            if self._closing or self._error is not None:
                raise RuntimeError("the grading pool is closed") from self._error
            self._asked.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
                self._thread.start()
        self._wake()
        return job.future

    def close(self) -> None:
        """Ends the processes; unanswered questions are cancelled."""
        with self._lock:
            self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it is gone
            os.write(self._wake_write, b"x")

    # --- the thread ---

    def _run(self) -> None:
        error: BaseException = concurrent.futures.CancelledError("the grading pool is closed")
        try:
            with tempfile.TemporaryDirectory(prefix="areal-grading-") as directory:
                address = str(pathlib.Path(directory) / "socket")
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(address)
                    listener.listen(64)
                    self._serve(listener, address)
        except Exception as failure:  # top of the thread: whoever waits for a grade, or asks for one, hears of it
            error = failure
        self._fail(error)
        for worker in list(self._workers):
            self._discard(worker)
        os.close(self._wake_read)

    def _serve(self, listener: socket.socket, address: str) -> None:
        self._start_nursery(address)
        try:
            while not self._closing:
                ready = wait([self._wake_read, listener, *(w.connection for w in self._workers)], self._patience())
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                if listener in ready:
                    self._welcome(listener)
                for worker in [w for w in self._workers if w.connection in ready]:
                    self._heard(worker)
                self._take_in()
                self._give_up_late()
                self._dispatch()
                self._replenish(address)
        finally:
            self._nursery.kill()
            self._nursery.wait()

    def _welcome(self, listener: socket.socket) -> None:
        """A worker has connected; the first thing that it says is its process id and its line."""
        connection = Connection(listener.accept()[0].detach())
        try:
            if connection.poll(1.0):
                pid, hostile = connection.recv()
                self._workers.append(_Worker(connection, pid, hostile))
                self._forking[hostile] -= 1
                self._nurseries = 1
        except (EOFError, OSError):
            connection.close()  # it died young; `_ready_by` makes up for it

    def _patience(self) -> float:
        """Seconds until something may be late."""
        now = time.monotonic()
        due = [w.started + self._config.timeout_seconds for w in self._workers if w.job is not None]
        if self._lines[True]:
            due.append(self._lines[True][0].asked + self._config.timeout_seconds)
        return max(0.0, min([0.5, *(d - now for d in due)]))

    def _take_in(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, collections.deque()
        for job in asked:
            self._lines[job.hostile].append(job)

    def _heard(self, worker: _Worker) -> None:
        """A worker has answered, or died of what it was asked."""
        job, worker.job = worker.job, None
        try:
            verdict = worker.connection.recv()
        except (EOFError, OSError):
            self._discard(worker)
            if job is None:
                return
            job.deaths += 1
            if job.deaths == 1:
                self._lines[job.hostile].appendleft(job)
                return
            verdict = None
        if job is not None:
            job.future.set_result(verdict)

    def _give_up_late(self) -> None:
        now, limit = time.monotonic(), self._config.timeout_seconds
        for worker in list(self._workers):
            job = worker.job
            if job is not None and now >= (job.asked if job.hostile else worker.started) + limit:
                self._discard(worker)
                job.future.set_result(None)
        line = self._lines[True]
        while line and now >= line[0].asked + limit:
            line.popleft().future.set_result(None)

    def _discard(self, worker: _Worker) -> None:
        _kill(worker.pid)
        worker.connection.close()
        self._workers.remove(worker)

    def _dispatch(self) -> None:
        for hostile, line in self._lines.items():
            mine = [w for w in self._workers if w.hostile == hostile]
            idle = [w for w in mine if w.job is None]
            room = self._at_once(hostile) - (len(mine) - len(idle))
            while line and idle and room > 0:
                worker, job = idle.pop(), line.popleft()
                worker.job, worker.started = job, time.monotonic()
                q = job.question
                try:
                    worker.connection.send((q.reference, q.answer, q.boxed))
                    room -= 1
                except OSError:  # it died idle; ask another
                    worker.job = None
                    self._discard(worker)
                    line.appendleft(job)

    def _at_once(self, hostile: bool) -> int:
        return max(1, self._config.workers // 2) if hostile else self._config.workers

    def _replenish(self, address: str) -> None:
        """Keeps the workers of both lines alive, and a warm spare for the harmless one."""
        if self._nursery.poll() is not None or (any(self._forking.values()) and time.monotonic() > self._ready_by):
            if self._nurseries >= MAX_NURSERIES:
                raise RuntimeError(
                    f"the grading processes cannot be started ({MAX_NURSERIES} attempts); is math-verify installed?"
                )
            self._nursery.kill()
            self._nursery.wait()
            self._forking = {False: 0, True: 0}
            self._start_nursery(address)
        for hostile in (False, True):
            wanted = self._at_once(hostile) + (0 if hostile else 1)
            missing = wanted - sum(w.hostile == hostile for w in self._workers) - self._forking[hostile]
            if missing > 0:
                assert self._nursery.stdin is not None
                with contextlib.suppress(OSError):  # it has just died: the next turn sees that
                    self._nursery.stdin.write((b"hostile\n" if hostile else b"harmless\n") * missing)
                    self._nursery.stdin.flush()
                    self._forking[hostile] += missing
                    self._ready_by = time.monotonic() + STARTUP_SECONDS

    def _start_nursery(self, address: str) -> None:
        self._nurseries += 1
        c = self._config
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "areal_jax.rewards.grader", address, str(c.memory_mb), str(c.timeout_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=pathlib.Path(__file__).parents[2],  # where the package is found
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
        )

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
        self._take_in()
        jobs = [w.job for w in self._workers if w.job is not None] + [*self._lines[False], *self._lines[True]]
        for worker in self._workers:
            worker.job = None
        for line in self._lines.values():
            line.clear()
        for job in jobs:
            job.future.set_exception(error)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
