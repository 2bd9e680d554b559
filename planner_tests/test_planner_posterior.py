"""Beliefs about step times: laws of the update, what the policy asks for, and that measuring finds the best plan."""

from __future__ import annotations

import numpy as np
import pytest

from asa.planner.answer.posterior import Policy, Posterior, choose
from asa.planner.questions.finalists import shortlist


def draws(medians, own=0.05, common=0.1, count=256, seed=0):
    """Joint draws: an error all rows share, and one of each row's own."""
    rng = np.random.default_rng(seed)
    shared = common * rng.standard_normal(count)
    return np.array([m * np.exp(shared + own * rng.standard_normal(count)) for m in medians])


def contest(truth, prior, *, budget=60.0, noise=0.02, drift=0.05, always=(0, 1), seed=1):
    """Rounds as the policy asks for them, of plans that take ``truth`` seconds; with what is left of the budget."""
    rng = np.random.default_rng(seed)
    policy = Policy(draws=tuple(tuple(map(float, row)) for row in prior), always=always)
    rounds = []
    while chosen := policy.next(rounds, budget):
        slow = np.exp(drift * rng.standard_normal())
        rounds.append({i: float(truth[i] * slow * np.exp(noise * rng.standard_normal())) for i in chosen})
        budget -= sum(rounds[-1].values())
        assert len(rounds) < 1000
    return rounds, budget


def test_before_measuring_the_fastest_by_costs_is_the_likeliest():
    belief = Posterior(draws([1.0, 1.1, 1.5])).belief()
    assert belief.best == 0
    assert 1 <= sum(belief.p_best) < 1.2, "who is within 1 % of the fastest is the best, too"
    assert belief.p_best[0] > belief.p_best[1] > belief.p_best[2]
    assert all(r >= 0 for r in belief.expected_regret)


def test_what_was_measured_outweighs_the_costs():
    prior = draws([1.0, 1.1])
    rounds = [{0: 1.2, 1: 1.0} for _ in range(8)]
    best, before, after = choose(prior, rounds, None)
    assert (before.best, best) == (0, 1)
    assert after.p_best[1] > 0.99
    assert after.expected_regret[1] < before.expected_regret[0]


def test_a_machine_that_is_slow_for_all_changes_no_order():
    prior = draws([1.0, 1.1, 1.2])
    slow = [{0: 2.0, 1: 2.2, 2: 2.4} for _ in range(5)]
    assert choose(prior, slow, None)[0] == 0
    assert Posterior(prior, slow).mean[0] == pytest.approx(np.log(2.0), abs=0.05)


def test_one_plan_measured_slow_tells_of_one_that_was_not():
    """What draws share is learned of both: the common error of all plans."""
    prior = draws([1.0, 1.1], own=0.02)
    before, after = Posterior(prior), Posterior(prior, [{0: 1.5}] * 5)
    assert after.mean[1] - before.mean[1] > 0.2


def test_one_disturbed_step_is_no_evidence():
    prior = draws([1.0, 1.05])
    rounds = [{0: 1.0, 1: 1.05} for _ in range(6)]
    rounds.append({0: 9.0, 1: 1.05})
    assert choose(prior, rounds, None)[0] == 0


@pytest.mark.parametrize("best", [0, 2, 4])
def test_a_contest_ends_with_the_best_plan_and_below_the_regret_asked_for(best):
    truth = [1.0, 1.3, 1.05, 1.1, 1.08]
    truth[best] = 0.85
    prior = draws([1.0, 1.3, 1.05, 1.1, 1.08])
    rounds, left = contest(truth, prior)
    chosen, before, after = choose(prior, rounds, 1)
    assert chosen == best
    assert after.expected_regret[chosen] < 0.005 < before.expected_regret[0]
    assert left > 0


def test_every_finalist_has_a_turn_and_steps_go_to_those_that_could_win():
    truth = [1.0, 3.0, 1.004, 2.5]
    rounds, _ = contest(truth, draws(truth, own=0.1))
    turns = [sum(i in r for r in rounds) for i in range(4)]
    assert min(turns) >= 1
    assert turns[0] > turns[3]
    assert turns[2] > turns[3]


def test_a_budget_that_is_spent_ends_the_contest():
    truth = [1.0, 1.2, 1.001, 1.002]
    rounds, left = contest(truth, draws(truth), budget=9.0)
    assert left >= -0.5
    assert {0, 1} <= {i for r in rounds for i in r}


def test_a_choice_measured_slower_than_data_parallelism_gives_way():
    prior = draws([1.0, 1.2], own=0.01, common=0.01)
    rounds = [{0: 1.001, 1: 1.0}]
    assert choose(prior, rounds, None)[0] == 0 or choose(prior, rounds, None)[0] == 1
    assert choose(prior, rounds, 1)[0] == 1


def test_a_near_copy_is_no_finalist_while_others_could_win():
    rows = draws([1.0, 1.3, 1.1])
    copy = rows[0] * 1.0005
    assert shortlist(np.vstack([rows, copy]), [0, 1], 3) == [0, 1, 2]
    assert sorted(shortlist(np.vstack([rows, copy]), [0], 9)) == [0, 1, 2, 3]


def two_speeds(truth, prior, seed, *, noise, budget=8.0):
    """The plan chosen where a step takes half as long again while either of two cores is slow, for a few steps at a
    time; and how many rounds that took."""
    rng = np.random.default_rng(seed)
    policy = Policy(draws=tuple(tuple(map(float, row)) for row in prior), always=(0, 1), noise=noise)
    rounds, slow = [], [False, False]
    while chosen := policy.next(rounds, budget):
        found = {}
        for i in chosen:
            slow = [rng.random() < 0.5 if rng.random() < 0.3 else s for s in slow]
            found[i] = truth[i] * (1.5 if any(slow) else 1.0)
        rounds.append(found)
        budget -= sum(found.values())
    return choose(prior, rounds, 1, noise=noise)[0], len(rounds)


def test_where_steps_are_known_to_be_noisy_a_contest_takes_longer_and_errs_less():
    truth, prior = [0.022, 0.035, 0.020, 0.021], draws([0.020, 0.035, 0.021, 0.021])
    calm, wary = ([two_speeds(truth, prior, seed, noise=n) for seed in range(16)] for n in (0.03, 0.2))
    assert sum(n for _, n in wary) > sum(n for _, n in calm)
    missed = [sum(truth[i] / truth[2] - 1 for i, _ in found) for found in (wary, calm)]
    assert missed[0] < 0.6 * missed[1]
