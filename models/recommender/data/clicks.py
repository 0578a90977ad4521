"""A synthetic click log in Criteo's shape: 13 dense and 26 categorical features, labels drawn from a planted model.

Ids follow a power law and are 64-bit hashes. The effects of an id are normal numbers made of a hash of it, so that
nothing of the vocabulary's size is stored. The logit is the sum of a bias and of three parts that are uncorrelated:

    dense   of each dense feature x, standard normal: x and (x^2 - 1) / sqrt(2), in a fixed mixture
    ids     of each categorical feature, the effect of its id
    pairs   of each pair of features of a group of `GROUPS`, the inner product of their ids' vectors of `RANK` numbers

Effects and vectors have mean 0 and variance 1 over the ids of their feature, so that a pair has no part that its ids
have by themselves. Those of a bag are added up and divided by the square root of the mean length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.task import Batch
from models.recommender.data.config import ClicksConfig
from models.recommender.data.hashing import NORMALS, mix64, normals
from models.recommender.data.source import Feature, Floats, Integers, Reference, Source, pack, part_of, units
from models.recommender.metrics import auc, base_rate_logloss, logloss

N_DENSE = 13
CARDINALITIES = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Distinct ids of the 26 features C1 to C26 of Criteo's Display Advertising Challenge."""
F = len(CARDINALITIES)
MULTI_VALUED = (6, 9, 14, 25)
"""Features of bags of any length, by their index: tags, categories."""
MEAN_LENGTH = 2.0
LONGEST = 20
RANK = NORMALS - 1
"""Numbers of the vector by which an id takes part in pairs."""
GROUPS = ((0, 2, 10), (1, 12, 14), (4, 7, 9), (15, 17, 24))
"""Features, by their index, each two of which in a group form a pair."""
PAIRS = tuple((a, b) for group in GROUPS for i, a in enumerate(group) for b in group[i + 1 :])
DENSE_VARIANCE, IDS_VARIANCE, PAIRS_VARIANCE = 0.7, 1.8, 0.9
"""Variance of each part of the logit."""
BASE_RATE = 0.25
"""The share of clicks, as in Criteo's log."""
SMALLEST_TABLE = 1_000
"""Tables have a row an id, but no fewer than these: of few ids none may lose its row to another one's hash."""
HEAD = 4_096
"""Most frequent ids whose effects count one by one in a feature's mean and variance; of all others together the mean is
taken to be 0 and the variance 1."""
VALIDATION, PROBE, TRAINING = 0, 1, 2
"""What samples are drawn for: never the same ones."""
BLOCK = 8_192
"""Samples of the validation set that are drawn at once, whatever the batch size."""

_LENGTH_SCALE = np.float32(1.0 / np.log(1.0 + 1.0 / MEAN_LENGTH))
"""An exponential number times this, rounded down, has MEAN_LENGTH as its mean."""
_WEIGHTS = np.array([(-1) ** i * 0.9**i for i in range(N_DENSE)])
_WEIGHTS *= np.sqrt(DENSE_VARIANCE / np.sum(_WEIGHTS**2))
_LINEAR = (np.sqrt(0.8) * _WEIGHTS).astype(np.float32)
_QUADRATIC = (np.sqrt(0.2) * _WEIGHTS[::-1] / np.sqrt(2.0)).astype(np.float32)


class Samples(NamedTuple):
    """Samples without labels: bags as in a batch, feature-major."""

    dense: Floats
    ids: Integers
    feature: Integers
    """Of each id, the feature it belongs to."""
    lengths: Integers


class Parts(NamedTuple):
    """Of each sample, the parts of the logit: [B] each."""

    dense: Floats
    ids: Floats
    pairs: Floats


