"""What a source of labelled samples gives the recommender, and the layout of its batches.

A batch of B samples, F categorical features and n_dense dense ones:

    dense    float32 [B, n_dense]
    ids      int64 [nnz]        raw 64-bit ids of all bags, negative ones too; tables are looked up by their hash
    offsets  int64 [F * B + 1]  bag b of feature f is ids[offsets[f * B + b] : offsets[f * B + b + 1]]
    labels   float32 [B]        0 or 1

Bags are feature-major, as in torchrec's KeyedJaggedTensor (its values and offsets). A bag of a multi-valued feature may
be empty; one of any other feature has exactly one id.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.task import Batch, StreamState

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Feature:
    """A categorical feature.

    name          as tables show it.
    rows          rows that its table should have.
    multi_valued  whether a bag may have another number of ids than one.
    """

    name: str
    rows: int
    multi_valued: bool = False


class Reference(NamedTuple):
    """What a predictor that is no network reaches on the validation set; logloss in nats a sample."""

    auc: float
    logloss: float


class Source(ABC):
    """Labelled samples to train on and to validate on.

    n_dense             dense features of a sample; may be 0.
    features            its categorical features.
    validation_samples  size of the validation set.
    digest              tells whether the data is what it was another time.
    """

    n_dense: int
    features: tuple[Feature, ...]
    validation_samples: int
    digest: str

    @abstractmethod
    def batch(self, step: int, rank: int = 0) -> Batch:
        """The training batch of an index, a pure function of (seed, index, rank); of a stream, its index-th batch."""

    def batches(self, start: int, state: StreamState | None = None) -> Iterator[tuple[Batch, StreamState | None]]:
        """The training batches from an index on, each with the state from which they go on: see `engine.task.Task`."""
        for index in itertools.count(start):
            yield self.batch(index), None

    @abstractmethod
    def validation(self) -> Iterable[Batch]:
        """The whole validation set, in batches of at most eval_batch_size samples."""

    @abstractmethod
    def describe(self) -> str:
        """Where the samples come from, and how many are in each part."""

    def ceiling(self) -> Reference | None:
        """What the model that the labels were drawn from reaches on the validation set, where it is known."""
        return None

    def references(self) -> Mapping[str, Reference]:
        """Simple predictors on the same validation set, by name; the constant one, of the base rate, first."""
        return {}


def units(batch: Batch) -> int:
    """The number of samples of a batch."""
    return len(batch["labels"])


def pack(dense: Floats, ids: Integers, lengths: Integers, labels: Floats) -> dict[str, Tensor]:
    """The batch of dense features, ids in feature-major order, the lengths [F * B] of their bags, and labels."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return {
        "dense": torch.from_numpy(dense),
        "ids": torch.from_numpy(ids),
        "offsets": torch.from_numpy(offsets),
        "labels": torch.from_numpy(labels),
    }


def part_of(batch: Batch, features: int, samples: slice) -> dict[str, Tensor]:
    """The batch of some consecutive samples, at least one, of a batch with this many categorical features."""
    lengths = batch["offsets"].diff().view(features, -1)
    bounds = batch["offsets"][:-1].view(features, -1)
    first, last, _ = samples.indices(lengths.shape[1])
    taken = lengths[:, first:last]
    ends = bounds[:, first] + taken.sum(dim=1)
    ids = [batch["ids"][start:end] for start, end in zip(bounds[:, first].tolist(), ends.tolist(), strict=True)]
    offsets = torch.zeros(taken.numel() + 1, dtype=torch.int64)
    torch.cumsum(taken.reshape(-1), 0, out=offsets[1:])
    return {
        "dense": batch["dense"][first:last],
        "ids": torch.cat(ids),
        "offsets": offsets,
        "labels": batch["labels"][first:last],
    }
