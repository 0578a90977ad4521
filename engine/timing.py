"""The interleaved timing pass: arms timed in turn, so that what else the machine does hits all of them alike.

Two trainings minutes apart differ by clocks and temperature; rounds in random order with pauses in between do not. A
ratio is the median of the ratios within rounds; an interval is the 95 % bootstrap interval of a median over the rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.signals import StopSignal

IDLE_SECONDS = 0.2
"""Pause before a sample on a GPU, which slows itself down under unbroken load."""
SHORTEST_SAMPLE, LONGEST_SAMPLE = 0.1, 1.0
"""Seconds that the fastest arm's samples take at least, so that jitter does not count, and the slowest's at most."""
RESAMPLES = 4000
TIE = 0.02
"""Ratios this close to 1 are called a tie."""


@dataclass(frozen=True)
class Interval:
    """A median over rounds and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """As summary.json has it."""
        return {"value": self.value, "low": self.low, "high": self.high}


def median_interval(samples: NDArray[np.float64]) -> Interval:
    """The median of one sample a round, with its 95 % interval by bootstrap."""
    draws = np.random.default_rng(0).integers(0, len(samples), (RESAMPLES, len(samples)))
    low, high = np.quantile(np.median(samples[draws], axis=1), (0.025, 0.975))
    return Interval(float(np.median(samples)), float(low), float(high))


def time_steps(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    stop: StopSignal,
    *,
    seed: int = 0,
    shortest: float | None = None,
    close: bool = False,
) -> dict[str, NDArray[np.float64]]:
    """Seconds a step of each arm, one figure a round: in every round each arm is timed once, in random order.

    Wall time from a synchronised device to a synchronised device over several steps, the same number for every arm.
    The order of the arms is drawn from the seed. shortest: seconds, instead of SHORTEST_SAMPLE. close: a GPU is left to
    rest before a round, not before each sample, so that a round is short: a host whose own speed changes within seconds
    is then the same for all arms of a round, and their ratios are steady where their times are not.
    """
    shortest = SHORTEST_SAMPLE if shortest is None else shortest
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)

    def sample(step: Callable[[], object], count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count

    warm = []
    for step in steps.values():
        sample(step, 2)
        warm.append(sample(step, 1))
    count = max(1, min(math.ceil(shortest / min(warm)), int(LONGEST_SAMPLE / max(warm))))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, generator = list(steps), random.Random(seed)
    for _ in range(rounds):
        generator.shuffle(order)
        for place, name in enumerate(order):
            stop.check()
            if device.type == "cuda" and not (close and place):
                wait()
                time.sleep(IDLE_SECONDS)
            seconds[name].append(sample(steps[name], count))
    return {name: np.array(values) for name, values in seconds.items()}


def throughput(seconds: NDArray[np.float64], units: int) -> Interval:
    """Units a second from seconds a step."""
    return median_interval(units / seconds)


def speed_ratio(seconds: NDArray[np.float64], baseline: NDArray[np.float64]) -> Interval:
    """How many times faster than the baseline, from the ratios within each round."""
    return median_interval(baseline / seconds)


def verdict(ratio: Interval) -> str:
    """What a ratio of speeds shows, in a word or two."""
    if abs(ratio.value - 1) <= TIE:
        return "tie (within 2 %)"
    if ratio.low <= 1 <= ratio.high:
        return "not resolved"
    return "faster" if ratio.value > 1 else "slower"
