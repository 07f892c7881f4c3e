"""Admission, ledger, coordinator and evaluation board: against references and as state machines."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_jax.rollout.admission import AdmissionGate
from areal_jax.rollout.coordinator import Coordinator, CoordinatorConfig
from areal_jax.rollout.evaluation import FIRST_SAMPLE_ID, EvaluationBoard
from areal_jax.rollout.groups import handle_over_stale
from areal_jax.rollout.ledger import Ledger, LedgerError
from areal_jax.transport.messages import Report, SamplerStats
from areal_jax.types import Prompt
from tests.helpers import trajectory


@given(
    st.integers(1, 9),
    st.sampled_from([0, 1, 2, 5, math.inf]),
    st.lists(st.tuples(st.sampled_from(["start", "refund", "step"]), st.integers(1, 5)), max_size=60),
)
def test_admission_against_a_brute_force_reference(batch, eta, events):
    gate = AdmissionGate(batch, eta)
    started, version, ahead = 0, 0, 0
    for kind, n in events:
        if kind == "step":
            assert gate.take_ahead() == ahead
            version, ahead = version + 1, 0
        elif kind == "refund":
            n = min(n, started)
            gate.refund(n)
            started -= n
        else:
            # Eq. 3, for every one of the n samples: floor((N - 1) / B) <= version + eta
            allowed = all(math.floor((started + k - 1) / batch) <= version + eta for k in range(1, n + 1))
            assert gate.may_start(n, version) == allowed
            if allowed:
                oldest = gate.start(n, version)
                started += n
                assert 0 <= oldest <= version
                trained_at = math.floor((started - 1) / batch)
                ahead = max(ahead, trained_at - version)
                assert math.isinf(eta) or trained_at - oldest <= eta or oldest == 0
            else:
                with pytest.raises(ValueError, match="staleness bound"):
                    gate.start(n, version)
        assert gate.started == started


def test_zero_staleness_admits_one_batch_per_version():
    gate = AdmissionGate(8, 0)
    gate.start(8, 0)
    assert not gate.may_start(1, 0)
    assert gate.start(8, 1) == 1  # and only under the newest weights


STEPS = [("leased", "finished"), ("finished", "queued"), ("queued", "trained"), ("queued", "dropped")]


class LedgerMachine(RuleBasedStateMachine):
    """Random transitions against a dict of states."""

    def __init__(self):
        super().__init__()
        self.ledger, self.states = Ledger(), {}

    def ids(self, state):
        return [i for i, s in self.states.items() if s == state]

    @rule(n=st.integers(1, 4))
    def issue(self, n):
        for i in self.ledger.issue(n):
            assert i not in self.states
            self.states[i] = "leased"

    @rule(data=st.data(), step=st.sampled_from(STEPS))
    def move(self, data, step):
        source, target = step
        chosen = data.draw(st.lists(st.sampled_from(self.ids(source)), unique=True)) if self.ids(source) else []
        if target == "finished":
            for i in chosen:
                self.ledger.finish(i)
        elif target == "queued":
            self.ledger.queue(chosen)
        elif target == "trained":
            self.ledger.train(chosen)
        else:
            self.ledger.drop(chosen, "why")
        self.states |= dict.fromkeys(chosen, target)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def a_wrong_move_is_refused_and_changes_nothing(self, data):
        i = data.draw(st.sampled_from(list(self.states)))
        before = self.ledger.counts()
        moves = {
            "leased": lambda: self.ledger.finish(i),
            "finished": lambda: self.ledger.queue([i]),
            "queued": lambda: self.ledger.train([i]),
        }
        for source, move in moves.items():
            if self.states[i] != source:
                with pytest.raises(LedgerError):
                    move()
        assert self.ledger.counts() == before

    @rule()
    def save_and_restore(self):
        restored = Ledger.restore(self.ledger.save())
        assert restored.open_ids() == self.ledger.open_ids()
        assert restored.counts()["trained"] == self.ledger.trained

    @invariant()
    def balances(self):
        self.ledger.check()
        counts = self.ledger.counts()
        assert counts["issued"] == len(self.states)
        for state in ("leased", "finished", "queued", "trained", "dropped"):
            assert counts[state] == len(self.ids(state))
        assert all(self.ledger.is_leased(i) == (s == "leased") for i, s in self.states.items())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_check_can_fail():
    ledger = Ledger()
    ledger.issue(2)
    ledger.issued += 1
    with pytest.raises(LedgerError, match="does not balance"):
        ledger.check()


def coordinator(
    eta=1.0, over_stale="train", capacity=64, heldout=0, lease_timeout=1e9, group=2, batch=4, refills=0, injected=0
):
    numbers = iter(range(10_000))

    def source():
        i = next(numbers)
        return Prompt(i, np.array([3, 4], np.int32), f"{i}", "0"), {"next_id": i + 1}

    prompts = [Prompt(i, np.array([5], np.int32), f"h{i}", "0") for i in range(heldout)]
    config = CoordinatorConfig(group, batch, eta, over_stale, refills, injected, capacity, lease_timeout, 1.0, 8)
    return Coordinator(config, source, EvaluationBoard(prompts, (1.0, 0.0), 8))


class FakeSampler:
    """Speaks the protocol; draws nothing."""

    def __init__(self, c, name="a", incarnation="1"):
        self.c, self.name, self.incarnation = c, name, incarnation
        self.sequence, self.held, self.version = 0, [], 0

    def report(self, finished=(), want=0, want_evaluation=0, loading=-1):
        self.sequence += 1
        reply = self.c.exchange(
            Report(
                self.name,
                self.incarnation,
                self.c.run,
                self.sequence,
                self.version,
                loading,
                want,
                want_evaluation,
                tuple(finished),
                SamplerStats(),
            )
        )
        self.version = reply.version
        self.held += [(lease, i) for lease in reply.leases for i in lease.sample_ids]
        return reply

    def finish(self, lease, sample_id, version=None, **changes):
        version = self.version if version is None else version
        t = trajectory(sample_id, len(lease.prompt.tokens), 3, np.random.default_rng(sample_id % 1000))
        pinned = lease.pinned_version
        versions = np.where(t.policy_versions >= 0, version if pinned is None else pinned, -1)
        return dataclasses.replace(
            t,
            prompt_id=lease.prompt.prompt_id,
            policy_versions=versions.astype(np.int32),
            evaluation=pinned is not None,
            **changes,
        )


class RingMachine(RuleBasedStateMachine):
    """Samplers that lose, repeat and reorder; a trainer that trains. Every sample must be trained exactly once."""

    def __init__(self):
        super().__init__()
        self.c = coordinator(eta=1.0, heldout=2)
        self.samplers = [FakeSampler(self.c, "a"), FakeSampler(self.c, "b")]
        self.sent, self.trained, self.version, self.evaluations = [], [], 0, 0

    @rule(which=st.integers(0, 1), want=st.integers(0, 6))
    def ask(self, which, want):
        s = self.samplers[which]
        s.report(want=want, want_evaluation=want)
        for lease, _ in s.held:
            assert lease.min_version <= self.version

    @rule(which=st.integers(0, 1), data=st.data())
    def finish_some_in_any_order(self, which, data):
        s = self.samplers[which]
        order = data.draw(st.permutations(range(len(s.held))))
        chosen = order[: data.draw(st.integers(0, len(order)))]
        done = [s.finish(*s.held[k]) for k in chosen]
        s.held = [h for k, h in enumerate(s.held) if k not in chosen]
        self.sent += done
        s.report(done)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), which=st.integers(0, 1))
    def send_again(self, data, which):
        self.samplers[which].report([data.draw(st.sampled_from(self.sent))])

    @rule(which=st.integers(0, 1))
    def die_and_come_back(self, which):
        old = self.samplers[which]
        self.samplers[which] = FakeSampler(self.c, old.name, old.incarnation + "'")
        self.samplers[which].report()

    @rule()
    def train(self):
        batch = self.c.take_batch(self.version, timeout=0.0)
        if batch is None:
            return
        assert len(batch) == 4
        self.trained += [t.sample_id for t in batch]
        self.c.trained(batch)
        self.version += 1
        self.c.publish(self.version)

    @rule()
    def evaluate(self):
        self.c.evaluate(self.version)
        self.evaluations += 1

    @invariant()
    def books_balance(self):
        counts = self.c.counts()
        assert counts["issued"] == sum(v for k, v in counts.items() if k != "issued")
        assert len(self.trained) == len(set(self.trained)) == counts["trained"]
        n = counts["issued"] - counts["dropped"]
        assert n == 0 or math.floor((n - 1) / 4) <= self.version + 1  # Eq. 3 at every instant

    def teardown(self):
        """Whatever happened, honest samplers can finish everything."""
        for s in self.samplers:
            FakeSampler(self.c, s.name, "last").report()
        honest = FakeSampler(self.c, "c")
        target = self.version + 2
        for _ in range(60):
            done, honest.held = [honest.finish(*h) for h in honest.held], []
            honest.report(done, want=8, want_evaluation=8)
            self.train()
            if self.version >= target and not self.c.pending_evaluations():
                break
        assert self.version >= target
        assert not self.c.pending_evaluations()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_full_queue_gives_no_credit_and_loses_nothing():
    c = coordinator(eta=math.inf, capacity=4)
    s = FakeSampler(c)
    assert s.report(want=4).credits == 4
    assert s.report([s.finish(*h) for h in s.held]).credits == 0
    batch = c.take_batch(0, timeout=0.0)
    assert [t.sample_id for t in batch] == [0, 1, 2, 3]
    assert s.report().credits == 4
    assert c.counts()["dropped"] == 0


def test_silent_samplers_leases_are_issued_again_and_late_results_are_taken_once():
    c = coordinator(lease_timeout=100.0)
    first, second = FakeSampler(c, "a"), FakeSampler(c, "b")
    first.report(want=2)
    c._holders._holders["a"].last_seen -= 200.0  # as if it had been silent for so long
    second.report()
    second.report(want=2)
    assert [i for _, i in second.held] == [0, 1]
    first.report([first.finish(*h) for h in first.held])
    second.report([second.finish(*h) for h in second.held])
    assert c.duplicates == 2
    assert c.counts()["queued"] == 2


def test_a_resumed_coordinator_draws_open_samples_again():
    c = coordinator()
    s = FakeSampler(c)
    s.report(want=8)
    s.report([s.finish(*h) for h in s.held[:5]])
    c.trained(c.take_batch(0, timeout=0.0))
    saved = c.save()
    resumed = coordinator()
    resumed.restore(saved)
    assert resumed.counts() == {"issued": 8, "leased": 4, "finished": 0, "queued": 0, "trained": 4, "dropped": 0}
    other = FakeSampler(resumed)
    other.report(want=4)
    assert sorted(i for _, i in other.held) == [4, 5, 6, 7]


@pytest.mark.parametrize(("policy", "kept"), [("train", 3), ("drop", None), ("mask_tokens", 1)])
def test_over_stale_tokens_at_consumption(policy, kept):
    t = trajectory(0, 2, 3, np.random.default_rng(0), policy_versions=np.array([-1, -1, 3, 3, 5], np.int32))
    result = handle_over_stale(t, version=6, bound=1, policy=policy)
    assert (None if result is None else result.loss_mask.sum()) == kept
    assert handle_over_stale(t, version=4, bound=1, policy=policy) is t


def test_dropped_samples_are_counted_refunded_and_replaced():
    c = coordinator(eta=0.0, over_stale="drop")
    s = FakeSampler(c)
    c.publish(1)
    s.version = 1
    s.report(want=8)
    done = [s.finish(lease, i, version=0 if i == 3 else 1) for lease, i in s.held]
    s.held = []
    s.report(done)
    batch = c.take_batch(1, timeout=0.0)
    assert 3 not in [t.sample_id for t in batch]
    assert c.counts()["dropped"] == 1
    assert len(batch) == 5  # whole groups: the one that lost a sample, and two more


def test_injected_staleness_is_exact():
    """Whatever the version, what is trained on was drawn by the weights three versions before it (or the first)."""
    c = coordinator(eta=0.0, injected=3)
    s = FakeSampler(c)
    for version in range(7):
        drawn = max(0, version - 3)
        for _ in range(5):
            batch = c.take_batch(version, timeout=0.0)
            if batch is not None:
                break
            done = [s.finish(*h) for h in s.held]
            s.held = []
            assert s.report(done, want=4).version == drawn
            assert all(lease.min_version <= drawn for lease, _ in s.held)
        assert {int(v) for t in batch for v in t.policy_versions if v >= 0} == {drawn}
        c.trained(batch)
        c.publish(version + 1)
        assert max(0, version + 1 - 3) in c.needed_versions()


def test_the_weights_that_a_sampler_reads_are_kept_until_it_says_otherwise():
    c = coordinator()
    s = FakeSampler(c)
    s.report()
    c.publish(1)
    s.report()  # is told of 1, and begins to read it
    for version in (2, 3, 4):
        c.publish(version)
        s.report(loading=1)
        assert {1, version} <= c.needed_versions()
    s.report()
    assert 1 not in c.needed_versions()


def test_when_samplers_worked_is_known_from_their_reports():
    c = coordinator()
    s = FakeSampler(c)
    s.report()
    began = time.monotonic()
    for busy in (0.25, 0.25, 1.0):
        s.sequence += 1
        c.exchange(Report("a", "1", c.run, s.sequence, 0, -1, 0, 0, (), SamplerStats(busy_seconds=busy)))
    spans, _ = c.activity()
    assert [span.end - span.start for span in spans] == [pytest.approx(0.25), pytest.approx(0.75)]
    assert all(span.end >= began for span in spans)
    assert c.activity() == ([], 0)


def flat_where(rewards):
    """Finishes a sampler's leases with the rewards of their groups."""

    def finish_all(s):
        done = [s.finish(lease, i, reward=rewards(lease.prompt.prompt_id, i)) for lease, i in s.held]
        s.held = []
        return done

    return finish_all


