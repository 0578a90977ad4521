"""Metrics against values worked out by hand and against every pair counted; their edges."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from models.recommender.metrics import (
    Predictions,
    auc,
    base_rate_logloss,
    calibration,
    calibration_error,
    click_metrics,
    logloss,
)


def pairs_counted(scores: Tensor, labels: Tensor) -> float:
    """The share of pairs of a positive and a negative sample in which the positive's score is higher; ties are half."""
    positive, negative = scores[labels == 1].double()[:, None], scores[labels == 0].double()[None]
    return ((positive > negative).double() + 0.5 * (positive == negative)).mean().item()


def test_auc_by_hand() -> None:
    # Positives 0.8, 0.4; negatives 0.6, 0.4, 0.1: of six pairs 3 + 1 are won and one is tied.
    scores, labels = torch.tensor([0.8, 0.4, 0.6, 0.4, 0.1]), torch.tensor([1, 1, 0, 0, 0])
    assert auc(scores, labels) == pytest.approx(4.5 / 6, abs=1e-15)
    assert auc(-scores, labels) == pytest.approx(1.5 / 6, abs=1e-15)
    assert auc(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])) == 1.0


@pytest.mark.parametrize("levels", [1, 2, 7, 50, None])
@pytest.mark.parametrize("n", [2, 3, 111, 777])
def test_auc_is_the_share_of_pairs_won_with_any_number_of_ties(n: int, levels: int | None) -> None:
    scores = torch.randn(n) if levels is None else torch.randint(levels, (n,)).float()
    labels = torch.randint(2, (n,)).float()
    labels[0], labels[1] = 1, 0
    assert auc(scores, labels) == pytest.approx(pairs_counted(scores, labels), abs=1e-12)
    if levels == 1:
        assert auc(scores, labels) == 0.5


def test_auc_does_not_depend_on_the_scale_or_the_order() -> None:
    scores, labels = torch.randn(501).double(), torch.randint(2, (501,))
    order = torch.randperm(501)
    for other in (torch.sigmoid(scores), 1000 * scores - 3):
        assert auc(other, labels) == auc(scores, labels)
    assert auc(scores[order], labels[order]) == auc(scores, labels)
    assert auc(torch.tensor([-math.inf, 0.0, math.inf]), torch.tensor([0, 1, 1])) == 1.0
    assert math.isnan(auc(torch.tensor([0.0, math.nan]), torch.tensor([0, 1])))


def test_a_million_samples_are_counted_exactly_and_fast() -> None:
    n = 1_000_000
    labels = (torch.rand(n) < 0.3).float()
    scores = torch.randn(n) + labels
    started = time.process_time()
    found = auc(scores, labels)
    assert time.process_time() - started < 5
    assert found == pytest.approx(0.5 + 0.5 * math.erf(0.5), abs=0.003)  # of two normals one apart
    mirrored = auc(-scores, labels)
    assert found + mirrored == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("value", "name"), [(1, "positive"), (0, "negative")])
def test_one_class_alone_has_no_auc(value: int, name: str) -> None:
    with pytest.raises(ValueError, match=rf"all 1,003 labels are {name}"):
        auc(torch.randn(1003), torch.full((1003,), value))


def test_logloss_by_hand_and_for_large_logits() -> None:
    logits, labels = torch.tensor([0.0, math.log(3.0), -math.log(4.0)]), torch.tensor([1, 1, 0])
    expected = (math.log(2) - math.log(0.75) - math.log(0.8)) / 3
    assert logloss(logits, labels) == pytest.approx(expected, rel=1e-7)
    assert logloss(torch.tensor([1000.0]), torch.tensor([0])) == 1000.0
    assert logloss(torch.tensor([1000.0]), torch.tensor([1])) == 0.0


def test_the_constant_predictor() -> None:
    labels = torch.tensor([1, 0, 0, 0])
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert base_rate_logloss(labels) == pytest.approx(entropy, abs=1e-15)
    assert base_rate_logloss(labels, 0.5) == pytest.approx(math.log(2), abs=1e-15)
    rate = torch.full((4,), math.log(1 / 3)).double()
    assert logloss(rate, labels) == pytest.approx(entropy, abs=1e-12) and auc(rate, labels) == 0.5
    assert base_rate_logloss(torch.ones(3)) == 0.0
    assert base_rate_logloss(labels, 1.0) == math.inf


def test_calibration_by_hand() -> None:
    probabilities, labels = torch.tensor([0.9, 0.5, 0.2, 0.4]), torch.tensor([1, 0, 0, 1])
    assert calibration(probabilities, labels) == pytest.approx(0.5 / 0.5, rel=1e-6)
    assert calibration(probabilities / 2, labels) == pytest.approx(0.5, rel=1e-6)
    # Two bins by the prediction, {0.2, 0.4} and {0.5, 0.9}: means 0.3 and 0.7, of labels 0.5 and 0.5.
    assert calibration_error(probabilities, labels, bins=2) == pytest.approx(0.2, rel=1e-6)
    with pytest.raises(ValueError, match="no label is positive"):
        calibration(probabilities, torch.zeros(4))


def test_calibration_error_of_a_calibrated_predictor_is_small_and_of_another_is_not() -> None:
    logits = torch.randn(200_000, dtype=torch.float64)
    labels = (torch.rand_like(logits) < torch.sigmoid(logits)).float()
    assert calibration_error(torch.sigmoid(logits), labels) < 0.01
    assert calibration_error(torch.sigmoid(3 * logits), labels) > 0.05
    assert calibration_error(torch.sigmoid(logits[:3]), labels[:3]) <= 1  # fewer samples than bins


def test_metrics_of_batches_are_those_of_the_whole_set() -> None:
    logits, labels = torch.randn(1000), torch.randint(2, (1000,)).float()
    predictions = Predictions()
    for part in torch.arange(1000).split(77):
        predictions.add(logits[part].requires_grad_(), labels[part])
    assert predictions.metrics() == click_metrics(logits, labels)
    assert set(predictions.metrics()) == {"auc", "logloss", "calibration", "calibration_error"}
    half = Predictions()
    half.add(logits.bfloat16(), labels)
    assert half.metrics()["auc"] == pytest.approx(pairs_counted(logits.bfloat16(), labels), abs=1e-12)


def test_what_is_no_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits \[3, 1\], labels \[3\]: both must be \[B\]"):
        Predictions().add(torch.randn(3, 1), torch.ones(3))
    with pytest.raises(ValueError, match="no predictions were added"):
        Predictions().metrics()
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        auc(torch.randn(3), torch.tensor([0.0, 0.5, 1.0]))
    with pytest.raises(ValueError, match=r"scores \[0\], labels \[0\]: .*n >= 1"):
        logloss(torch.zeros(0), torch.zeros(0))
