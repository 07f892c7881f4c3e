"""A role with several processes: one `jax.distributed` cluster, of that role alone."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import jax

from areal_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """This process's place among the processes of its role; the names are those of jax.distributed.initialize."""

    coordinator_address: str = ""
    """'host:port', on process 0's machine."""
    num_processes: int = 1
    process_id: int = 0

    @property
    def host(self) -> str:
        """Where process 0 is reached."""
        return self.coordinator_address.rpartition(":")[0]

    def check(self, role: str) -> None:
        """Raises UserError for values that do not go together."""
        n, i, address = self.num_processes, self.process_id, self.coordinator_address
        if not 0 <= i < n:
            raise UserError(f"--process_id is {i} and --num_processes {n}: expected 0 to {n - 1}")
        if n == 1:
            if address:
                raise UserError(f"--coordinator_address is {address!r} and --num_processes 1: set both, or neither")
            return
        if not role:
            raise UserError(
                f"--num_processes is {n} and --role is not set: start the processes of each role by hand, with "
                "--role=trainer and --role=sampler"
            )
        if not (self.host and address.rpartition(":")[2].isdigit()):
            raise UserError(
                f"--coordinator_address is {address!r} and --num_processes {n}: expected HOST:PORT, a free port on the "
                "machine of process 0, the same for all processes"
            )

    def join(self) -> None:
        """Connects to the other processes, before anything else is done with jax. Raises UserError if they do not
        come."""
        if self.num_processes == 1:
            return
        try:
            jax.distributed.initialize(self.coordinator_address, self.num_processes, self.process_id)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which jax.distributed would swallow
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"process {self.process_id} of {self.num_processes} found no cluster at {self.coordinator_address}: "
                f"{error}"
            ) from error

    def leave_failed(self, code: int = 1) -> None:
        """Ends a process that has failed at once, without waiting for the others at jax's exit: they see it go, and
        end too."""
        if self.num_processes > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
