"""Criteo's click log, read while it is trained on: shuffled in blocks, and resumed exactly where it stopped.

Files are read in an order of each epoch, in blocks of at most `shuffle_buffer` rows of one file, each of which is put
in an order of its own. Where the stream stands is thus where its block begins, and how far into the block it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from engine.task import Batch, StreamState
from models.recommender.data.config import CriteoConfig
from models.recommender.data.criteo_rows import CATEGORIES, DENSE, Rows, blocks_of, find_files, joined
from models.recommender.data.hashing import Unsigned, mix64
from models.recommender.data.lines import Malformed
from models.recommender.data.source import Feature, Reference, Source, pack
from models.recommender.metrics import base_rate_logloss

VALIDATION_BLOCK = 10_000
"""Rows that are read at once to find those to validate on."""

log = logging.getLogger(__name__)


class Criteo(Source):
    """The rows of the files at `data.path`, streamed; those to validate on are in memory.

    Held out, unless validation files are given, are rows whose digest is below a share of all digests, so that equal
    rows are in one part. Raises OSError and ValueError, naming key, file, line and field, for what is not there, cannot
    be read or has nothing to validate on.
    """

    n_dense = len(DENSE)

    def __init__(self, config: CriteoConfig, batch_size: int, eval_batch_size: int, seed: int) -> None:
        self._config, self._batch_size, self._eval_batch_size, self._seed = config, batch_size, eval_batch_size, seed
        self._files = find_files(config.path, "data.path")
        self.features = tuple(Feature(name, config.rows) for name in CATEGORIES)
        self._malformed = Malformed(skip=config.malformed == "skip")
        apart = config.validation_path is not None
        self._held_below = 0 if apart else int(config.validation_fraction * 2**64)
        files = find_files(config.validation_path, "data.validation_path") if apart else self._files
        self._validation = self._read_validation(files, apart)
        self.validation_samples = len(self._validation.labels)
        if not self.validation_samples:
            raise ValueError(
                f"{_named(files)}: no rows to validate on"
                + ("" if apart else f": a share of {config.validation_fraction} of the rows is none")
            )
        self.digest = self._digest_of_all()

    def _read_validation(self, files: list[Path], apart: bool) -> Rows:
        parts, missing = [], self._config.validation_samples
        for file in files:
            blocks = blocks_of(file, VALIDATION_BLOCK, None, self._config.label, self._malformed)
            with contextlib.closing(blocks):
                while missing and (block := next(blocks, None)) is not None:
                    rows = block[0] if apart else block[0].take(digests(block[0]) < self._held_below)
                    parts.append(rows.take(slice(missing)))
                    missing -= len(parts[-1].labels)
        return joined(parts)

    # -----------------------------------------------------------------------------------------------------------------
    # Batches

    def batch(self, step: int, rank: int = 0) -> Batch:
        """The batch of an index, for which all before it are read."""
        with contextlib.closing(self.batches(0)) as batches:
            return next(islice(batches, step, None))[0]

    def batches(
        self, start: int, state: StreamState | None = None
    ) -> Generator[tuple[Batch, StreamState | None], None, None]:
        """Batches without end. Raises ValueError where there is nothing to train on, and for malformed rows."""
        skipped = start if state is None else 0
        with contextlib.closing(self._batches(state)) as batches:
            yield from islice(batches, skipped, None)

    def _batches(self, state: StreamState | None) -> Generator[tuple[Batch, StreamState], None, None]:
        waiting: list[Rows] = []
        wanted = self._batch_size
        with contextlib.closing(self._blocks(state)) as blocks:
            for rows, place in blocks:
                first = 0
                while first < len(rows.labels):
                    part = rows.take(slice(first, first + wanted))
                    waiting.append(part)
                    first, wanted = first + len(part.labels), wanted - len(part.labels)
                    if not wanted:
                        yield batch_of(joined(waiting)), place | {"sample": place["sample"] + first}
                        waiting, wanted = [], self._batch_size

    def _blocks(self, state: StreamState | None) -> Generator[tuple[Rows, StreamState], None, None]:
        """Shuffled blocks of rows to train on, of all epochs, from a state on; each with the state at its first row."""
        place = state or {"epoch": 0, "file": 0, "block": 0, "reader": None, "sample": 0}
        epoch, first_file, block, at, sample = (place[k] for k in ("epoch", "file", "block", "reader", "sample"))
        from_start = state is None
        while True:
            malformed, found = Malformed(skip=self._config.malformed == "skip"), 0
            order = self._generator(epoch).permutation(len(self._files))
            for file in range(first_file, len(order)):
                path = self._files[order[file]]
                blocks = blocks_of(path, self._config.shuffle_buffer, at, self._config.label, malformed)
                with contextlib.closing(blocks):
                    for rows, after in blocks:
                        rows = rows.take(digests(rows) >= self._held_below)
                        rows = rows.take(self._generator(epoch, block).permutation(len(rows.labels)))
                        found += len(rows.labels)
                        here = {"epoch": epoch, "file": file, "block": block, "reader": at, "sample": sample}
                        yield rows.take(slice(sample, None)), here
                        block, at, sample = block + 1, after, 0
                at = None
            if malformed.count:
                log.warning("epoch %d of the training data: %s", epoch + 1, malformed.describe())
            if from_start and not found:
                raise ValueError(f"{_named(self._files)}: no rows to train on")
            epoch, first_file, block, at, from_start = epoch + 1, 0, 0, None, True

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, len(key), *key])))

    def validation(self) -> Iterator[Batch]:
        for first in range(0, self.validation_samples, self._eval_batch_size):
            yield batch_of(self._validation.take(slice(first, first + self._eval_batch_size)))

    # -----------------------------------------------------------------------------------------------------------------
    # What there is to say

    def references(self) -> Mapping[str, Reference]:
        """The constant predictor of the validation set's own base rate, since that of the rest is unknown."""
        return {"constant": Reference(0.5, base_rate_logloss(torch.from_numpy(self._validation.labels)))}

    def describe(self) -> str:
        share = f", of those held out ({self._config.validation_fraction:.1%} of all rows)" if self._held_below else ""
        skipped = f"; while these were read, {self._malformed.describe()}" if self._malformed.count else ""
        return (
            f"{_named(self._files)}: streamed, shuffled in blocks of {self._config.shuffle_buffer:,} rows; "
            f"{self.validation_samples:,} rows to validate{share}, {self._validation.labels.mean():.1%} of them "
            f"clicks{skipped}"
        )

    def _digest_of_all(self) -> str:
        """Of what can be told without reading all: the files' names and sizes, and the rows to validate on."""
        hashed = hashlib.blake2b(digest_size=8)
        for array in self._validation:
            hashed.update(np.ascontiguousarray(array).data)
        for file in self._files:
            hashed.update(f"{file.name}: {file.stat().st_size} bytes\n".encode())
        return hashed.hexdigest()


def batch_of(rows: Rows) -> Batch:
    """The batch of some rows, every bag of which is one id."""
    ids = np.ascontiguousarray(rows.ids.T).reshape(-1)
    return pack(rows.dense, ids, np.ones(len(ids), dtype=np.int64), rows.labels)


def digests(rows: Rows) -> Unsigned:
    """A hash of the whole of each row: [n]."""
    mixed = mix64(rows.ids + np.arange(len(CATEGORIES))).sum(axis=1)
    mixed += mix64(rows.dense.view(np.uint32) + np.arange(len(DENSE)) * 2**33).sum(axis=1)
    return mix64(mixed + rows.labels.astype(np.uint64))


def _named(files: list[Path]) -> str:
    return str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
