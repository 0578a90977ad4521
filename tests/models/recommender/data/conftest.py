"""Files of each kind with fresh random content, and what a batch must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.task import Batch

N_DENSE, N_CATEGORIES = 13, 26


@pytest.fixture
def check_batch() -> Callable[..., int]:
    """Checks a batch's layout against its source; gives the number of samples."""

    def check(batch: Batch, source) -> int:
        count, n_features = len(batch["labels"]), len(source.features)
        assert batch["dense"].dtype == batch["labels"].dtype == torch.float32
        assert batch["ids"].dtype == batch["offsets"].dtype == torch.int64
        assert batch["dense"].shape == (count, source.n_dense) and batch["labels"].shape == (count,)
        assert batch["offsets"].shape == (n_features * count + 1,) and batch["ids"].dim() == 1
        assert batch["offsets"][0] == 0 and batch["offsets"][-1] == len(batch["ids"])
        lengths = batch["offsets"].diff().view(n_features, count)
        assert (lengths >= 0).all()
        for feature, lengths_of_one in zip(source.features, lengths, strict=True):
            assert feature.multi_valued or (lengths_of_one == 1).all()
        assert set(batch["labels"].unique().tolist()) <= {0.0, 1.0}
        assert batch["dense"].isfinite().all()
        return count

    return check


@pytest.fixture
def bags() -> Callable[[Batch, int], list[list[list[int]]]]:
    """The bags of a batch with so many features: ids by sample and feature."""

    def read(batch: Batch, n_features: int) -> list[list[list[int]]]:
        count = len(batch["labels"])
        bounds, ids = batch["offsets"].tolist(), batch["ids"].tolist()
        return [
            [ids[bounds[f * count + b] : bounds[f * count + b + 1]] for f in range(n_features)] for b in range(count)
        ]

    return read


@pytest.fixture
def criteo_rows() -> Callable[[int], list[list[str]]]:
    """Makes rows of fields as Criteo's text has them, some missing; the first count is the row's number."""

    def make(count: int) -> list[list[str]]:
        generator = np.random.default_rng()
        rows = []
        for row in range(count):
            counts = [str(row), *(str(generator.integers(-2, 5000)) for _ in range(N_DENSE - 1))]
            categories = [f"{generator.integers(0, 2**32):08x}" for _ in range(N_CATEGORIES)]
            for fields in (counts[1:], categories):
                fields[generator.integers(len(fields))] = ""
            counts[1 + generator.integers(N_DENSE - 1)] = ""
            categories[generator.integers(N_CATEGORIES)] = ""
            rows.append([str(generator.integers(2)), *counts, *categories])
        return rows

    return make


@pytest.fixture
def write_tsv() -> Callable[[Path, Sequence[Sequence[str]]], Path]:
    def write(path: Path, rows: Sequence[Sequence[str]]) -> Path:
        path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
        return path

    return write