def next_batch(c, s, finish_all, version):
    """What the trainer gets once the sampler has worked for long enough; None if that is never."""
    for _ in range(20):
        batch = c.take_batch(version, timeout=0.0)
        if batch is not None:
            return batch
        s.report(finish_all(s), want=4)
    return None


@pytest.mark.parametrize("eta", [0.0, 2.0])
def test_dynamic_sampling_passes_groups_without_a_signal_over_and_draws_others(eta):
    """Prompts with an even number are all right; samples of the others differ."""
    c = coordinator(eta=eta, refills=8)
    s = FakeSampler(c)
    finish_all = flat_where(lambda prompt, i: 1.0 if prompt % 2 == 0 else float(i % 2))
    seen = []
    for version in range(6):
        batch = next_batch(c, s, finish_all, version)
        assert batch is not None, c.counts()
        assert len(batch) == 4
        seen += [t.prompt_id for t in batch]
        assert c.intake.metrics()["group/refilled_fraction"] > 0
        c.trained(batch)
        c.publish(version + 1)
        counts = c.counts()
        assert math.floor((counts["issued"] - counts["dropped"] - 1) / 4) <= version + 1 + eta
    assert all(p % 2 == 1 for p in seen)
    assert c.save()["ledger"]["dropped"]["zero_variance"] == c.counts()["dropped"] > 0


