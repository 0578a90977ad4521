"""What the embedding kernels share: tables by their addresses, rows of ids, checks of offsets, a sample's vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.launching import next_power_of_2
from fusedops.operators import embedding_hash
from fusedops.operators.embedding_bags import first_keys
from fusedops.operators.embedding_hash import MIX32, MIX64, reciprocal

ADDRESS, ROWS, RECIPROCAL, STRIDE, FIRST_KEY = (tl.constexpr(i) for i in range(5))
FIELDS = tl.constexpr(5)
"""Of a feature's table, int64: address; rows, and what divides by them; elements from row to row; first row's key."""

HASHES = {name: i for i, name in enumerate(embedding_hash.HASHES)}
MODULO, MIX_32, MIX_64, NO_HASH = (tl.constexpr(HASHES[name]) for name in ("modulo", "mix32", "mix64", "none"))

FOLD = tl.constexpr(embedding_hash.FOLD)
SHIFT32_1, FACTOR32_1, SHIFT32_2, FACTOR32_2, SHIFT32_3 = (tl.constexpr(n) for n in MIX32)
SHIFT64_1, FACTOR64_1, SHIFT64_2, FACTOR64_2, SHIFT64_3 = (tl.constexpr(n % 2**64) for n in MIX64)

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

ASSERTING = {"debug": True, "sanitize_overflow": False}
"""Options of a launch whose device-side assertions are to be compiled; hashes wrap on purpose."""

_MOST = 1024  # tensors to remember
_remembered: dict[tuple[object, ...], Tensor] = {}


class Places(NamedTuple):
    """Where tensors lie: of each its address, and its strides in elements."""

    addresses: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    def aligned(self, itemsize: int) -> bool:
        """Whether every row of every tensor begins at a multiple of 16 bytes."""
        return not (
            any(address % 16 for address in self.addresses) or any(steps[0] * itemsize % 16 for steps in self.strides)
        )


def places_of(tensors: Sequence[Tensor]) -> Places:
    """The places of tensors of a dimension or more."""
    return Places(tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.stride, tensors)))


def with_unit_stride(tables: list[Tensor]) -> tuple[list[Tensor], Places]:
    """Tables of one width, those copied in which the elements of a row do not lie side by side, and their places."""
    places = places_of(tables)
    if tables[0].shape[1] == 1 or all(step == 1 for _, step in places.strides):
        return tables, places
    tables = [table if table.stride(1) == 1 else table.contiguous() for table in tables]
    return tables, places_of(tables)


def describe(
    places: Places | None, table_rows: Sequence[int], feature_tables: Sequence[int], device: torch.device
) -> Tensor:
    """[features, FIELDS]: where each feature's table lies. places: None, where only the tables' rows matter."""

    def numbers() -> list[tuple[int, ...]]:
        first = first_keys(table_rows)
        return [
            (
                0 if places is None else places.addresses[t],
                table_rows[t],
                reciprocal(table_rows[t]),
                0 if places is None else places.strides[t][0],
                first[t],
            )
            for t in feature_tables
        ]

    return on_device((places, tuple(table_rows), tuple(feature_tables)), numbers, device)


def first_keys_on(table_rows: Sequence[int], device: torch.device) -> Tensor:
    """`first_keys` on a device, int64 [tables + 1]."""
    return on_device(("first keys", *table_rows), lambda: first_keys(table_rows), device)


def on_device(key: tuple[object, ...], numbers: Callable[[], Sequence[Any]], device: torch.device) -> Tensor:
    """Numbers (or rows of them) as an int64 tensor that no one writes to, remembered by a `key` that tells them."""
    known = _remembered.get((device, key))
    if known is not None:
        return known
    host = torch.tensor(numbers(), dtype=torch.int64)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph cannot copy from this memory, and what it allocates is its own: it writes the numbers at each replay.
        written = torch.empty(host.shape, dtype=torch.int64, device=device)
        for element, number in zip(written.view(-1), host.view(-1).tolist(), strict=True):
            element.fill_(number)
        return written
    if len(_remembered) >= _MOST:
        _remembered.clear()
    return _remembered.setdefault((device, key), host.to(device))


def block_of_width(width: int) -> int:
    """The power of two that a row's elements are taken as, which a product needs to be 16 at least."""
    return max(16, next_power_of_2(width))


# ---------------------------------------------------------------------------------------------------------------------
# Device functions


@triton.jit
def row_of_id(id, rows, reciprocal, HASH: tl.constexpr):
    """As operators.embedding_hash.rows_of_ids, to the bit."""
    if HASH == MODULO:
        # Of a negative id, its complement counts from the other end.
        y = id ^ (id >> 63)
        quotient = tl.umulhi(y.to(tl.uint64, bitcast=True), reciprocal.to(tl.uint64, bitcast=True))
        rest = y - quotient.to(tl.int64, bitcast=True) * rows
        rest = tl.where(rest >= rows, rest - rows, rest)
        return tl.where(id < 0, rows - 1 - rest, rest)
    elif HASH == MIX_32:
        x = id.to(tl.uint32) ^ ((id >> 32).to(tl.uint32) * FOLD)
        x = (x ^ (x >> SHIFT32_1)) * FACTOR32_1
        x = (x ^ (x >> SHIFT32_2)) * FACTOR32_2
        x = x ^ (x >> SHIFT32_3)
        return ((x.to(tl.uint64) * rows.to(tl.uint64)) >> 32).to(tl.int64)
    elif HASH == MIX_64:
        x = id.to(tl.uint64, bitcast=True)
        x = (x ^ (x >> SHIFT64_1)) * FACTOR64_1
        x = (x ^ (x >> SHIFT64_2)) * FACTOR64_2
        x = x ^ (x >> SHIFT64_3)
        return tl.umulhi(x, rows.to(tl.uint64)).to(tl.int64)
    else:
        return id


