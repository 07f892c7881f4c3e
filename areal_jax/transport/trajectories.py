"""The queue's two ends: in memory, and over ZeroMQ between processes.

A sampler's link sends one Report and waits for its Reply. Over ZeroMQ a report that is not answered in time is sent
again with the same number, and the server answers a number it has seen with the reply that it gave: a report takes
effect exactly once, whatever is lost or repeated on the way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from areal_jax.transport import messages
from areal_jax.transport.messages import Limits, Reply, Report
from areal_jax.types import UserError

Handler = Callable[[Report], Reply]

log = logging.getLogger(__name__)


class Link(Protocol):
    """A sampler's end."""

    def exchange(self, report: Report) -> Reply:
        """Delivers the report and returns its reply. Raises ConnectionError when the trainer is gone."""

    def close(self) -> None: ...


class Once:
    """Gives each (sampler, incarnation, sequence) to the handler once; repeats get the stored reply.

    A sampler waits for each reply before its next report, so one stored reply a sampler is enough.
    """

    def __init__(self, handler: Handler):
        self._handler = handler
        self._last: dict[str, tuple[str, Reply]] = {}

    def __call__(self, report: Report) -> Reply | None:
        """None for a report older than the last one answered: its sender no longer waits for it."""
        incarnation, reply = self._last.get(report.sampler, ("", None))
        if incarnation == report.incarnation and reply is not None and report.sequence <= reply.sequence:
            return reply if report.sequence == reply.sequence else None
        reply = self._handler(report)
        self._last[report.sampler] = (report.incarnation, reply)
        return reply


class MemoryLink:
    """A link within one process."""

    def __init__(self, handler: Handler):
        self._handler = handler

    def exchange(self, report: Report) -> Reply:
        return self._handler(report)

    def close(self) -> None:
        pass


class ZmqServer:
    """Answers reports on a ROUTER socket in a thread of its own."""

    def __init__(self, handler: Handler, address: str, limits: Limits):
        """address: 'tcp://host:port'; port 0 takes a free one. Raises UserError if it cannot be bound."""
        self._once, self._limits = Once(handler), limits
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, limits.max_message_bytes)
        try:
            self._socket.bind(address.replace(":0", ":*") if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(
                f"cannot listen on {address}: {error.strerror or error}. Set transport.port to a free port, or to 0 "
                "to have one chosen"
            ) from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.refused = 0
        """Messages refused as malformed or over a bound."""
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="trajectory-server", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Re-raises what ended the server's thread, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)
        self._context.destroy(linger=200)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                if self._socket.poll(timeout=100):
                    self._answer(self._socket.recv_multipart())
        except BaseException as error:  # top of a thread: handed to the main loop by check()
            self._error = error

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.refused += 1
            return
        try:
            report = messages.decode_report(frames[1], self._limits)
        except messages.ProtocolError as error:
            self.refused += 1
            log.warning("refused a message: %s", error)
            return
        reply = self._once(report)
        if reply is not None:
            self._socket.send_multipart([frames[0], messages.encode(reply)])


class ZmqLink:
    """A sampler's DEALER socket."""

    def __init__(self, address: str, limits: Limits, resend_seconds: float = 5.0, give_up_seconds: float = 120.0):
        self._address, self._limits = address, limits
        self._resend_ms, self._give_up_seconds = int(resend_seconds * 1000), give_up_seconds
        self._context = zmq.Context()
        self._socket = self._connect()

    def exchange(self, report: Report) -> Reply:
        data = messages.encode(report)
        deadline = time.monotonic() + self._give_up_seconds
        while time.monotonic() < deadline:
            self._socket.send(data)
            while self._socket.poll(timeout=self._resend_ms):
                reply = messages.decode_reply(self._socket.recv(), self._limits)
                if reply.sequence == report.sequence:
                    return reply
            self._socket.close()
            self._socket = self._connect()
        raise ConnectionError(f"the trainer at {self._address} has not answered for {self._give_up_seconds:.0f} s")

    def close(self) -> None:
        self._context.destroy(linger=200)

    def _connect(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 200)
        socket.set(zmq.MAXMSGSIZE, self._limits.max_message_bytes)
        socket.connect(self._address)
        return socket
