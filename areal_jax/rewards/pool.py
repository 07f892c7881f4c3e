"""Symbolic grading in worker processes that can be killed, so that no answer can hang, eat or stall anything else.

Questions wait in two lines, each with workers of its own. What looks as if it might take for ever (towers of powers,
factorials, deep nesting, sheer length), and what has taken a harmless worker longer than SLICE, is graded in the second
line: at a lower priority, in turns of SLICE while others wait, and given up `timeout_seconds` after it came there.
So every grade is back in bounded time, and ordinary ones hardly notice the others.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import re
import threading
import time
from multiprocessing.connection import wait
from typing import Any

from areal_jax.rewards.math import Question
from areal_jax.rewards.workers import Worker, Workers, resident_bytes

WATCH = 0.05  # seconds between two looks at the memory of busy workers
SLICE = 0.25  # seconds; ordinary grades take a few thousandths

_SUSPICIOUS = re.compile(
    r"(?:\d{3}|\))\s*!|\^[^^]{0,40}\^|\w\*\*[^*]{1,40}\*\*\w|\^\s*\{?\s*-?\d{3,}|\d{40,}|\\(?:int|sum|prod|lim)"
)


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """The keys of `config.reward` that bound the pool."""

    workers: int = 2
    """Harmless questions graded at once, at least 1; one more process is kept warm, and half as many (at least one)
    take the hostile ones."""
    timeout_seconds: float = 2.0
    memory_mb: int = 1024
    """Of one worker, beside what it starts with; one that takes more is killed."""


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
    future: concurrent.futures.Future[bool | None]
    deadline: float = math.inf
    """When it is given up; of questions in the second line."""
    deaths: int = 0
    """Workers that died over it. The first may have been killed by somebody else: it is asked once more."""


class GradingPool:
    """Starts with the first question. `close` ends its processes; so does the death of this one."""

    def __init__(self, config: PoolConfig):
        if config.workers < 1:
            raise ValueError(f"workers is {config.workers}: expected at least 1")
        self._config = config
        self._at_once = {False: config.workers, True: max(1, config.workers // 2)}
        self._lock = threading.Lock()  # guards _asked, _closing and _error
        self._asked: collections.deque[_Job] = collections.deque()
        self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._lines: dict[bool, collections.deque[_Job]] = {False: collections.deque(), True: collections.deque()}

    def ask(self, question: Question) -> concurrent.futures.Future[bool | None]:
        """The verdict, once there is one; None if the grade timed out or was killed. An exception says that the pool
        itself has failed. Raises RuntimeError when it is closed, or has failed before."""
        job = _Job(question, looks_hostile(question), concurrent.futures.Future())
        with self._lock:
            if self._closing:
                raise RuntimeError("the grading pool is closed")
            if self._error is not None:
                raise RuntimeError(f"the grading pool has failed: {self._error}") from self._error
            self._asked.append(job)
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe()
                os.set_blocking(self._wake_read, False)
                os.set_blocking(self._wake_write, False)
                self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
                self._thread.start()
        self._wake()
        return job.future

    def close(self) -> None:
        """Ends the processes; unanswered questions are cancelled."""
        with self._lock:
            first, self._closing = not self._closing, True
        if self._thread is not None and first:
            self._wake()
            self._thread.join()
            os.close(self._wake_write)
            os.close(self._wake_read)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self._wake_write, b"x")

    # --- the thread ---

    def _run(self) -> None:
        error: BaseException = concurrent.futures.CancelledError("the grading pool is closed")
        workers = None
        try:
            spare = 1
            wanted = self._at_once | {False: self._at_once[False] + spare}
            workers = Workers(wanted, self._config.memory_mb, self._config.timeout_seconds)
            self._serve(workers)
        except Exception as failure:  # top of the thread: whoever waits for a grade, or asks for one, hears of it
            error = failure
        self._fail(error, workers)
        if workers is not None:
            workers.close()

    def _serve(self, workers: Workers) -> None:
        while not self._closing:
            workers.replenish()
            sources: list[Any] = [self._wake_read, *workers.sources(), *(w.connection for w in workers.alive)]
            ready = wait(sources, self._patience(workers))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            for worker in [w for w in workers.alive if w.connection in ready]:
                self._heard(worker, workers)
            workers.welcome(ready)
            self._take_in()
            self._give_up_late(workers)
            self._dispatch(workers)

    def _patience(self, workers: Workers) -> float:
        """Seconds until something may be late."""
        now = time.monotonic()
        busy = [w for w in workers.alive if w.job is not None]
        due = [w.started + SLICE for w in busy if now < w.started + SLICE]
        due += [w.job.deadline for w in busy]
        due += [job.deadline for job in self._lines[True]]
        return max(0.0, min([WATCH if busy else 0.5, *(d - now for d in due)]))

    def _take_in(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, collections.deque()
        for job in asked:
            self._line_up(job)

    def _line_up(self, job: _Job) -> None:
        if job.hostile and math.isinf(job.deadline):
            job.deadline = time.monotonic() + self._config.timeout_seconds
        self._lines[job.hostile].append(job)

    def _heard(self, worker: Worker, workers: Workers) -> None:
        """A worker has answered, or died of what it was asked."""
        job, worker.job = worker.job, None
        try:
            verdict = worker.connection.recv()
        except (EOFError, OSError):
            workers.discard(worker)
            if job is None:
                return
            job.deaths += 1
            if job.deaths == 1:
                self._lines[job.hostile].appendleft(job)
                return
            verdict = None
        if job is not None:
            job.future.set_result(verdict)

    def _give_up_late(self, workers: Workers) -> None:
        now, line = time.monotonic(), self._lines[True]
        if not workers.have_come[True]:  # nobody could have graded them yet: the clock starts with the first worker
            for waiting in line:
                waiting.deadline = now + self._config.timeout_seconds
        for worker in [w for w in workers.alive if w.job is not None]:
            job: _Job = worker.job
            over = now >= worker.started + SLICE
            hungry = resident_bytes(worker.pid) > worker.inherited + (self._config.memory_mb << 20)
            if now >= job.deadline or hungry:
                workers.discard(worker)
                job.future.set_result(None)
            elif over and (not job.hostile or line):
                workers.discard(worker)
                job.hostile = True
                self._line_up(job)
        for late in [j for j in line if now >= j.deadline]:
            line.remove(late)
            late.future.set_result(None)

    def _dispatch(self, workers: Workers) -> None:
        for hostile, line in self._lines.items():
            mine = [w for w in workers.alive if w.hostile == hostile]
            idle = [w for w in mine if w.job is None]
            room = self._at_once[hostile] - (len(mine) - len(idle))
            while line and idle and room > 0:
                worker, job = idle.pop(), line.popleft()
                q = job.question
                try:
                    worker.connection.send((q.reference, q.answer, q.boxed))
                except OSError:  # it died idle; ask another
                    workers.discard(worker)
                    line.appendleft(job)
                    continue
                worker.job, worker.started = job, time.monotonic()
                room -= 1

    def _fail(self, error: BaseException, workers: Workers | None) -> None:
        """Everyone who waits hears of it."""
        with self._lock:
            self._error = error
        self._take_in()
        jobs = [w.job for w in workers.alive if w.job is not None] if workers is not None else []
        for job in [*jobs, *self._lines[False], *self._lines[True]]:
            job.future.set_exception(error)
