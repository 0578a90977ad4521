from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from engine.errors import Interrupted
from engine.signals import StopSignal
from engine.timing import Interval, median_interval, speed_ratio, throughput, time_steps, verdict

CPU = torch.device("cpu")


def test_every_arm_is_timed_in_every_round():
    calls: list[str] = []

    def step(name, seconds):
        def run():
            calls.append(name)
            time.sleep(seconds)

        return run

    seconds = time_steps({"a": step("a", 0.11), "b": step("b", 0.22)}, 9, CPU, StopSignal())
    assert {name: len(values) for name, values in seconds.items()} == {"a": 9, "b": 9}
    assert np.median(seconds["a"]) == pytest.approx(0.11, rel=0.2)
    rounds = [tuple(calls[i : i + 2]) for i in range(6, len(calls), 2)]
    assert len(rounds) == 9 and set(rounds) == {("a", "b"), ("b", "a")}  # each once a round, in both orders
    ratio = speed_ratio(seconds["b"], seconds["a"])
    assert ratio.low <= ratio.value <= ratio.high and ratio.value == pytest.approx(0.5, rel=0.2)


def test_short_steps_are_repeated_alike_for_all():
    counts = {"fast": 0, "slow": 0}

    def step(name, seconds):
        def run():
            counts[name] += 1
            time.sleep(seconds)

        return run

    time_steps({"fast": step("fast", 0.01), "slow": step("slow", 0.02)}, 9, CPU, StopSignal())
    assert counts["fast"] == counts["slow"] > 3 + 9 * 4


def test_the_interval_is_that_of_the_median():
    samples = np.random.default_rng().normal(10, 1, 2001)
    interval = median_interval(samples)
    assert interval.value == np.median(samples)
    # The standard error of a normal sample's median is 1.2533 sigma / sqrt(n).
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * 1.2533 / 2001**0.5, rel=0.25)
    assert median_interval(np.full(9, 4.0)) == Interval(4.0, 4.0, 4.0)


def test_ratios_are_taken_within_rounds():
    # The machine slows down threefold in the middle: the ratio stays 2 in every round.
    baseline = np.array([1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0])
    assert speed_ratio(baseline / 2, baseline) == Interval(2.0, 2.0, 2.0)
    assert throughput(baseline, 100).value == 100.0


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Interval(1.01, 1.005, 1.015), "tie"),
        (Interval(1.3, 1.1, 1.4), "faster"),
        (Interval(0.7, 0.6, 0.8), "slower"),
        (Interval(1.3, 0.9, 1.5), "not resolved"),
    ],
)
def test_a_verdict_never_claims_more_than_the_interval(ratio, expected):
    assert verdict(ratio).startswith(expected)


def test_a_signal_ends_the_pass():
    stop = StopSignal()
    stop.received = 15
    with pytest.raises(Interrupted):
        time_steps({"a": lambda: None}, 9, CPU, stop)
