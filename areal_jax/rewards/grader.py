"""The processes of the grading pool: a nursery that has imported the symbolic grader, and the workers it forks.

    python -m areal_jax.rewards.grader ADDRESS MEMORY_MB SECONDS

The nursery forks a worker for every line on its standard input, which says `harmless` or `hostile` (the questions that
the worker is for), and ends when that closes. A worker connects to ADDRESS, says its process id and which it is, and
answers (reference, answer, boxed) with True or False until the connection closes.
Forking takes milliseconds; importing sympy takes a second. Nothing here imports jax.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import signal
import sys
from multiprocessing.connection import Client

STACK_FRAMES = 3000  # a parser that recurses deeper raises RecursionError: the answer is wrong


def judge(reference: str, answer: str, boxed: bool) -> bool:
    """Whether math-verify finds the answer equal to the reference."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    # units stay: it would take 2ab for 2 of something
    normal = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    forms = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal),
        math_verify.ExprExtractionConfig(),
    ]
    gold = math_verify.parse(f"\\boxed{{{reference}}}", forms, parsing_timeout=None)
    found = math_verify.parse(
        f"\\boxed{{{answer}}}" if boxed else answer, forms, parsing_timeout=None, raise_on_error=True
    )
    return bool(math_verify.verify(gold, found, timeout_seconds=None))


def work(address: str, memory_mb: int, seconds: float, hostile: bool) -> None:
    """A worker's life. It ends itself should a grade take much longer than `seconds` of processor time: its parent,
    which kills it then, may be gone."""
    with Client(address) as connection:
        try:
            os.nice(10 if hostile else 5)  # decoding goes first
            # its parent kills it at memory_mb; this is for what asks for far more at once, which ends as "not equal"
            _limit(resource.RLIMIT_AS, _address_space() + 4 * (memory_mb << 20))
            _limit(resource.RLIMIT_CORE, 0)
            sys.setrecursionlimit(STACK_FRAMES)
        except (OSError, ValueError) as error:
            connection.send((os.getpid(), hostile, str(error)))
            return
        connection.send((os.getpid(), hostile, ""))
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            _limit(resource.RLIMIT_CPU, math.ceil(sum(os.times()[:2]) + seconds) + 2)
            try:
                verdict = judge(*question)
            except Exception:  # math-verify and sympy raise anything on text that is no mathematics: it is not equal
                verdict = False
            connection.send(verdict)


def _limit(what: int, value: int) -> None:
    """Sets a soft limit, no higher than the hard one that this process was given."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    """Bytes mapped by this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main(address: str, memory_mb: int, seconds: float) -> None:
    import logging

    import math_verify  # noqa: F401 - workers inherit it
    import sympy  # noqa: F401

    logging.disable(logging.CRITICAL)  # it warns about every text that it cannot parse
    with contextlib.suppress(OSError):  # a sampler may be pinned to one core, which is for decoding
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    judge("x+1", "1+x", boxed=True)  # what is imported late is imported now
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            status = 1
            try:
                os.close(0)
                work(address, memory_mb, seconds, hostile=line == b"hostile\n")
                status = 0
            finally:
                os._exit(status)
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)  # the parent is gone, perhaps without clearing up


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
