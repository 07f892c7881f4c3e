"""Counts XLA compilations, so that one after warm-up is seen: a run should compile while warming up and not after."""

from __future__ import annotations

import logging

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

log = logging.getLogger(__name__)


class CompileCounter:
    """Counts from its creation; after `warm` every compilation is a logged warning and counts in `after_warmup`."""

    def __init__(self) -> None:
        self.total = 0
        self.after_warmup = 0
        self._warm = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def warm(self) -> None:
        """Warm-up is over."""
        self._warm = True

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != COMPILE_EVENT:
            return
        self.total += 1
        if self._warm:
            self.after_warmup += 1
            log.warning("compiled after warm-up (%.2f s): %s", duration_secs, details.get("fun_name", "a function"))
