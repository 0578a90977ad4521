"""MovieLens in memory: ratings as clicks, with what is known of users and items as features."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from engine.task import Batch
from models.recommender.data.bias import BiasPredictor
from models.recommender.data.config import MovieLensConfig
from models.recommender.data.lines import Malformed
from models.recommender.data.movielens_columns import read_columns
from models.recommender.data.movielens_files import Ratings, find_tables, read_ratings
from models.recommender.data.source import Floats, Integers, Reference, Source, pack
from models.recommender.metrics import auc, base_rate_logloss, logloss


class MovieLens(Source):
    """The ratings of the files at `data.path`.

    Dense features are the time of the rating and the user's age, as far as the files have them, standardised by the
    training part.
    Raises OSError and ValueError, naming key, file, line and field, for what is not there or cannot be read.
    """

    def __init__(self, config: MovieLensConfig, batch_size: int, eval_batch_size: int, seed: int) -> None:
        assert config.path is not None
        self._config, self._batch_size, self._eval_batch_size, self._seed = config, batch_size, eval_batch_size, seed
        self._malformed = Malformed(skip=config.malformed == "skip")
        tables = find_tables(config.path)
        ratings = read_ratings(tables.ratings, self._malformed)
        self._labels = (ratings.values >= config.threshold).astype(np.float32)
        self._train, self._validation = _split(ratings, config)
        self._columns, ages = read_columns(ratings, tables, self._malformed)
        dense = [] if ratings.times is None else [ratings.times]
        dense += [] if ages is None else [ages[ratings.users]]
        self._dense = self._standardised(dense)
        self.n_dense = len(dense)
        self.features = tuple(column.feature for column in self._columns)
        self.validation_samples = len(self._validation)
        self._sizes = (len(ratings.user_index), len(ratings.item_index))
        train, held_out = self._train, self._validation
        bias = BiasPredictor.fit(ratings.users[train], ratings.items[train], self._labels[train], *self._sizes)
        self._bias_scores = bias(ratings.users[held_out], ratings.items[held_out])
        self.digest = self._digest_of_all()
        self._order: tuple[tuple[int, int], Integers] | None = None

    # -----------------------------------------------------------------------------------------------------------------
    # Batches

    def batch(self, step: int, rank: int = 0) -> Batch:
        """The samples of an index, each once an epoch in a random order: a pure function of (seed, index, rank)."""
        taken, position, wanted = [], step * self._batch_size, self._batch_size
        while wanted:
            epoch, first = divmod(position, len(self._train))
            part = self._epoch(epoch, rank)[first : first + wanted]
            taken.append(part)
            position, wanted = position + len(part), wanted - len(part)
        return self._batch_of(np.concatenate(taken))

    def _epoch(self, epoch: int, rank: int) -> Integers:
        """The order of an epoch; that of the last one asked for is kept."""
        if self._order is None or self._order[0] != (epoch, rank):
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, epoch, rank])))
            self._order = (epoch, rank), generator.permutation(self._train)
        return self._order[1]

    def validation(self) -> Iterator[Batch]:
        for first in range(0, len(self._validation), self._eval_batch_size):
            yield self._batch_of(self._validation[first : first + self._eval_batch_size])

    def _batch_of(self, ratings: Integers) -> Batch:
        bags = [column.bags(ratings) for column in self._columns]
        ids, lengths = (np.concatenate([bag[i] for bag in bags]) for i in (0, 1))
        return pack(self._dense[ratings], ids, lengths, self._labels[ratings])

    # -----------------------------------------------------------------------------------------------------------------
    # What there is to say

    def references(self) -> Mapping[str, Reference]:
        labels = torch.from_numpy(self._labels[self._validation])
        rate = float(self._labels[self._train].mean())
        scores = torch.from_numpy(self._bias_scores)
        return {
            "constant": Reference(0.5, base_rate_logloss(labels, rate)),
            "user and item bias": Reference(auc(scores, labels), logloss(torch.logit(scores), labels)),
        }

    def describe(self) -> str:
        users, items = self._sizes
        total = len(self._labels)
        skipped = f"; {self._malformed.describe()}" if self._malformed.count else ""
        held_out = "the latest" if self._config.split == "time" else "random"
        return (
            f"{self._config.path}: {total:,} ratings of {users:,} users and {items:,} items, {len(self._train):,} to "
            f"train and {held_out} {len(self._validation):,} ({len(self._validation) / total:.1%}) to validate; a "
            f"rating of at least {self._config.threshold:g} is a click ({self._labels.mean():.1%}); "
            f"features: {', '.join(feature.name for feature in self.features)}{skipped}"
        )

    def _digest_of_all(self) -> str:
        hashed = hashlib.blake2b(digest_size=8)
        for values in (self._labels, self._dense, self._train, self._validation):
            hashed.update(np.ascontiguousarray(values).data)
        for column in self._columns:
            hashed.update(column.feature.name.encode())
            for ids in (column.owners, column.ids, column.bounds):
                hashed.update(b"" if ids is None else np.ascontiguousarray(ids).data)
        return hashed.hexdigest()

    # -----------------------------------------------------------------------------------------------------------------
    # Features

    def _standardised(self, dense: list[NDArray[np.float64]]) -> Floats:
        """[ratings, n_dense] of mean 0 and variance 1 over the training part; what is missing (NaN) becomes 0."""
        if not dense:
            return np.zeros((len(self._labels), 0), dtype=np.float32)
        values = np.stack(dense, axis=1)
        known = values[self._train]
        count = np.maximum(1, (~np.isnan(known)).sum(axis=0))
        mean = np.nansum(known, axis=0) / count
        deviation = np.sqrt(np.nansum((known - mean) ** 2, axis=0) / count)
        return np.nan_to_num((values - mean) / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)


def _split(ratings: Ratings, config: MovieLensConfig) -> tuple[Integers, Integers]:
    """Which ratings to train on and which to validate on. Raises ValueError where a part would be empty."""
    count = len(ratings.values)
    held_out = round(config.validation_fraction * count)
    if not 0 < held_out < count:
        raise ValueError(
            f"data.validation_fraction={config.validation_fraction}: of {count} ratings in {config.path} that holds "
            f"out {held_out}; both parts need at least one"
        )
    if config.split == "time":
        if ratings.times is None:
            raise ValueError(f"data.split=time: the ratings in {config.path} have no timestamps; allowed: random")
        order = np.argsort(ratings.times, kind="stable")
    else:
        order = np.random.Generator(np.random.Philox(config.split_seed)).permutation(count)
    return np.sort(order[:-held_out]), np.sort(order[-held_out:])
