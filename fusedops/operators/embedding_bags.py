"""Bags of ids: the layout, its checks, and where each id's row lies.

The layout is that of the values and offsets of torchrec's KeyedJaggedTensor, feature-major: bag f * B + b holds the ids
of feature f in sample b, ids[offsets[f * B + b] : offsets[f * B + b + 1]].

A table row is known by its key: its place among the rows of all tables, one after the other. An id that does not count
(the padding index; with out_of_range "zero" one that is no row) has the key behind all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.operators.embedding_hash import HASHES, MOST_ROWS, rows_of_ids

OUT_OF_RANGE = ("error", "zero")
INTEGERS = (torch.int64, torch.int32)


class Located(NamedTuple):
    """For each id, [N]: the key of its row, and its bag."""

    keys: Tensor
    bags: Tensor


def batch_size(offsets: Tensor, features: int) -> int:
    """B, of offsets of B bags a feature."""
    return (offsets.numel() - 1) // features


def first_keys(table_rows: Sequence[int]) -> list[int]:
    """The key of each table's first row, and then the number of all rows."""
    return [0, *accumulate(table_rows)]


def check_layout(
    operator: str,
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    hash: str,
    out_of_range: str,
) -> None:
    """Raise ValueError or TypeError, before anything runs, for what shapes and options tell."""
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if tensor.dtype not in INTEGERS:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}; allowed: int64, int32")
        if tensor.dim() != 1:
            raise ValueError(f"{operator}: {name} has shape {tuple(tensor.shape)}; it must have one dimension")
    if ids.device != offsets.device:
        raise ValueError(f"{operator}: offsets is on {offsets.device}, ids on {ids.device}; they must be on one device")
    if not feature_tables:
        raise ValueError(f"{operator}: feature_tables is empty; there must be a feature")
    for table in feature_tables:
        if not 0 <= table < len(table_rows):
            raise ValueError(
                f"{operator}: feature_tables has {table}; allowed: 0 to {len(table_rows) - 1}, there are "
                f"{len(table_rows)} tables"
            )
    for table, rows in enumerate(table_rows):
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"{operator}: tables[{table}] has {rows} rows; allowed: 1 to {MOST_ROWS}")
    features = len(feature_tables)
    if offsets.numel() < 1 or (offsets.numel() - 1) % features:
        raise ValueError(
            f"{operator}: offsets has {offsets.numel()} elements; with {features} features it must have "
            f"{features} * B + 1"
        )
    if hash not in HASHES:
        raise ValueError(f"{operator}: hash is {hash!r}; allowed: {', '.join(HASHES)}")
    if out_of_range not in OUT_OF_RANGE:
        raise ValueError(f"{operator}: out_of_range is {out_of_range!r}; allowed: {', '.join(OUT_OF_RANGE)}")


def check_values(
    operator: str,
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> None:
    """Raise ValueError for offsets that are none, and for ids that are no rows where they must be, on a CPU.

    On a GPU, where reading them would wait for it, the kernels check them and stop by a device-side assertion.
    """
    if offsets[0] != 0:
        raise ValueError(f"{operator}: offsets begins with {int(offsets[0])}; it must begin with 0")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        i = int(falls[0])
        raise ValueError(
            f"{operator}: offsets falls from {int(offsets[i])} to {int(offsets[i + 1])} at position {i + 1}; it must "
            "not fall"
        )
    if offsets[-1] != ids.numel():
        raise ValueError(
            f"{operator}: offsets ends with {int(offsets[-1])}; it must end with {ids.numel()}, the number of ids"
        )
    if hash != "none" or out_of_range != "error" or not ids.numel():
        return
    rows = torch.tensor(table_rows)[torch.tensor(feature_tables)]
    ends = offsets[:: batch_size(offsets, len(feature_tables))].tolist()
    for feature, (first, last) in enumerate(pairwise(ends)):
        part = ids[first:last]
        wrong = (part < 0) | (part >= rows[feature])
        if padding_index is not None:
            wrong &= part != padding_index
        if wrong.any():
            i = first + int(wrong.nonzero()[0])
            raise ValueError(
                f"{operator}: ids has {int(ids[i])} at position {i}, of feature {feature}; with hash 'none' allowed: "
                f"0 to {int(rows[feature]) - 1}, the rows of its table"
            )


def locate(
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
) -> Located:
    """Key and bag of each id in stock PyTorch, without waiting for a GPU."""
    device, features = ids.device, len(feature_tables)
    bags = torch.searchsorted(offsets, torch.arange(ids.numel(), device=device, dtype=offsets.dtype), right=True) - 1
    # Offsets that end before the ids, or have no bag, give an id no feature; such ids are refused where that is seen.
    feature = (bags // max(batch_size(offsets, features), 1)).clamp(0, features - 1)
    first, tables = first_keys(table_rows), torch.tensor(feature_tables, device=device)
    rows_of_table = torch.tensor(table_rows, device=device)[tables][feature]
    rows = rows_of_ids(ids, rows_of_table, hash)
    counts = (rows >= 0) & (rows < rows_of_table)
    if padding_index is not None:
        counts &= ids != padding_index
    first_key = torch.tensor(first[:-1], device=device)[tables][feature]
    return Located(torch.where(counts, first_key + rows, first[-1]), bags)


def bag_counts(located: Located, bags: int, total_rows: int) -> Tensor:
    """How many ids of each bag count, int64 [bags]."""
    counted = (located.keys < total_rows).to(torch.int64)
    return torch.zeros(bags, dtype=torch.int64, device=counted.device).index_add(0, located.bags, counted)
