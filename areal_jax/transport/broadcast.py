"""From process 0 of a role to the others.

Every process of a role runs the same programs on the same mesh, so all must decide alike. A sampler's decisions follow
from the trainer's replies and from when weights have been read, a trainer's from the batches; process 0 has these, and
the others get them from it over ZeroMQ: on the host, so that nothing waits for the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import zmq
from jax.experimental import multihost_utils

from areal_jax.transport import messages
from areal_jax.transport.messages import Limits, Reply, Report
from areal_jax.transport.trajectories import Link
from areal_jax.types import Trajectory

END = b""
"""Sent by process 0 when it ends."""


class Broadcast:
    """Messages from process 0, in order, to all others of a jax.distributed cluster."""

    def __init__(self, host: str, timeout_seconds: float = 300.0):
        """All processes create theirs at the same time; `host` is where the others reach process 0.

        Raises ConnectionError if they have not found each other after timeout_seconds.
        """
        self.leads = jax.process_index() == 0
        self._sequence = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB if self.leads else zmq.SUB)
        self._socket.set(zmq.SNDHWM, 0)  # no bound: a message that is dropped would stop the group
        self._socket.set(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port("tcp://*") if self.leads else 0
        port = int(multihost_utils.broadcast_one_to_all(np.int32(port)))
        if self.leads:
            self._await_others(time.monotonic() + timeout_seconds)
        else:
            self._socket.connect(f"tcp://{host}:{port}")
            self._socket.subscribe(b"")

    def send(self, data: bytes) -> None:
        """By process 0, to all others."""
        self._sequence += 1
        self._socket.send_multipart([str(self._sequence).encode(), data])

    def receive(self) -> bytes:
        """What process 0 sent next. Waits: jax.distributed ends this process if process 0 dies.

        Raises ConnectionError when process 0 has ended, or a message has been lost.
        """
        self._sequence += 1
        number, data = self._socket.recv_multipart()
        if data == END:
            raise ConnectionError("process 0 has ended; its log says why")
        if int(number) != self._sequence:
            raise ConnectionError(f"message {self._sequence} of process 0 was lost: {int(number)} came; start it again")
        return data

    def close(self) -> None:
        if self.leads:
            self.send(END)
        self._context.destroy(linger=1000)

    def _await_others(self, deadline: float) -> None:
        others = jax.process_count() - 1
        for found in range(others):
            if not self._socket.poll(timeout=max(0, int(1000 * (deadline - time.monotonic())))):
                raise ConnectionError(f"{others - found} of {others} processes have not come")
            self._socket.recv()  # a subscription


def agree(broadcast: Broadcast | None, value: Any) -> Any:
    """Process 0's value, which JSON must be able to carry, in all processes; None is a single process."""
    if broadcast is None:
        return value
    if broadcast.leads:
        broadcast.send(json.dumps(value).encode())
        return value
    return json.loads(broadcast.receive())


def share_batch(broadcast: Broadcast | None, batch: Sequence[Trajectory]) -> None:
    """From process 0, for `receive_batch`."""
    if broadcast is None:
        return
    agree(broadcast, len(batch))
    for trajectory in batch:
        broadcast.send(messages.encode(trajectory))


def receive_batch(broadcast: Broadcast, limits: Limits) -> list[Trajectory]:
    return [messages.decode_trajectory(broadcast.receive(), limits) for _ in range(agree(broadcast, None))]


class LeadingLink:
    """Process 0's link to the trainer; the others hear every reply."""

    def __init__(self, link: Link, broadcast: Broadcast):
        self._link, self._broadcast = link, broadcast

    def exchange(self, report: Report) -> Reply:
        reply = self._link.exchange(report)
        self._broadcast.send(messages.encode(reply))
        return reply

    def close(self) -> None:
        self._link.close()


class FollowingLink:
    """The link of any other process: what it would report is what process 0 reports."""

    def __init__(self, broadcast: Broadcast, limits: Limits):
        self._broadcast, self._limits = broadcast, limits

    def exchange(self, report: Report) -> Reply:
        return messages.decode_reply(self._broadcast.receive(), self._limits)

    def close(self) -> None:
        pass
