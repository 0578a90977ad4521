"""Texts, files of each kind, and tokenizers trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

WORDS = ["the", "a", "tensor", "kernel", "is", "of", "in", "block", "and", "or", "runs", "naïve", "größer", "语言", "…"]


@pytest.fixture
def texts() -> Callable[..., list[str]]:
    """Makes distinct documents of some sentences, not all of them ASCII."""

    def make(count: int, longest: int = 40) -> list[str]:
        generator = np.random.default_rng()
        return [
            f"{i}: " + " ".join(generator.choice(WORDS, size=generator.integers(3, longest))) + ".\n"
            for i in range(count)
        ]

    return make


@pytest.fixture
def write_jsonl() -> Callable[[Path, Sequence[str]], Path]:
    def write(path: Path, rows: Sequence[str], field: str = "text") -> Path:
        path.write_text("".join(json.dumps({"id": i, field: row}) + "\n" for i, row in enumerate(rows)), "utf-8")
        return path

    return write


@pytest.fixture
def write_parquet() -> Callable[[Path, Sequence[str]], Path]:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(path: Path, rows: Sequence[str], field: str = "text") -> Path:
        table = pa.table({"id": list(range(len(rows))), field: list(rows)})
        parquet.write_table(table, path, row_group_size=7)
        return path

    return write