def test_dynamic_sampling_takes_what_there_is_in_the_end():
    """Where no group has a signal, two batches' worth are passed over for each batch and the run goes on."""
    c = coordinator(eta=0.0, refills=2)
    s, finish_all = FakeSampler(c), flat_where(lambda prompt, i: 1.0)
    for version in range(3):
        batch = next_batch(c, s, finish_all, version)
        assert len(batch) == 4
        c.trained(batch)
        c.publish(version + 1)
    assert c.counts()["dropped"] == 3 * 2 * 4


def test_the_intake_measures_what_it_left_out():
    c = coordinator(eta=0.0, over_stale="drop")
    c.publish(1)
    s = FakeSampler(c)
    s.version = 1
    s.report(want=8)
    s.report([s.finish(lease, i, version=0 if i == 3 else 1) for lease, i in s.held])
    batch = c.take_batch(1, timeout=0.0)
    measured = c.intake.metrics()
    assert measured["staleness/dropped_fraction"] == pytest.approx(1 / (len(batch) + 1))
    assert measured["staleness/queue_age_seconds"] >= 0
    assert measured["group/refilled_fraction"] == 0


def test_a_long_run_that_drops_never_runs_dry():
    """Dropping leaves ragged groups and so batches with a sample or two too many: N must not creep up."""
    c = coordinator(eta=2.0, over_stale="drop", group=4, batch=16)
    s = FakeSampler(c)
    rng = np.random.default_rng(0)
    for version in range(60):
        for _ in range(40):
            batch = c.take_batch(version, timeout=0.0)
            if batch is not None:
                break
            done, s.held = [s.finish(*h, version=0 if rng.random() < 0.1 else version) for h in s.held], []
            s.report(done, want=16)
        assert batch is not None, f"no batch at version {version}: {c.counts()}"
        c.trained(batch)
        c.publish(version + 1)
    assert c.counts()["dropped"] > 50


