"""The mean of a few independent values and its 95 % interval, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its 95 % interval; None what too few values do not give."""

    count: int
    mean: float | None
    low: float | None
    high: float | None
    half_width: float | None
    """Of the interval: the smallest difference that it resolves."""
    deviation: float | None
    """Standard deviation of a value."""


def central_probability(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine**2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_critical(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that |T| exceeds with probability 1 - confidence. Raises ValueError below one degree of freedom."""
    if freedom < 1:
        raise ValueError(f"freedom={freedom}: must be at least 1")
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    for _ in range(60):
        middle = (low + high) / 2
        if central_probability(math.tan(middle) * math.sqrt(freedom), freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """Student's interval of the mean of independent values."""
    n = len(values)
    if n < 2:
        return MeanInterval(n, values[0] if n else None, None, None, None, None)
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = t_critical(n - 1) * deviation / math.sqrt(n)
    return MeanInterval(n, mean, mean - half, mean + half, half, deviation)
