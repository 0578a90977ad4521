"""Bytes of memory that the tables' part of a training step must touch: what its GB/s are counted of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedops.operators.embedding_hash import rows_of_ids

INTEGER = 8
"""Bytes of an id or an offset."""


def distinct_rows(ids: Tensor, offsets: Tensor, rows: Sequence[int], hash: str) -> int:
    """How many rows of the tables, one a feature, these bags touch."""
    batch = (len(offsets) - 1) // len(rows)
    ends = offsets[::batch].tolist()
    parts = zip(rows, ends[:-1], ends[1:], strict=True)
    return sum(len(rows_of_ids(ids[first:last], count, hash).unique()) for count, first, last in parts)


def bytes_touched(ids: Tensor, offsets: Tensor, distinct: int, width: int, features: int, itemsize: int = 4) -> int:
    """Of look-up, gradient and update of tables of a width, whose rows have no optimizer state.

    Ids and offsets are read once in forward and once in backward; a row is read for every id in forward; the features,
    so many numbers of all samples together, are written, and their gradient read; every distinct row is read and
    written by the update. Nothing is counted twice for a cache, nothing for what an implementation keeps in between.
    """
    integers = 2 * INTEGER * (len(ids) + len(offsets))
    return integers + itemsize * (width * (len(ids) + 2 * distinct) + 2 * features)
