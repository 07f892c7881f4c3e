"""From process 0 of a role to the others.

Every process of a role runs the same programs on the same mesh, so all must decide alike. A sampler's decisions follow
from the trainer's replies and from when weights have been read, a trainer's from the batches; process 0 has these, and
the others get them from it over ZeroMQ: on the host, so that nothing waits for the device.
"""

from __future__ import annotations

import json
import socket
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

OPTIONS = {
    zmq.SNDHWM: 0,  # no bound: a message that is dropped would stop the role
    zmq.RCVHWM: 0,
    zmq.HEARTBEAT_IVL: 10_000,  # milliseconds; a connection that is dead is noticed though nobody sends
    zmq.HEARTBEAT_TIMEOUT: 60_000,
    zmq.TCP_KEEPALIVE: 1,
}


class Broadcast:
    """Messages from process 0, in order, to all others of a jax.distributed cluster."""

    def __init__(self, host: str, timeout_seconds: float = 300.0):
        """All processes create theirs at the same time; `host` is where the others reach process 0.

        Raises ConnectionError if they have not found each other after timeout_seconds.
        """
        self.leads = jax.process_index() == 0
        self._channel = Channel(host if self.leads else None)
        port = int(multihost_utils.broadcast_one_to_all(np.int32(self._channel.port)))
        if self.leads:
            self._channel.await_others(jax.process_count() - 1, timeout_seconds)
        else:
            self._channel.connect(host, port)
        self.meet("begin")  # which also compiles what it takes, while the role warms up

    def meet(self, where: str) -> None:
        """Waits for all processes to get here, and for what the device is doing."""
        multihost_utils.sync_global_devices(where)

    def send(self, data: bytes) -> None:
        """By process 0, to all others. Raises ConnectionError when one of them has lost the connection."""
        self._channel.send(data)

    def receive(self) -> bytes:
        """What process 0 sent next; as in Channel."""
        return self._channel.receive()

    def close(self) -> None:
        self._channel.close()


class Channel:
    """The host's side of a Broadcast: one sender, any number of receivers that must all be there."""

    def __init__(self, host: str | None):
        """host: the interface that the sender listens on, at the port `port`; None makes a receiver."""
        self._sends = host is not None
        self._sequence = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB if self._sends else zmq.SUB)
        for option, value in OPTIONS.items():
            self._socket.set(option, value)
        self.port = 0
        if host is not None:
            self._socket.set(zmq.XPUB_VERBOSER, 1)  # every receiver's coming and going is told, not the first's alone
            self.port = self._socket.bind_to_random_port(f"tcp://{socket.gethostbyname(host)}")

    def connect(self, host: str, port: int) -> None:
        """By a receiver."""
        self._socket.connect(f"tcp://{host}:{port}")
        self._socket.subscribe(b"")

    def await_others(self, others: int, timeout_seconds: float) -> None:
        """By the sender: until so many receivers are there. Raises ConnectionError if they do not come in time."""
        deadline = time.monotonic() + timeout_seconds
        for found in range(others):
            if not self._socket.poll(timeout=max(0, int(1000 * (deadline - time.monotonic())))):
                raise ConnectionError(f"{others - found} of {others} processes have not come")
            self._socket.recv()  # a subscription

    def send(self, data: bytes) -> None:
        """To all receivers. Raises ConnectionError when one has gone, or is back after it lost the connection: it may
        have missed something."""
        if self._socket.poll(timeout=0):
            raise ConnectionError("a process has lost its connection to process 0; its log may say why")
        self._send(data)

    def _send(self, data: bytes) -> None:
        self._sequence += 1
        self._socket.send_multipart([str(self._sequence).encode(), data])

    def receive(self) -> bytes:
        """What was sent next. Waits: jax.distributed ends this process if process 0 dies.

        Raises ConnectionError when the sender has ended, or a message has been lost.
        """
        self._sequence += 1
        number, data = self._socket.recv_multipart()
        if data == END:
            raise ConnectionError("process 0 has ended; its log says why")
        if int(number) != self._sequence:
            raise ConnectionError(f"message {self._sequence} of process 0 was lost: {int(number)} came; start it again")
        return data

    def close(self) -> None:
        if self._sends:
            self._send(END)
        self._context.destroy(linger=1000)


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
