"""embedding_rows(ids, offsets, ...): which rows of the tables bags of ids touch, each once, and by which ids.

What the gradients of embedding tables are summed by: ids sorted once, by the row they look up. Integers, no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.operators.embedding_bags import (
    bag_counts,
    check_layout,
    check_values,
    first_keys,
    locate,
)
from fusedops.registration import Cost, Kernel, Sample, looped_vmap, register


class Rows(NamedTuple):
    """The distinct rows of all tables, in order, and for each the ids that look it up. N ids, T tables, all int64.

    rows      [N]: rows[starts[t] : starts[t + 1]] are those of table t, ascending; the rest is 0.
    order     [N]: positions of the ids, sorted by table and row, those of one row in their order; at the end
              those that do not count.
    bags      [N]: the bag of each, in that order.
    segments  [N + 1]: order[segments[k] : segments[k + 1]] look up rows[k]; the rest is the number of ids that count.
    starts    [T + 1]: where each table's rows start; the last is how many rows there are.
    counts    [bags]: how many ids of each bag count.
    """

    rows: Tensor
    order: Tensor
    bags: Tensor
    segments: Tensor
    starts: Tensor
    counts: Tensor


def _check(
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> None:
    check_layout("embedding_rows", ids, offsets, table_rows, feature_tables, hash, out_of_range)


def empty_rows(ids: Tensor, offsets: Tensor, table_rows: Sequence[int]) -> Rows:
    """The outputs, not filled."""
    n = ids.numel()
    sizes = (n, n, n, n + 1, len(table_rows) + 1, offsets.numel() - 1)
    return Rows(*(ids.new_empty(size, dtype=torch.int64) for size in sizes))


def _shape(
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> Rows:
    return empty_rows(ids, offsets, table_rows)


def embedding_rows_stock(
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> Rows:
    """The same in stock PyTorch, without waiting for a GPU."""
    n, device, first = ids.numel(), ids.device, first_keys(table_rows)
    located = locate(ids, offsets, table_rows, feature_tables, padding_index, hash)
    keys, order = located.keys.sort(stable=True)
    heads = torch.ones(n, dtype=torch.bool, device=device)
    heads[1:] = keys[1:] != keys[:-1]
    heads &= keys < first[-1]
    run = heads.cumsum(0) - 1  # of each sorted id
    counted = (keys < first[-1]).sum()

    # A head writes to its run's place, all others to one place more, which is cut off.
    places = torch.where(heads, run, n)
    key_first = torch.tensor(first[:-1], device=device)
    table = torch.searchsorted(key_first, keys, right=True) - 1
    rows = torch.zeros(n + 1, dtype=torch.int64, device=device)
    rows = rows.index_copy(0, places, torch.where(heads, keys - key_first[table], 0))[:n]
    segments = counted.repeat(n + 1)
    segments = torch.cat([segments, counted[None]]).index_copy(
        0, torch.where(heads, places, n + 1), torch.arange(n, device=device)
    )[: n + 1]
    runs_before = torch.cat([run.new_zeros(1), heads.cumsum(0)])
    starts = runs_before[torch.searchsorted(keys, torch.tensor(first, device=device))]
    counts = bag_counts(located, offsets.numel() - 1, first[-1])
    return Rows(rows.contiguous(), order, located.bags[order], segments.contiguous(), starts, counts)


def _cpu(
    ids: Tensor,
    offsets: Tensor,
    table_rows: Sequence[int],
    feature_tables: Sequence[int],
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> Rows:
    check_values("embedding_rows", ids, offsets, table_rows, feature_tables, padding_index, hash, out_of_range)
    return embedding_rows_stock(ids, offsets, table_rows, feature_tables, padding_index, hash, out_of_range)


def random_bags(
    lengths: Sequence[int], features: int, device: torch.device, *, most: int = 2**62
) -> tuple[Tensor, Tensor]:
    """Random ids below `most` in absolute value, some of them several times, in bags of these lengths, and offsets.

    lengths: of B bags, which every feature begins at another one of.
    """
    bags = [lengths[(b + f) % len(lengths)] for f in range(features) for b in range(len(lengths))]
    offsets = torch.tensor([0, *bags], device=device).cumsum(0)
    count = sum(bags)
    ids = torch.randint(-most, most, (max(count // 2, 1),), device=device)
    return ids[torch.randint(len(ids), (count,), device=device)], offsets


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    if dtype != torch.float32:  # it takes no floating tensor: once is enough
        return

    def bags(*lengths: int, most: int = 2**62) -> tuple[Tensor, Tensor]:
        return random_bags(lengths, 3, device, most=most)

    tables, features = [7, 1000], [0, 1, 1]
    for name, lengths in (
        ("bags", (1, 0, 3, 2)),
        ("one id a bag", (1, 1, 1, 1, 1)),
        ("long bags", (37, 63, 0)),
        ("empty bags", (0, 0)),
    ):
        yield Sample(name, (*bags(*lengths), tables, features, None, "modulo", "error"))
    for hash in ("mix32", "mix64"):
        yield Sample(hash, (*bags(2, 0, 5), tables, features, None, hash, "error"))
    ids, offsets = bags(3, 0, 4)
    yield Sample("padding", (ids, offsets, tables, features, 5, "none", "zero"))
    ids, offsets = bags(2, 1, 4, most=9)
    yield Sample("out of range", (ids, offsets, tables, features, 3, "none", "zero"))
    ids, offsets = bags(2, 1, 4, most=2**31)
    yield Sample("32 bits", (ids.int(), offsets.int(), tables, features, None, "modulo", "error"))
    strided = torch.stack(bags(2, 1, 2, most=99)[:1] * 2, 1)[:, 0]
    yield Sample("strided", (strided, bags(2, 1, 2)[1], tables, features, None, "modulo", "error"))


def _cost(ids: Tensor, offsets: Tensor, table_rows: Sequence[int], *_: Any) -> Cost:
    # Read once, written once; sorted: eight passes over a key and a position, each read and written.
    return Cost(flops=0, bytes=ids.nbytes + offsets.nbytes + (5 * 8 + 8 * 2 * 16) * ids.numel() + 8)


embedding_rows_operator = register(
    schema=(
        "embedding_rows(Tensor ids, Tensor offsets, int[] table_rows, int[] feature_tables, int? padding_index, "
        "str hash, str out_of_range) -> (Tensor rows, Tensor order, Tensor bags, Tensor segments, Tensor starts, "
        "Tensor counts)"
    ),
    check=_check,
    shape=_shape,
    cpu=_cpu,
    kernel=Kernel("embedding_rows", "embedding_rows"),
    reference=embedding_rows_stock,
    samples=_samples,
    cost=_cost,
    stock="torch.unique of the hashed ids",
    vmap=looped_vmap,
    exempt={
        "wrong_dtypes": "it takes no floating tensor",
        "autocast": "it takes no floating tensor",
    },
)
