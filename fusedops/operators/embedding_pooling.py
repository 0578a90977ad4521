"""Looking up and pooling in stock PyTorch: differentiable formulas, and what a CPU runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.operators.checked_once import checked_once, kinds
from fusedops.operators.embedding_bags import Located, bag_counts, batch_size, first_keys, locate
from fusedops.operators.pointwise import computing
from fusedops.registration import FLOATING

POOLINGS = ("sum", "mean")


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 of float64, float32 of all others."""
    return dtype if dtype == torch.float64 else torch.float32


def widest_dtype(tables: Sequence[Tensor], *others: Tensor | None) -> torch.dtype:
    """What stock PyTorch promotes them to together; those that are None do not count."""
    dtypes = [t.dtype for t in (*tables, *others) if t is not None]
    return functools.reduce(torch.promote_types, dtypes)


def check_tensors(operator: str, tables: Sequence[Tensor], ids: Tensor, weights: Tensor | None) -> None:
    """Raise TypeError or ValueError unless tables (and weights of ids) are floating, of one dtype, width and device."""
    if not tables:
        raise ValueError(f"{operator}: tables is empty; there must be a table")
    _check_tables(operator, kinds(tables), ids.device)
    if weights is None:
        return
    first = tables[0]
    if weights.dtype != first.dtype:
        raise TypeError(f"{operator}: weights is {weights.dtype}, tables are {first.dtype}; they must be of one dtype")
    if weights.shape != ids.shape:
        raise ValueError(
            f"{operator}: weights has shape {tuple(weights.shape)}, ids {tuple(ids.shape)}; they must be of one shape"
        )
    if weights.device != ids.device:
        raise ValueError(f"{operator}: weights is on {weights.device}, ids on {ids.device}; they must be on one device")


@checked_once
def _check_tables(operator: str, tables: tuple[Any, ...], device_of_ids: torch.device) -> None:
    first_dtype, _, first_shape = tables[0]
    if first_dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"{operator}: tables are {first_dtype}; allowed: {allowed}")
    for i, (dtype, device, shape) in enumerate(tables):
        if dtype != first_dtype:
            raise TypeError(
                f"{operator}: tables[{i}] is {dtype}, tables[0] is {first_dtype}; they must be of one dtype"
            )
        if len(shape) != 2 or shape[1] < 1 or shape[1] != first_shape[-1]:
            raise ValueError(
                f"{operator}: tables[{i}] has shape {tuple(shape)}, tables[0] {tuple(first_shape)}; allowed: "
                "(rows, D), of one D of at least 1"
            )
        if device != device_of_ids:
            raise ValueError(
                f"{operator}: tables[{i}] is on {device}, ids on {device_of_ids}; they must be on one device"
            )


def vectors_of(pooled: Tensor, dense: Tensor | None) -> Tensor:
    """[B, n, D]: the dense vectors, if any, before those pooled, [B, F, D]."""
    return pooled if dense is None else torch.cat([dense[:, None].to(pooled.dtype), pooled], 1)


# ---------------------------------------------------------------------------------------------------------------------
# Differentiable, without waiting for a GPU


def looked_up_stock(tables: Sequence[Tensor], located: Located) -> Tensor:
    """Each id's row, [N, D], in the dtype of sums; zeros of an id that does not count."""
    nothing = torch.zeros_like(tables[0][:1])  # the row behind all others
    return computing(torch.cat([*tables, nothing]).index_select(0, located.keys))


def mean_counts(located: Located, offsets: Tensor, total_rows: int, dtype: torch.dtype) -> Tensor:
    """What a mean divides each bag by, [bags, 1]."""
    return bag_counts(located, offsets.numel() - 1, total_rows).clamp(min=1).to(dtype)[:, None]


def pooled_stock(
    looked_up: Tensor,
    located: Located,
    weights: Tensor | None,
    offsets: Tensor,
    feature_tables: Sequence[int],
    pooling: str,
    total_rows: int,
) -> Tensor:
    """[B, F, D] of rows looked up, [N, D]."""
    if weights is not None:
        looked_up = looked_up * weights[:, None]
    width, features = looked_up.shape[1], len(feature_tables)
    zeros = torch.zeros(offsets.numel() - 1, width, dtype=looked_up.dtype, device=looked_up.device)
    pooled = zeros.index_add(0, located.bags, looked_up)
    if pooling == "mean":
        pooled = pooled / mean_counts(located, offsets, total_rows, pooled.dtype)
    return pooled.view(features, batch_size(offsets, features), width).transpose(0, 1)


def of_bags(grad_vectors: Tensor, has_dense: bool) -> Tensor:
    """The part of [B, n, D] that belongs to features, as [bags, D]."""
    return grad_vectors[:, int(has_dense) :].transpose(0, 1).flatten(0, 1)


# ---------------------------------------------------------------------------------------------------------------------
# CPU


def pooled_cpu(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    feature_tables: Sequence[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
) -> Tensor:
    """[B, F, D] in the dtype of sums, by an F.embedding_bag a feature."""
    rows = [table.shape[0] for table in tables]
    features, batch, width = len(feature_tables), batch_size(offsets, len(feature_tables)), tables[0].shape[1]
    keys, bags = locate(ids, offsets, rows, feature_tables, padding_index, hash)
    offsets = offsets.to(torch.int64)
    first = first_keys(rows)
    counts = keys < first[-1]
    if not counts.all():
        keys, bags, weights = keys[counts], bags[counts], None if weights is None else weights[counts]
        offsets = torch.cat([offsets.new_zeros(1), counts.cumsum(0)])[offsets]
    lengths = offsets.diff()
    if weights is not None:
        weights = computing(weights)
    pooled = torch.empty(batch, features, width, dtype=computing_dtype(tables[0].dtype))
    ends = offsets[::batch].tolist() if batch else []
    for feature in range(features if batch else 0):
        begin, end, table = ends[feature], ends[feature + 1], feature_tables[feature]
        own = slice(feature * batch, (feature + 1) * batch + 1)
        pooled[:, feature] = sum_segments(
            tables[table],
            keys[begin:end] - first[table],
            offsets[own] - begin,
            None if weights is None else weights[begin:end],
        )
        if pooling == "mean":
            pooled[:, feature] /= lengths[own][:batch].clamp(min=1)[:, None]
    return pooled


def sum_segments(source: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """The sums of source[rows[i]] (times weights[i]) from each of the offsets to the next, in the dtype of sums."""
    if source.dtype != computing_dtype(source.dtype) or source.stride(-1) != 1:
        source, rows = computing(source[rows]), torch.arange(len(rows))
    return F.embedding_bag(
        rows, source, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )  # fmt: skip
