"""Triton kernels of embedding_rows: a key for each id, sorted by torch.sort, then the runs of equal keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.embedding_tables import (
    ASSERTING,
    FIELDS,
    FIRST_KEY,
    HASHES,
    RECIPROCAL,
    ROWS,
    bag_range,
    describe,
    first_keys_on,
    look_up,
)
from fusedops.kernels.launching import ceil_div, launch, next_power_of_2
from fusedops.operators.embedding_bags import batch_size, check_values, first_keys
from fusedops.operators.embedding_rows import Rows, empty_rows

BAGS = 128
BLOCK = 1024


@triton.jit
def key_kernel(
    described,
    ids,
    offsets,
    keys,
    bags,
    counts,
    batch,
    features,
    ids_count,
    padding,
    total_rows,
    BAGS: tl.constexpr,
    HASH: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    ERROR: tl.constexpr,
):
    """For the ids of BAGS samples and one feature their keys and bags, and how many of each bag count."""
    blocks = tl.cdiv(batch, BAGS)
    feature = tl.program_id(0) // blocks
    sample = (tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS)
    exists = sample < batch
    fields = described + feature * FIELDS
    rows = tl.load(fields + ROWS)
    reciprocal = tl.load(fields + RECIPROCAL)
    first_key = tl.load(fields + FIRST_KEY)
    bag = feature.to(tl.int64) * batch + sample
    start, end = bag_range(offsets, bag, exists, tl.cast(features, tl.int64) * batch, ids_count, True)
    length = end - start
    count = tl.zeros((BAGS,), tl.int64)
    for i in range(0, tl.max(length, 0)):
        inside = i < length
        row, counted = look_up(ids, start + i, inside, padding, rows, reciprocal, HASH, HAS_PADDING, ERROR)
        key = tl.where(counted, first_key + row, total_rows)
        tl.store(keys + start + i, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(bags + start + i, bag, mask=inside)
        count += counted.to(tl.int64)
    tl.store(counts + bag, count, mask=exists)


@triton.jit
def key_before(keys, place, mask):
    """The key before each place; before the first one a key that there is not."""
    return tl.load(keys + place - 1, mask=mask & (place > 0), other=-1)


@triton.jit
def head_kernel(keys, heads, ids_count, total_rows, BLOCK: tl.constexpr):
    """1 where a run of equal keys begins, of ids that count."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < ids_count
    key = tl.load(keys + place, mask=mask, other=0)
    head = (key != key_before(keys, place, mask)) & (key < total_rows)
    tl.store(heads + place, head.to(tl.int32), mask=mask)


@triton.jit
def start_kernel(keys, runs, first, starts, counted, ids_count, tables, BLOCK_T: tl.constexpr, STEPS: tl.constexpr):
    """Where the rows of each table begin among all distinct ones, and how many ids count. One program."""
    table = tl.arange(0, BLOCK_T)
    mask = table <= tables
    wanted = tl.load(first + table, mask=mask, other=0)
    low = tl.zeros((BLOCK_T,), tl.int64)
    high = low + ids_count
    for _ in range(STEPS):
        middle = (low + high) // 2
        open = low < high
        below = tl.load(keys + middle, mask=mask & open, other=0).to(tl.int64) < wanted
        low = tl.where(open & below, middle + 1, low)
        high = tl.where(open & ~below, middle, high)
    runs_before = tl.load(runs + low - 1, mask=mask & (low > 0), other=0)
    tl.store(starts + table, runs_before, mask=mask)
    tl.store(counted + table, low, mask=table == tables)


@triton.jit
def compact_kernel(
    keys, runs, first, order, bags, starts, counted, rows, segments, sorted_bags, ids_count, total_rows, tables,
    TABLE_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each run's row and begin to its place, what stands behind the last run, and the bags in the order of the keys."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < ids_count
    key = tl.load(keys + place, mask=mask, other=0)
    tl.store(sorted_bags + place, tl.load(bags + tl.load(order + place, mask=mask, other=0), mask=mask), mask=mask)
    head = mask & (key != key_before(keys, place, mask)) & (key < total_rows)
    run = tl.load(runs + place, mask=head, other=1) - 1
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + tables
    for _ in range(TABLE_STEPS):  # the last table that begins at or before the key
        middle = (low + high) // 2
        below = tl.load(first + middle, mask=head, other=0) <= key
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    tl.store(rows + run, key - tl.load(first + low, mask=head, other=0), mask=head)
    tl.store(segments + run, place, mask=head)
    behind = place >= tl.load(starts + tables)
    tl.store(rows + place, tl.zeros((BLOCK,), tl.int64), mask=mask & behind)
    end = tl.zeros((BLOCK,), tl.int64) + tl.load(counted + tables)
    tl.store(segments + place, end, mask=behind & (place <= ids_count))


def embedding_rows(
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> Rows:
    if ids.device.type == "cpu":  # in the interpreter, where assertions on a device do nothing
        check_values("embedding_rows", ids, offsets, table_rows, feature_tables, padding_index, hash, out_of_range)
    found = empty_rows(ids, offsets, table_rows)
    n, device, first = ids.numel(), ids.device, first_keys(table_rows)
    features, tables, total = len(feature_tables), len(table_rows), first[-1]
    batch = batch_size(offsets, features)
    narrow = total < 2**31 - 1  # half the bytes to sort
    keys = ids.new_empty(n, dtype=torch.int32 if narrow else torch.int64)
    bags = ids.new_empty(n, dtype=torch.int64)
    described = describe(None, table_rows, feature_tables, device)
    if batch:
        launch(
            key_kernel,
            ceil_div(batch, BAGS) * features,
            (described, ids.contiguous(), offsets.contiguous(), keys, bags, found.counts),
            (batch, features, n, padding_index or 0, total),
            4,
            BAGS=BAGS,
            HASH=HASHES[hash],
            HAS_PADDING=padding_index is not None,
            ERROR=out_of_range == "error",
            **ASSERTING,
        )
    keys, order = torch.sort(keys, stable=True)
    heads = ids.new_empty(n, dtype=torch.int32)
    programs = ceil_div(n, BLOCK)
    if programs:
        launch(head_kernel, programs, (keys, heads), (n, total), 4, BLOCK=BLOCK)
    runs = heads.cumsum(0)
    firsts = first_keys_on(table_rows, device)
    counted = torch.empty_like(found.starts)
    block_t = next_power_of_2(tables + 1)
    launch(
        start_kernel,
        1,
        (keys, runs, firsts, found.starts, counted),
        (n, tables),
        ceil_div(min(block_t, 256), 32),
        BLOCK_T=block_t,
        STEPS=n.bit_length(),
    )
    launch(
        compact_kernel,
        ceil_div(n + 1, BLOCK),
        (keys, runs, firsts, order, bags, found.starts, counted, found.rows, found.segments, found.bags),
        (n, total, tables),
        4,
        TABLE_STEPS=tables.bit_length(),
        BLOCK=BLOCK,
    )
    return found._replace(order=order)
