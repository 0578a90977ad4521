"""Metrics of a click model over a whole validation set: AUC, logloss, calibration.

Values are exact, of float64 sums; nothing is binned but the expected calibration error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CALIBRATION_BINS = 20


class Predictions:
    """Logits and labels, gathered batch by batch: 8 bytes a sample, where the logits are."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits and labels (0 or 1), each [B]. Raises ValueError for other shapes."""
        if logits.dim() != 1 or logits.shape != labels.shape:
            raise ValueError(
                f"logits {list(logits.shape)}, labels {list(labels.shape)}: both must be [B], one value a sample"
            )
        self._logits.append(logits.detach().float())
        self._labels.append(labels.detach())

    def metrics(self) -> dict[str, float]:
        """`click_metrics` of all that was added; raises ValueError where nothing was."""
        if not self._logits:
            raise ValueError("no predictions were added, and metrics of none do not exist")
        return click_metrics(torch.cat(self._logits), torch.cat(self._labels))


def click_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """auc, logloss, calibration and calibration_error, as the functions of these names have them."""
    probabilities = torch.sigmoid(logits.double())
    return {
        "auc": auc(logits, labels),
        "logloss": logloss(logits, labels),
        "calibration": calibration(probabilities, labels),
        "calibration_error": calibration_error(probabilities, labels),
    }


def auc(scores: Tensor, labels: Tensor) -> float:
    """The area under the ROC curve: the probability that a positive sample has a higher score than a negative one.

    scores, labels: [n]; any order-preserving scale of the scores will do. Pairs of equal scores count half
    (Mann and Whitney, 1947). Exact: one sort, and counts in int64. NaN where a score is NaN.
    Raises ValueError where all labels are of one class, of which there are no pairs.
    """
    positive = _positive(scores, labels)
    if scores.isnan().any():
        return math.nan
    order = torch.argsort(scores)
    scores, positive = scores[order], positive[order].long()
    _, counts = torch.unique_consecutive(scores, return_counts=True)
    ends = counts.cumsum(0)
    # Of the samples up to the end of each group of equal scores, how many are positive.
    up_to = positive.cumsum(0)[ends - 1]
    positives = torch.diff(up_to, prepend=up_to.new_zeros(1))
    negatives = counts - positives
    total = int(up_to[-1])
    _require_both(total, len(scores))
    below = negatives.cumsum(0) - negatives
    twice = (positives * (2 * below + negatives)).sum()
    return int(twice) / (2 * total * (len(scores) - total))


def logloss(logits: Tensor, labels: Tensor) -> float:
    """The mean binary cross entropy of sigmoid(logits), in nats a sample. logits, labels: [n]."""
    positive = _positive(logits, labels)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), positive.double(), reduction="sum")
    return float(losses) / len(logits)


def base_rate_logloss(labels: Tensor, rate: float | None = None) -> float:
    """The logloss of the constant predictor: of `rate`, or of the labels' own mean, the best there is."""
    mean = float(_positive(labels, labels).double().mean())
    rate = mean if rate is None else rate
    terms = [(share, predicted) for share, predicted in ((mean, rate), (1 - mean, 1 - rate)) if share]
    return sum(-share * math.log(predicted) if predicted > 0 else math.inf for share, predicted in terms)


def calibration(probabilities: Tensor, labels: Tensor) -> float:
    """The mean predicted probability over the share of positive labels: 1 is calibrated, above 1 predicts too many.

    Raises ValueError where no label is positive.
    """
    rate = float(_positive(probabilities, labels).double().mean())
    if rate == 0:
        raise ValueError("calibration is relative to the share of positive labels, and no label is positive")
    return float(probabilities.double().mean()) / rate


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = CALIBRATION_BINS) -> float:
    """The expected calibration error: |mean prediction - mean label| of bins of about equally many samples, averaged.

    probabilities, labels: [n]. Bins are cut at quantiles of the predictions (Nguyen and O'Connor, 2015).
    """
    positive = _positive(probabilities, labels).double()
    probabilities, order = probabilities.double().sort()
    gaps = (probabilities - positive[order]).tensor_split(min(bins, len(probabilities)))
    return float(torch.stack([gap.sum().abs() for gap in gaps]).sum()) / len(probabilities)


def _positive(scores: Tensor, labels: Tensor) -> Tensor:
    """Which labels are 1. Raises ValueError for labels that are neither 0 nor 1, for none, and for other shapes."""
    if scores.dim() != 1 or scores.shape != labels.shape or not len(labels):
        raise ValueError(
            f"scores {list(scores.shape)}, labels {list(labels.shape)}: both must be [n], one value a sample, n >= 1"
        )
    positive = labels == 1
    if not (positive | (labels == 0)).all():
        raise ValueError("labels must be 0 or 1")
    return positive


def _require_both(positives: int, count: int) -> None:
    if positives in (0, count):
        name = "positive" if positives else "negative"
        raise ValueError(f"AUC compares positive with negative samples, and all {count:,} labels are {name}")