@triton.jit
def look_up(
    ids, place, exists, padding, rows, reciprocal, HASH: tl.constexpr, HAS_PADDING: tl.constexpr, ERROR: tl.constexpr
):
    """The row of the id at each place that exists, and whether it counts."""
    id = tl.load(ids + place, mask=exists, other=0).to(tl.int64)
    row = row_of_id(id, rows, reciprocal, HASH)
    counts = exists
    if HAS_PADDING:
        counts = counts & (id != padding)
    if HASH == NO_HASH:
        there = (row >= 0) & (row < rows)
        if ERROR:
            tl.device_assert(there | ~counts, "embedding: an id is out of range")
        counts = counts & there
    return row, counts


@triton.jit
def bag_range(offsets, bag, exists, bags, ids_count, CHECK: tl.constexpr):
    """Where the ids of each bag begin and end; nowhere for a bag that does not exist."""
    start = tl.load(offsets + bag, mask=exists, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=exists, other=0).to(tl.int64)
    if CHECK:
        good = (start >= 0) & (start <= end) & (end <= ids_count)
        good = good & ((bag != 0) | (start == 0)) & ((bag != bags - 1) | (end == ids_count))
        tl.device_assert(good | ~exists, "embedding: offsets must begin with 0, not fall, and end with the ids")
    return start, end


@triton.jit
def load_rows(table, offset, mask, columns, D: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows at these offsets of a table, in the dtype of sums; zeros where there is none and past D columns."""
    BLOCK_D: tl.constexpr = columns.shape[0]
    pointers = table + (offset[:, None] + columns[None, :])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [16, 16])
    mask = mask[:, None]
    if D // BLOCK_D * BLOCK_D != D:
        mask = mask & (columns[None, :] < D)
    return to_computing(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def to_computing(value):
    """In the dtype of sums."""
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    return value


@triton.jit
def pooled(
    ids,
    weights,
    table,
    rows,
    reciprocal,
    stride,
    start,
    end,
    padding,
    columns,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    HASH: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    ERROR: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The vectors of bags [BAGS, BLOCK_D]; table and what belongs to it: one for all bags, or one for each."""
    BAGS: tl.constexpr = start.shape[0]
    BLOCK_D: tl.constexpr = columns.shape[0]
    computing: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    length = end - start
    total = tl.zeros((BAGS, BLOCK_D), computing)
    count = tl.zeros((BAGS,), tl.int32)
    for i in range(0, tl.max(length, 0)):
        row, counts = look_up(ids, start + i, i < length, padding, rows, reciprocal, HASH, HAS_PADDING, ERROR)
        value = load_rows(table, row * stride, counts, columns, D, ALIGNED)
        if HAS_WEIGHTS:
            weight = to_computing(tl.load(weights + start + i, mask=counts, other=0.0))
            value = value * weight[:, None]
        total += value
        count += counts.to(tl.int32)
    if MEAN:
        total = total / tl.maximum(count, 1).to(computing)[:, None]
    return total


@triton.jit
def pooled_by_tiles(
    ids,
    weights,
    table,
    rows,
    reciprocal,
    stride,
    start,
    end,
    padding,
    columns,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    IDS: tl.constexpr,
    HASH: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    ERROR: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """As `pooled`, of one table, with IDS ids of each bag at once: each is hashed once, by a lane of its own."""
    BAGS: tl.constexpr = start.shape[0]
    BLOCK_D: tl.constexpr = columns.shape[0]
    computing: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    total = tl.zeros((BAGS, BLOCK_D), computing)
    count = tl.zeros((BAGS, IDS), tl.int32)
    for i in range(0, tl.max(end - start, 0), IDS):
        place = (start + i)[:, None] + tl.arange(0, IDS)[None, :]
        row, counts = look_up(ids, place, place < end[:, None], padding, rows, reciprocal, HASH, HAS_PADDING, ERROR)
        pointers = table + ((row * stride)[:, :, None] + columns[None, None, :])
        if ALIGNED:
            pointers = tl.multiple_of(pointers, [16, 16, 16])
        mask = counts[:, :, None]
        if D < BLOCK_D:
            mask = mask & (columns[None, None, :] < D)
        value = to_computing(tl.load(pointers, mask=mask, other=0.0))
        if HAS_WEIGHTS:
            weight = to_computing(tl.load(weights + place, mask=counts, other=0.0))
            value = value * weight[:, :, None]
        total += tl.sum(value, 1)
        count += counts.to(tl.int32)
    if MEAN:
        total = total / tl.maximum(tl.sum(count, 1), 1).to(computing)[:, None]
    return total
