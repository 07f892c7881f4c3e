"""A sampler's turns, with the trainer played by the test: what it asks for, when it swaps, what it holds back."""

import dataclasses
import threading

import numpy as np
import pytest

from areal_jax.rollout.programs import make_program
from areal_jax.rollout.sampler import Sampler
from areal_jax.rollout.weight_loader import WeightLoader
from areal_jax.transport.messages import Reply
from areal_jax.transport.weights import MemoryChannel
from areal_jax.types import Lease, PolicySnapshot, Prompt
from tests.engine_test import CONFIG, MODEL, PARAMS
from tests.helpers import Graded

SLOTS = CONFIG.slots


class Channel(MemoryChannel):
    """Reading waits while it is held."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def load(self, version, abstract_params):
        assert self.open.wait(20)
        return super().load(version, abstract_params)


class Trainer:
    """Answers every report with what the test has put up."""

    def __init__(self):
        self.reports, self.leases, self.version, self.run, self.credits = [], [], 0, "run", 100

    def exchange(self, report):
        self.reports.append(report)
        leases, self.leases = self.leases, []
        return Reply(report.sequence, self.run, self.version, tuple(leases), self.credits, False)

    def returned(self):
        return {t.sample_id: t for r in self.reports for t in r.trajectories}


def lease(ids, min_version=0, pinned=None):
    return Lease(Prompt(0, np.array([5, 6], np.int32), "", ""), tuple(ids), min_version, pinned, 1.0, 18)


@pytest.fixture
def start():
    samplers = []

    def make(**changes):
        trainer, channel = Trainer(), Channel()
        channel.publish(PolicySnapshot(0, PARAMS[0]))
        program = make_program(MODEL, dataclasses.replace(CONFIG, **changes))
        sampler = Sampler("s", program, channel, Graded, seed=0)
        sampler.start(PolicySnapshot(-1, PARAMS[5]))
        sampler.connect(trainer)
        samplers.append((sampler, channel))
        return sampler, trainer, channel

    yield make
    for sampler, channel in samplers:
        channel.open.set()
        sampler.close()


def until(condition, sampler, turns=2000):
    for _ in range(turns):
        if condition():
            return
        sampler.turn()
    pytest.fail(f"not within {turns} turns")


def publish(trainer, channel, version):
    channel.publish(PolicySnapshot(version, PARAMS[version]))
    trainer.version = version


def test_samples_go_round_and_more_are_asked_for_than_there_are_slots(start):
    sampler, trainer, _ = start(slots=8)
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    assert trainer.reports[0].want == 8 + 2
    trainer.leases, answered = [lease(range(10))], len(trainer.reports)
    until(lambda: len(trainer.returned()) == 10, sampler)
    back = 0
    for r in trainer.reports[answered + 1 :]:
        back += len(r.trajectories)
        assert r.want == back
    assert trainer.reports[-1].stats.graded == 10


def test_what_the_trainer_has_no_room_for_is_kept_and_keeps_others_from_being_drawn(start):
    sampler, trainer, _ = start()
    trainer.leases, trainer.credits = [lease(range(5)), lease([1 << 31], pinned=0)], 0
    until(lambda: trainer.returned(), sampler)
    for _ in range(60):
        sampler.turn()
    assert list(trainer.returned()) == [1 << 31]  # an evaluation is always taken
    assert trainer.reports[-1].want == 0
    trainer.credits = 2
    sampler.turn()
    sampler.turn()
    assert len(trainer.reports[-1].trajectories) == 2
    until(lambda: len(trainer.returned()) == 6, sampler)
    sampler.turn()
    assert trainer.reports[-1].want == SLOTS + 1


def test_static_batches_ask_for_nothing_until_all_is_done(start):
    sampler, trainer, _ = start(static=True)
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    assert trainer.reports[-1].want == SLOTS
    trainer.leases, answered = [lease(range(4))], len(trainer.reports)
    until(lambda: len(trainer.returned()) == 4, sampler)
    back = 0
    for r in trainer.reports[answered + 1 :]:
        back += len(r.trajectories)
        assert r.want == (SLOTS if back == 4 else 0)


def test_what_is_leased_again_while_it_is_drawn_is_drawn_once(start):
    """A sampler that was silent for too long is given up, and may be given its own samples when it is back."""
    sampler, trainer, _ = start()
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    first = 1 << 31
    for _ in range(2):
        trainer.leases = [lease([0, 1]), lease([first], pinned=0), lease([first + 1], pinned=0)]
        sampler.turn()
    for _ in range(60):
        sampler.turn()
    returned = [t.sample_id for r in trainer.reports for t in r.trajectories]
    assert sorted(returned) == [0, 1, first, first + 1]


def test_it_decodes_while_it_reads_weights_and_says_what_it_reads(start):
    sampler, trainer, channel = start()
    trainer.leases = [lease(range(4))]
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    channel.open.clear()
    publish(trainer, channel, 1)
    until(lambda: len(trainer.returned()) == 4, sampler)  # under version 0, while version 1 is being read
    assert trainer.reports[-1].version == 0
    assert trainer.reports[-1].loading == 1
    channel.open.set()
    until(lambda: trainer.reports[-1].version == 1, sampler)
    assert trainer.reports[-1].loading == -1
    assert trainer.reports[-1].stats.swaps == 2


def test_what_needs_newer_weights_waits_for_them(start):
    sampler, trainer, channel = start()
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    channel.open.clear()
    publish(trainer, channel, 1)
    trainer.leases = [lease(range(2), min_version=1)]
    for _ in range(5):
        sampler.turn()
    assert trainer.reports[-1].want == SLOTS + 1 - 2
    channel.open.set()
    until(lambda: len(trainer.returned()) == 2, sampler)
    for t in trainer.returned().values():
        assert set(t.policy_versions) == {-1, 1}


def test_an_evaluation_is_drawn_with_its_version_whatever_training_does(start):
    sampler, trainer, channel = start()
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    first = 1 << 31
    trainer.leases = [lease([first + i], pinned=1) for i in range(3)] + [lease(range(4))]
    publish(trainer, channel, 1)
    for version in (2, 3):
        sampler.turn()
        publish(trainer, channel, version)
    until(lambda: len(trainer.returned()) == 7, sampler)
    for i, t in trainer.returned().items():
        assert t.evaluation == (i >= first)
        assert not t.evaluation or set(t.policy_versions) == {-1, 1}


def test_weights_for_an_evaluation_alone_are_not_trained_with(start):
    """With injected staleness the trainer announces older weights than it has measured."""
    sampler, trainer, channel = start()
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    channel.publish(PolicySnapshot(2, PARAMS[2]))
    trainer.leases = [lease([1 << 31], pinned=2), lease(range(4))]
    until(lambda: len(trainer.returned()) == 5, sampler)
    assert set(trainer.returned()[1 << 31].policy_versions) == {-1, 2}
    assert all(set(trainer.returned()[i].policy_versions) == {-1, 0} for i in range(4))


def test_an_evaluation_of_weights_that_are_gone_is_dropped(start):
    sampler, trainer, channel = start()
    publish(trainer, channel, 3)
    trainer.leases = [lease([1 << 31], pinned=2), lease([0], min_version=3)]
    until(lambda: 0 in trainer.returned(), sampler)
    assert list(trainer.returned()) == [0]
    assert trainer.reports[-1].want_evaluation == SLOTS + 1


def test_weights_that_wait_for_the_samples_to_finish_are_not_replaced_by_older_ones(start):
    sampler, trainer, channel = start(kv_on_update="finish")
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    trainer.leases = [lease(range(4))]
    sampler.turn()
    publish(trainer, channel, 1)
    publish(trainer, channel, 2)
    channel.publish(PolicySnapshot(1, PARAMS[1]))
    sampler.turn()
    trainer.leases = [lease([1 << 31], pinned=1)]
    until(lambda: len(trainer.returned()) == 5 and trainer.reports[-1].version > 0, sampler)
    assert {r.version for r in trainer.reports} == {-1, 0, 2}
    assert set(trainer.returned()[1 << 31].policy_versions) == {-1, 1}


def test_finish_draws_every_sample_with_one_version(start):
    sampler, trainer, channel = start(kv_on_update="finish")
    until(lambda: trainer.reports and trainer.reports[-1].version == 0, sampler)
    trainer.leases = [lease(range(6))]
    sampler.turn()
    publish(trainer, channel, 1)
    until(lambda: len(trainer.returned()) == 6, sampler)
    versions = [set(t.policy_versions) - {-1} for _, t in sorted(trainer.returned().items())]
    assert all(len(v) == 1 for v in versions)
    assert versions[0] == {0}  # was being drawn when the weights came
    assert versions[5] == {1}  # waited for a slot then


def test_another_run_of_the_trainer_is_served_with_nothing_of_the_last(start):
    sampler, trainer, channel = start()
    publish(trainer, channel, 2)
    trainer.leases = [lease(range(4))]
    until(lambda: trainer.reports and trainer.reports[-1].version == 2, sampler)
    trainer.run, trainer.version = "another", 0
    sampler.turn()
    heard = len(trainer.reports)
    trainer.leases = [lease([7])]
    until(lambda: 7 in trainer.returned(), sampler)
    later = {t.sample_id for r in trainer.reports[heard:] for t in r.trajectories}
    assert later == {7}
    assert set(trainer.returned()[7].policy_versions) == {-1, 0}


def test_the_loader_reads_one_version_at_a_time():
    channel = MemoryChannel()
    channel.publish(PolicySnapshot(4, PARAMS[4]))
    loader = WeightLoader(channel, MODEL.abstract_params)
    assert loader.collect(None) is None
    loader.begin(4)
    assert loader.loading == 4
    with pytest.raises(RuntimeError, match="version 4 is being read"):
        loader.begin(5)
    version, snapshot = loader.collect(None)
    assert (version, snapshot.version, loader.loading) == (4, 4, None)
    loader.begin(9)
    assert loader.collect(None) == (9, None)
    loader.close()