class Clicks(Source):
    """The click log of a configuration, drawn as it is needed.

    batch_size, eval_batch_size  samples of a training and of a validation batch.
    seed                         of the training samples.
    """

    n_dense = N_DENSE

    def __init__(self, config: ClicksConfig, batch_size: int, eval_batch_size: int, seed: int) -> None:
        self._config, self._batch_size, self._eval_batch_size = config, batch_size, eval_batch_size
        self._seed = seed
        self._cardinality = np.minimum(np.array(CARDINALITIES, dtype=np.int64), config.max_ids)
        self.features = tuple(
            Feature(f"C{i + 1}", max(SMALLEST_TABLE, int(n)), i in MULTI_VALUED)
            for i, n in enumerate(self._cardinality)
        )
        self.validation_samples = config.validation_samples
        self._salt = mix64(np.array([config.seed], dtype=np.uint64))
        self._power = 1.0 - config.skew
        self._reach = (self._cardinality + 1.0) ** self._power - 1.0
        self._mean, self._deviation = self._moments()
        self._bias = self._fitting_bias()
        self.digest = hashlib.blake2b(repr(config).encode(), digest_size=8).hexdigest()

    # -----------------------------------------------------------------------------------------------------------------
    # Samples

    def batch(self, step: int, rank: int = 0) -> Batch:
        """The samples of an index: a pure function of (seed, index, rank)."""
        return self._drawn(self._batch_size, TRAINING, self._seed, step, rank)[0]

    def validation(self) -> Iterator[Batch]:
        for block, _ in self._validation():
            for first in range(0, units(block), self._eval_batch_size):
                yield part_of(block, F, slice(first, first + self._eval_batch_size))

    def _validation(self) -> Iterator[tuple[Batch, Floats]]:
        """The validation set in blocks, with the planted logits."""
        for first in range(0, self.validation_samples, BLOCK):
            size = min(BLOCK, self.validation_samples - first)
            yield self._drawn(size, VALIDATION, self._config.seed, first)

    @cached_property
    def _validation_logits(self) -> tuple[Tensor, Tensor]:
        """The planted logits of the validation set, and its labels."""
        blocks = [(torch.from_numpy(logits), batch["labels"]) for batch, logits in self._validation()]
        return torch.cat([logits for logits, _ in blocks]), torch.cat([labels for _, labels in blocks])

    def ceiling(self) -> Reference:
        logits, labels = self._validation_logits
        return Reference(auc(logits, labels), logloss(logits, labels))

    def references(self) -> dict[str, Reference]:
        return {"constant": Reference(0.5, base_rate_logloss(self._validation_logits[1], BASE_RATE))}

    def variance_shares(self, count: int = 1 << 15) -> dict[str, float]:
        """The share of each part in the variance of the logit, measured over this many samples."""
        parts = self.parts(self._samples(_generator(PROBE, self._config.seed), count))
        total = float(np.var(np.sum(parts, axis=0)))
        return {name: float(np.var(part)) / total for name, part in parts._asdict().items()}

    def describe(self) -> str:
        ceiling, shares = self.ceiling(), self.variance_shares()
        return (
            f"synthetic clicks: {N_DENSE} dense and {F} categorical features ({len(MULTI_VALUED)} multi-valued) of "
            f"{self._cardinality.min():,} to {self._cardinality.max():,} ids; {self.validation_samples:,} samples to "
            f"validate; the planted model's logit has {shares['ids']:.0%} of its variance from single ids and "
            f"{shares['pairs']:.0%} from pairs of ids, and reaches AUC {ceiling.auc:.4f}, logloss {ceiling.logloss:.4f}"
        )

    def _drawn(self, count: int, *key: int) -> tuple[Batch, Floats]:
        """A batch of this many samples, and their logits in the planted model."""
        generator = _generator(*key)
        samples = self._samples(generator, count)
        logits = self._logits(samples)
        clicked = generator.random(count, dtype=np.float32) < 1.0 / (1.0 + np.exp(-logits))
        return pack(samples.dense, samples.ids, samples.lengths, clicked.astype(np.float32)), logits

    def _samples(self, generator: np.random.Generator, count: int) -> Samples:
        dense = generator.standard_normal((count, N_DENSE), dtype=np.float32)
        lengths = np.ones((F, count), dtype=np.int64)
        drawn = generator.standard_exponential((len(MULTI_VALUED), count), dtype=np.float32)
        lengths[list(MULTI_VALUED)] = np.minimum(drawn * _LENGTH_SCALE, LONGEST).astype(np.int64)
        feature = np.repeat(np.arange(F), lengths.sum(axis=1))
        # The inverse of the power law's distribution function, on [1, cardinality + 1).
        x = (1.0 + self._reach[feature] * generator.random(len(feature))) ** (1.0 / self._power)
        rank = np.minimum(x.astype(np.int64), self._cardinality[feature]) - 1
        return Samples(dense, mix64(rank * F + feature).view(np.int64), feature, lengths.reshape(-1))

    # -----------------------------------------------------------------------------------------------------------------
    # The planted model

    def parts(self, samples: Samples) -> Parts:
        """The parts of the samples' logits in the planted model, the bias left out."""
        x = samples.dense
        count = len(x)
        dense = x @ _LINEAR + (x * x - 1.0) @ _QUADRATIC
        effects = (self._raw_effects(samples.ids) - self._mean[samples.feature]) / self._deviation[samples.feature]
        pooled = _pooled(effects, samples.lengths).reshape(F, count, NORMALS)
        pooled[list(MULTI_VALUED)] /= np.sqrt(MEAN_LENGTH)
        ids = np.float32(np.sqrt(IDS_VARIANCE / F)) * pooled[:, :, RANK].sum(axis=0)
        scale = np.float32(np.sqrt(PAIRS_VARIANCE / (len(PAIRS) * RANK)))
        first, second = (pooled[[pair[i] for pair in PAIRS], :, :RANK] for i in (0, 1))
        return Parts(dense, ids, scale * np.einsum("pbr,pbr->b", first, second))

    def _logits(self, samples: Samples) -> Floats:
        return np.sum(self.parts(samples), axis=0) + np.float32(self._bias)

    def _raw_effects(self, ids: Integers) -> Floats:
        """[n, NORMALS] standard normal numbers of each id: its vector, then its effect."""
        return normals(mix64(ids.view(np.uint64) ^ self._salt))

    def _moments(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation, [F, NORMALS], of the raw effects over the ids of each feature."""
        means, deviations = [], []
        for feature, cardinality in enumerate(self._cardinality):
            rank = np.arange(min(HEAD, cardinality))
            below = (np.arange(1, len(rank) + 2, dtype=np.float64) ** self._power - 1.0) / self._reach[feature]
            share = np.diff(below)
            effects = self._raw_effects(mix64(rank * F + feature).view(np.int64)).astype(np.float64)
            mean = share @ effects
            means.append(mean)
            deviations.append(np.sqrt(share @ effects**2 + (1.0 - below[-1]) - mean**2))
        return np.array(means, dtype=np.float32), np.array(deviations, dtype=np.float32)

    def _fitting_bias(self) -> float:
        """The bias that gives the base rate, by bisection over some samples."""
        logits = np.sum(self.parts(self._samples(_generator(PROBE, self._config.seed), 1 << 15)), axis=0)
        low, high = -20.0, 20.0
        for _ in range(40):
            middle = (low + high) / 2
            rate = float(np.mean(1.0 / (1.0 + np.exp(-(logits + middle)))))
            low, high = (middle, high) if rate < BASE_RATE else (low, middle)
        return (low + high) / 2


def _pooled(values: Floats, lengths: Integers) -> Floats:
    """The sums, [bags, n], of the rows of each bag; an empty bag has zeros."""
    pooled = np.zeros((len(lengths), values.shape[1]), dtype=np.float32)
    starts = np.cumsum(lengths) - lengths
    filled = lengths > 0
    pooled[filled] = np.add.reduceat(values, starts[filled], axis=0)
    return pooled


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
