"""One process at a time in a directory that several may find empty and fill."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def exclusive(directory: pathlib.Path) -> Iterator[None]:
    """Makes the directory and holds it; another process that asks for it waits. One that may not be written to has been
    filled, and is not held. Raises OSError if it cannot be made."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        yield
        return
    with open(directory / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or the process is gone
        yield
