"""Bad steps: what is one, what it leaves untouched, what a resumed run makes of it, and when the run goes back."""

import json
import math
import random

import pytest

from utils.bad_steps import MIN_STEPS, RECENT, WINDOW, BadSteps


def judge_all(bad, losses, norms=None, first=0):
    """Judge one step after the other; return the steps that were not taken."""
    norms = norms or [1.0] * len(losses)
    return [
        step
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first)
        if not bad.judge(step, {"loss": loss}, {"grad_norm": norm}, lambda step=step: [f"s{step}"])
    ]


def noisy(count, level=1.0, sigma=0.1, seed=0):
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, sigma)) for _ in range(count)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_taken(tmp_path, value):
    bad = BadSteps(tmp_path, 0.0, 0, True)
    assert judge_all(bad, [1.0, value, 1.0], [1.0, 1.0, 1.0]) == [1]
    assert judge_all(bad, [1.0, 1.0], [value, 1.0], first=3) == [3]
    lines = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"]) for line in lines] == [(1, ["s1"]), (3, ["s3"])]
    assert bad.num_skipped == 2 and bad.rollback is None


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.3])
def test_spikes_and_nothing_else(tmp_path, sigma):
    """Log-normal noise of thousands of steps has no step beyond ten deviations; injected spikes are all found."""
    losses, norms = noisy(3000, 2.0, sigma), noisy(3000, 0.7, 2 * sigma, seed=1)
    assert judge_all(BadSteps(tmp_path, 10.0, 0, False), losses, norms) == []
    where = {100, 101, 500, 2999}
    for series in (losses, norms):
        spiked = [v * math.exp(12 * max(0.1, 2 * sigma)) if i in where else v for i, v in enumerate(series)]
        pair = (spiked, norms) if series is losses else (losses, spiked)
        assert set(judge_all(BadSteps(tmp_path, 10.0, 0, False), *pair)) == where


def test_a_low_value_is_no_spike_and_the_first_steps_are_not_judged(tmp_path):
    bad = BadSteps(tmp_path, 5.0, 0, True)
    assert judge_all(bad, [1.0, 50.0, 1.0, 1e-6] + [1.0] * MIN_STEPS) == []
    assert judge_all(bad, [1e-9, 0.0, 1.0, 40.0], first=100) == [103]


def test_a_falling_loss_is_none(tmp_path):
    falling = [2.0 * math.exp(-step / 100) + 0.05 for step in range(1000)]
    assert judge_all(BadSteps(tmp_path, 10.0, 10, True), falling) == []


@pytest.mark.parametrize("at", [5, MIN_STEPS + 3, 2 * WINDOW])
def test_a_resumed_run_judges_alike(tmp_path, at):
    losses = [v * (1e3 if i % 37 == 36 else 1) for i, v in enumerate(noisy(400))]
    whole = BadSteps(tmp_path, 6.0, 0, False)
    expected = judge_all(whole, losses)
    first, second = (BadSteps(tmp_path, 6.0, 0, False) for _ in range(2))
    before = judge_all(first, losses[:at])
    second.load_state(json.loads(json.dumps(first.state())))
    assert before + judge_all(second, losses[at:], first=at) == expected != []
    assert second.state() == whole.state() and len(json.dumps(whole.state())) < 2**13


def test_bad_steps_in_a_row_ask_for_a_roll_back(tmp_path):
    bad = BadSteps(tmp_path, 10.0, 4, True)
    judge_all(bad, [1.0] * 3 + [math.nan] * 3)
    assert bad.rollback is None and not bad.is_calm
    judge_all(bad, [1.0], first=6)
    assert bad.is_calm
    judge_all(bad, [math.nan] * 4, first=7)
    assert bad.rollback[0] == 7 and "4 bad steps in a row" in bad.rollback[1]


def test_a_loss_that_stays_high_asks_for_a_roll_back(tmp_path):
    """It creeps up by less than a spike: seen by the running loss, and nothing is saved meanwhile."""
    bad, rose = BadSteps(tmp_path, 10.0, 10, True), 200
    losses = noisy(rose) + noisy(200, 1.9, seed=3)
    for step, loss in enumerate(losses):
        assert bad.judge(step, {"loss": loss}, {})
        if step == rose - 1:
            assert bad.is_calm
        if bad.rollback:
            break
    first, reason = bad.rollback
    assert rose - RECENT <= first <= rose + 1 and step <= rose + 2 * RECENT + 2, (first, step)
    assert "running loss" in reason and not bad.is_calm


def test_a_loss_that_comes_back_does_not(tmp_path):
    bad = BadSteps(tmp_path, 10.0, 10, True)
    judge_all(bad, noisy(200) + noisy(14, 1.9) + noisy(200, seed=2))
    assert bad.rollback is None and bad.is_calm


@pytest.mark.parametrize("values", [(-1.0, 5), (1.0, 5), (10.0, -1)])
def test_values_that_make_no_sense(tmp_path, values):
    with pytest.raises(ValueError, match="--spike_deviations"):
        BadSteps(tmp_path, *values, True)
