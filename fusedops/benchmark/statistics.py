"""Medians and the bootstrap interval of a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from fusedops.benchmark.schema import Interval, Timing

RESAMPLES = 4000


def timing(samples: Sequence[float]) -> Timing:
    """Median, lowest and highest of the samples, one a round."""
    return Timing(statistics.median(samples), min(samples), max(samples), list(samples))


def ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Interval:
    """The ratio of the medians of two contenders' samples, with its 95 % percentile bootstrap interval.

    The samples are paired by round: both contenders of a round met the same state of the machine, so rounds are
    resampled, not samples. Raises ValueError where the counts differ or are zero, or a time is not positive.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            f"{len(numerator)} and {len(denominator)} samples; the same number is needed of both, at least one"
        )
    if min(*numerator, *denominator) <= 0:
        raise ValueError("a time is not positive")
    pair = torch.tensor([list(numerator), list(denominator)], dtype=torch.float64)
    rounds = pair.shape[1]
    picks = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(seed))
    medians = pair[:, picks].quantile(0.5, dim=-1)  # [2, RESAMPLES]
    low, high = (medians[0] / medians[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(statistics.median(numerator) / statistics.median(denominator), low, high)