def test_a_sampler_given_up_and_back_is_not_leased_what_it_returned():
    c = coordinator(lease_timeout=100.0)
    first, second = FakeSampler(c, "a"), FakeSampler(c, "b")
    first.report(want=2)
    c._holders._holders["a"].last_seen -= 200.0
    second.report()  # gives a up; takes nothing
    held, first.held = first.held, []
    first.report([first.finish(*held[0])])
    first.report(want=1)
    assert [i for _, i in first.held] == [1]  # the one that is still out; sample 0 is in


def test_what_was_drawn_for_another_run_of_the_trainer_is_not_taken():
    c = coordinator()
    s = FakeSampler(c)
    s.report(want=2)
    done = [s.finish(*h) for h in s.held]
    stale = Report("a", "1", 9, "another run", 0, -1, 0, 0, tuple(done), SamplerStats())
    c.exchange(stale)
    assert c.counts()["leased"] == 2


def test_a_late_answer_to_an_earlier_evaluation_takes_nothing_from_the_next():
    c = coordinator(heldout=1, lease_timeout=100.0)
    a, b = FakeSampler(c, "a"), FakeSampler(c, "b")
    c.evaluate(0)
    c.evaluate(5)
    a.report(want_evaluation=2)
    late = [a.finish(*h) for h in a.held]
    c._holders._holders["a"].last_seen -= 200.0
    b.report()
    for job in range(2):
        b.report(want_evaluation=2)
        if job == 0:
            done, b.held = [b.finish(*h) for h in b.held], []
            b.report(done)
    a.report(late)  # of version 0, under the ids that b now holds for version 5
    reborn = FakeSampler(c, "b", "2")
    reborn.report(want_evaluation=2)
    reborn.report([reborn.finish(*h) for h in reborn.held])
    assert not c.pending_evaluations()
    assert [e.version for e in c.evaluations()] == [0, 5]


def test_an_evaluation_measures_its_pinned_version_only():
    board = EvaluationBoard([Prompt(0, np.array([5], np.int32), "p", "0")], (1.0, 0.0), 8)
    board.request(3)
    leases = [board.grant(), board.grant()]
    assert board.grant() is None
    assert [(x.pinned_version, x.temperature) for x in leases] == [(3, 1.0), (3, 0.0)]

    def sample(lease, version):
        t = trajectory(lease.sample_ids[0], 1, 2, np.random.default_rng(0), evaluation=True)
        return dataclasses.replace(t, policy_versions=np.array([-1, version, version], np.int32))

    board.receive(sample(leases[0], 4))  # another version: not taken
    board.give_back(leases[0])
    assert board.grant() == leases[0]
    for lease in leases:
        board.receive(sample(lease, 3))
    (evaluation,) = board.collect()
    assert evaluation.version == 3
    assert [t.sample_id for t in evaluation.samples[0.0]] == [FIRST_SAMPLE_ID + 1]
    assert board.pinned_versions() == ()
