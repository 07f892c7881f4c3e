"""The queue over ZeroMQ and in memory, message bounds, and the weight channel."""

import dataclasses
import socket
import threading

import jax
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.transport import messages
from areal_jax.transport.messages import Limits, ProtocolError, Reply, Report, SamplerStats
from areal_jax.transport.trajectories import MemoryLink, Once, ZmqLink, ZmqServer
from areal_jax.transport.weights import MemoryChannel, OrbaxChannel, VersionGone, retired_versions
from areal_jax.types import Lease, PolicySnapshot, Prompt, UserError
from tests.helpers import tiny_model, trajectory

LIMITS = Limits(max_message_bytes=1 << 16, max_sequence_length=64)
RNG = np.random.default_rng(0)
LEASE = Lease(Prompt(3, np.array([4, 5], np.int32), "1+2=", "3"), (6, 7), 2, None, 1.0, 9)


def make_report(sequence=1, **changes):
    fields = {
        "sampler": "a", "incarnation": "x", "run": "r", "sequence": sequence,
        "version": 1, "loading": -1, "want": 2, "want_evaluation": 0,
        "trajectories": (trajectory(1, 2, 3, RNG),), "stats": SamplerStats(busy_seconds=1.5),
    }  # fmt: skip
    return Report(**(fields | changes))


def answer(report):
    return Reply(report.sequence, "r", 4, (LEASE,), 10, False)


def assert_same(a, b):
    """Equal dataclasses, arrays by value."""
    for f in dataclasses.fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype
        elif isinstance(x, tuple) and x and dataclasses.is_dataclass(x[0]):
            for p, q in zip(x, y, strict=True):
                assert_same(p, q)
        elif dataclasses.is_dataclass(x):
            assert_same(x, y)
        else:
            assert x == y


def test_messages_round_trip():
    report = make_report()
    assert_same(messages.decode_report(messages.encode(report), LIMITS), report)
    reply = answer(report)
    assert_same(messages.decode_reply(messages.encode(reply), LIMITS), reply)


@given(st.binary(max_size=200))
def test_rubbish_is_refused(data):
    with pytest.raises(ProtocolError):
        messages.decode_report(data, LIMITS)


@pytest.mark.parametrize(
    "bad",
    [
        make_report(trajectories=(trajectory(1, 2, 70, RNG),)),
        make_report(trajectories=(trajectory(1, 2, 3, RNG, loss_mask=np.ones(4, np.float32)),)),
        make_report(trajectories=(trajectory(1, 2, 3, RNG, behaviour_logprobs=np.full(5, np.nan, np.float32)),)),
        make_report(trajectories=(trajectory(1, 2, 3, RNG, reward=float("inf")),)),
        make_report(trajectories=(trajectory(1, 2, 3, RNG, finish_reason="maybe"),)),
        make_report(sampler=""),
        make_report(sampler="x" * 1000),
        make_report(want=-1),
        make_report(want="many"),
        make_report(sampler=5),
        make_report(sequence="z"),
        make_report(stats=SamplerStats(swaps="x")),
        make_report(trajectories=(trajectory("one", 2, 3, RNG),)),
        make_report(trajectories=tuple(trajectory(i, 2, 50, RNG) for i in range(100))),
    ],
)
def test_reports_out_of_bounds_are_refused(bad):
    with pytest.raises(ProtocolError):
        messages.decode_report(messages.encode(bad), LIMITS)


def test_a_repeated_report_takes_effect_once_and_an_older_one_not_at_all():
    seen = []
    once = Once(lambda r: (seen.append(r.sequence), answer(r))[1])
    first = once(make_report(1))
    assert once(make_report(1)) is first
    once(make_report(2))
    assert once(make_report(1)) is None
    once(make_report(1, incarnation="new"))
    assert seen == [1, 2, 1]


def test_memory_link_delivers():
    assert MemoryLink(answer).exchange(make_report(5)).sequence == 5


def test_zeromq_delivers_resends_and_survives_rubbish():
    calls = []
    release = threading.Event()

    def slow_once(report):
        calls.append(report.sequence)
        if len(calls) == 1:
            release.wait(1.0)  # longer than the link waits: it sends again
        return answer(report)

    server = ZmqServer(slow_once, "tcp://127.0.0.1:0", LIMITS)
    try:
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(server.address)
        stranger.send(b"rubbish")
        stranger.send_multipart([b"too", b"many"])
        link = ZmqLink(server.address, LIMITS, resend_seconds=0.3)
        for sequence in (1, 2, 3):
            assert_same(link.exchange(make_report(sequence)), answer(make_report(sequence)))
        assert calls == [1, 2, 3]
        assert server.refused == 2
        server.check()
        link.close()
        stranger.close(linger=0)
    finally:
        server.close()


def test_an_error_in_the_handler_reaches_the_main_loop():
    def broken(report):
        raise KeyError("boom")

    server = ZmqServer(broken, "tcp://127.0.0.1:0", LIMITS)
    link = ZmqLink(server.address, LIMITS, resend_seconds=0.1, give_up_seconds=0.3)
    with pytest.raises(ConnectionError, match="has not answered"):
        link.exchange(make_report())
    with pytest.raises(KeyError, match="boom"):
        server.check()
    link.close()
    server.close()


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on tcp://127.0.0.1:{port}.*transport.port"):
            ZmqServer(answer, f"tcp://127.0.0.1:{port}", LIMITS)


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_versions_in_use_and_the_newest_two_are_never_retired(available, keep):
    gone = set(retired_versions(available, keep))
    assert gone <= available
    assert not gone & keep
    assert not gone & set(sorted(available)[-2:])
    assert all(v < k for v in gone for k in keep)


@pytest.mark.parametrize("kind", ["memory", "orbax"])
def test_weights_arrive_as_they_were_published(kind, tmp_path):
    model = tiny_model()
    channel = MemoryChannel() if kind == "memory" else OrbaxChannel(tmp_path)
    params = {v: model.init_params(v) for v in range(4)}
    for v, p in params.items():
        channel.publish(PolicySnapshot(v, p))
    published = jax.tree.map(np.asarray, params)
    for p in params.values():  # the trainer donates its parameters to the next step
        jax.tree.map(lambda x: x.delete(), p)
    reader = channel if kind == "memory" else OrbaxChannel(tmp_path)
    for v in range(4):
        loaded = reader.load(v, model.abstract_params)
        assert loaded.version == v
        jax.tree.map(np.testing.assert_array_equal, loaded.params, published[v])
    channel.retire(keep={1})
    with pytest.raises(VersionGone):
        reader.load(0, model.abstract_params)
    reader.load(1, model.abstract_params)
    if kind == "orbax":
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["1", "2", "3"]
        OrbaxChannel(tmp_path, fresh=True)
        assert not list(tmp_path.iterdir())


def test_weights_are_laid_out_for_the_reader(tmp_path):
    from areal_jax import sharding

    mesh = sharding.make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    writer, reader = tiny_model(mesh=mesh), tiny_model()
    params = writer.init_params(0)
    OrbaxChannel(tmp_path).publish(PolicySnapshot(0, params))
    loaded = OrbaxChannel(tmp_path).load(0, reader.abstract_params).params
    gate = loaded["layers"][0]["mlp"]["gate"]
    assert len(gate.sharding.device_set) == 1
    np.testing.assert_array_equal(gate, params["layers"][0]["mlp"]["gate"])
