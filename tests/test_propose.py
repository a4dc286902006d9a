"""The contract that every proposer keeps; exemplar sampling; and that the policy's updates are alive."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import RECORDING
from replays import late_mean, paired_difference, replay, trial_of

from cuda_l2.propose._base import UnionSpace, mutated, proposer_maker, proposer_names
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.propose._network import Question, ScheduleNetwork
from cuda_l2.propose._recorded import RecordedSpace, recorded_space
from cuda_l2.propose.schedule import SchedulePolicy
from cuda_l2.records import Trial
from cuda_l2.system.errors import UserError
from cuda_l2.worlds.world import read

SEEDS = 10
TRIALS = 120


@pytest.fixture(scope="module")
def recorded() -> RecordedSpace:
    world = read(RECORDING)
    return recorded_space(world, world.tasks[0])


@pytest.mark.parametrize("name", proposer_names())
def test_proposals_are_valid_schedules_and_differ(name, space) -> None:
    history: list[Trial] = []
    proposer = proposer_maker(name)(space, lambda: history, np.random.default_rng(0))
    candidates = proposer.propose(6)
    assert len(candidates) == 6
    assert len({candidate.id for candidate in candidates}) > 1
    for candidate in candidates:
        values = tuple(value for _, value in candidate.schedule)
        assert space.render(values, name).id == candidate.id  # constructing it is the proof that it is valid


@pytest.mark.parametrize("name", proposer_names())
def test_a_search_is_repeatable_by_seed(name, recorded) -> None:
    assert replay(recorded, proposer_maker(name), 24, 3) == replay(recorded, proposer_maker(name), 24, 3)
    assert replay(recorded, proposer_maker(name), 24, 3) != replay(recorded, proposer_maker(name), 24, 4)


@pytest.mark.parametrize("name", proposer_names())
def test_a_group_cut_short_does_no_harm(name, recorded) -> None:
    history: list[Trial] = []
    proposer = proposer_maker(name)(recorded, lambda: history, np.random.default_rng(0))
    history.append(trial_of(recorded, proposer.propose(4)[0]))
    proposer.observe(history)
    assert len(proposer.propose(4)) == 4


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="schedule"):
        proposer_maker("nobody")


@pytest.fixture(scope="module")
def curves(recorded):
    makers = {name: proposer_maker(name) for name in ("schedule", "random")}
    makers["frozen"] = partial(SchedulePolicy, learns=False)
    return {name: [replay(recorded, make, TRIALS, seed) for seed in range(SEEDS)] for name, make in makers.items()}


@pytest.mark.full
@pytest.mark.parametrize("other", ["frozen", "random"])
def test_the_policy_after_its_updates_beats_the_one_without(other, curves) -> None:
    ours, theirs = (list(map(late_mean, curves[name])) for name in ("schedule", other))
    assert paired_difference(ours, theirs).low > 0


def test_policy_and_optimizer_go_on_from_their_state(recorded) -> None:
    def started(seed: int) -> tuple[SchedulePolicy, list[Trial]]:
        history: list[Trial] = []
        return SchedulePolicy(recorded, lambda: history, np.random.default_rng(seed)), history

    def step(policy: SchedulePolicy, history: list[Trial]) -> None:
        trials = [trial_of(recorded, candidate) for candidate in policy.propose(8)]
        history.extend(trials)
        policy.observe(trials)

    first, history = started(0)
    for _ in range(3):
        step(first, history)
    second, other_history = started(1)
    assert first.state() != second.state()
    second.load_state(first.state())
    assert second.updates == first.updates == 3
    other_history.extend(history)
    second._rows, second._inputs = dict(first._rows), first._inputs
    for policy in (first, second):  # from here on the same candidates and randomness give the same step
        policy._rng = np.random.default_rng(5)
        policy._generator.manual_seed(5)
    step(first, history)
    step(second, other_history)
    for ours, theirs in zip(first._network.parameters(), second._network.parameters(), strict=True):
        assert (ours == theirs).all()


def test_a_state_of_another_space_is_left_alone(recorded, space) -> None:
    other = SchedulePolicy(space, list, np.random.default_rng(0))
    twice = UnionSpace(recorded.families * 2, recorded.task, recorded.target)
    policy = SchedulePolicy(twice, list, np.random.default_rng(0))
    before = policy.state()
    policy.load_state(other.state())
    assert policy.updates == 0 and len(policy.state()) == len(before)


def test_a_schedule_with_a_value_that_its_family_has_no_more_is_no_candidate(recorded) -> None:
    history = [
        trial_of(recorded, candidate)
        for candidate in SchedulePolicy(recorded, list, np.random.default_rng(0)).propose(2)
    ]
    (name, _), *rest = history[0].candidate.schedule
    gone = replace(history[0], candidate=replace(history[0].candidate, schedule=((name, 12345), *rest)))
    proposed = SchedulePolicy(recorded, lambda: [gone, history[1]], np.random.default_rng(0)).propose(8)
    assert len(proposed) == 8 and history[1].candidate.id not in {candidate.id for candidate in proposed}


def test_a_policy_that_has_settled_still_proposes_new_schedules(recorded) -> None:
    history: list[Trial] = []
    policy = SchedulePolicy(recorded, lambda: history, np.random.default_rng(0))
    with torch.no_grad():
        policy._network.head.weight += 50 * torch.randn(policy._network.head.weight.shape)  # nearly one answer only
    for _ in range(6):
        trials = [trial_of(recorded, candidate) for candidate in policy.propose(8)]
        history.extend(trials)
        policy.observe(trials)
    assert len({trial.candidate.id for trial in history}) > 40


def test_a_group_without_variance_is_skipped_and_counted(recorded) -> None:
    rows = [replace(row, speedup=1.0, speedup_low=1.0, speedup_high=1.0) for row in recorded.rows]
    flat = replace(recorded, rows=rows)
    history: list[Trial] = []
    policy = SchedulePolicy(flat, lambda: history, np.random.default_rng(0))
    history.extend(trial_of(flat, candidate) for candidate in policy.propose(8))
    policy.observe(history)
    assert (policy.updates, policy.skipped_groups) == (0, 1)


def test_exemplars_reach_the_policy(recorded) -> None:
    """The same policy with other exemplars, or other scores, gives other probabilities once it has learnt anything."""
    history: list[Trial] = []
    policy = SchedulePolicy(recorded, lambda: history, np.random.default_rng(0))
    for _ in range(4):
        trials = [trial_of(recorded, candidate) for candidate in policy.propose(8)]
        history.extend(trials)
        policy.observe(trials)
    every = torch.ones(len(policy._inputs), dtype=torch.bool)
    shown = ([(0, 1.0), (1, 2.0)], [(0, 2.0), (1, 1.0)], [(2, 1.0)], [])
    found, _ = policy._network([Question(policy._inputs, every, exemplars) for exemplars in shown])
    assert all((one != other).any() for one, other in itertools.combinations(found, 2))


def test_a_policy_trusts_the_familys_own_model_before_it_has_learnt(monkeypatch, recorded) -> None:
    monkeypatch.setattr(
        type(recorded.families[0]), "estimate_us", lambda self, task, target, chosen: 2.0 ** chosen["NV"]
    )
    space = replace(recorded)
    network = ScheduleNetwork(space.choices)
    inputs = network.encoder(space, list(space.by_values))
    found = network([Question(inputs, torch.ones(len(inputs), dtype=torch.bool))])[0][0]
    best = [
        values
        for values in space.by_values
        if space.estimate_us(values) == min(map(space.estimate_us, space.by_values))
    ]
    assert sum(found.exp()[list(space.by_values).index(values)] for values in best) > 0.9


def test_changed_copies_are_valid_and_near(space) -> None:
    rng = np.random.default_rng(0)
    start = space.some(1, rng)[0]
    for _ in range(50):
        values = mutated(space, start, rng)
        space.render(values, "x")  # constructing it is the proof that it is valid
    assert len({mutated(space, start, rng) for _ in range(50)}) > 5


def test_exemplars_come_from_distinct_buckets_and_better_ones_more_often() -> None:
    scored = [(score / 10, score) for score in range(11)] * 3
    rng = np.random.default_rng(0)
    counts: Counter[int] = Counter()
    for _ in range(2000):
        chosen = sample_exemplars(scored, 2, rng)
        assert len({score for score, _ in chosen}) == 2
        counts.update(item for _, item in chosen)
    assert counts[10] + counts[9] > 3 * (counts[0] + counts[1])
    assert all(counts[item] > 0 for item in range(11))


def test_bucket_weights_are_the_stated_exponential() -> None:
    scored = [(0.0, "low"), (1.0, "high")]  # standardised means -1 and 1
    rng = np.random.default_rng(0)
    high = sum(sample_exemplars(scored, 1, rng, temperature=2.0)[0][1] == "high" for _ in range(20000)) / 20000
    assert high == pytest.approx(np.e / (np.e + 1), abs=0.02)  # exp(1/2) against exp(-1/2)


def test_few_or_no_trials_give_few_or_no_exemplars() -> None:
    rng = np.random.default_rng(0)
    assert sample_exemplars([], 2, rng) == []
    assert sample_exemplars([(1.0, "a"), (1.0, "b")], 2, rng)[0][1] in "ab"
