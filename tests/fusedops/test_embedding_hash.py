"""Rows of raw ids: exact, and the same on every device."""

from __future__ import annotations

import random

import pytest
import torch

from fusedops import embedding_aggregation
from fusedops.operators.embedding_hash import HASHES, rows_of_ids
from tests.fusedops.embedding import INT64_MAX, INT64_MIN


def exact_row(i: int, rows: int, hash: str) -> int:
    """The documented formulas in Python's integers."""
    if hash == "modulo":
        return i % rows
    u = i % 2**64
    if hash == "mix32":
        x = (u % 2**32) ^ ((u >> 32) * 0x9E3779B1 % 2**32)
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return ((x ^ x >> 16) * rows) >> 32
    x = (u ^ u >> 33) * 0xFF51AFD7ED558CCD % 2**64
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return ((x ^ x >> 33) * rows) >> 64


def awkward_ids(rows: int) -> list[int]:
    ends = [INT64_MIN, INT64_MIN + 1, INT64_MAX, INT64_MAX - 1, -1, 0, 1, -(2**32), 2**32, 2**31, -(2**31), 2**53 + 1]
    near = [sign * (k * rows + d) for sign in (1, -1) for k in (1, 2, 12345, 2**40 // rows) for d in (-1, 0, 1)]
    drawn = [random.randint(INT64_MIN, INT64_MAX) for _ in range(60)]
    return ends + near + drawn


@pytest.mark.parametrize("hash", [name for name in HASHES if name != "none"])
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 1000, 2**20, 2**31 - 1])
def test_hash_is_what_is_documented(hash: str, rows: int) -> None:
    ids = awkward_ids(rows)
    expected = [exact_row(i, rows, hash) for i in ids]
    assert rows_of_ids(torch.tensor(ids), rows, hash).tolist() == expected
    assert all(0 <= row < rows for row in expected)


@pytest.mark.parametrize("hash", [name for name in HASHES if name != "none"])
def test_every_device_takes_the_same_row(device: torch.device, hash: str) -> None:
    """Tables whose elements are their rows' numbers tell which rows were read."""
    sizes = [1, 2, 3, 64, 1000, 65537]
    ids = [i for rows in sizes for i in awkward_ids(rows)]
    batch = len(ids) // len(sizes)
    tables = [torch.arange(rows, dtype=torch.float64, device=device)[:, None] for rows in sizes]
    found = embedding_aggregation(
        tables, torch.tensor(ids, device=device), torch.arange(len(ids) + 1, device=device), hash=hash
    )
    expected = [[exact_row(i, rows, hash) for i in ids[f * batch :][:batch]] for f, rows in enumerate(sizes)]
    assert found[:, :, 0].t().long().tolist() == expected


def test_32_bit_ids_are_the_same_ids(device: torch.device) -> None:
    tables = [torch.randn(rows, 4, device=device) for rows in (37, 5)]
    ids = torch.randint(-(2**31), 2**31, (20,), device=device)
    offsets = torch.arange(0, 22, 2, device=device)
    for hash in ("modulo", "mix32", "mix64"):
        wide = embedding_aggregation(tables, ids, offsets, hash=hash)
        narrow = embedding_aggregation(tables, ids.int(), offsets.int(), hash=hash)
        assert torch.equal(wide, narrow)
