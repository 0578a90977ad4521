"""embedding_aggregation_backward: gradients of table rows, each once, of the dense vector and of the ids' weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.operators.embedding_bags import batch_size, check_layout, first_keys, locate
from fusedops.operators.embedding_cross import CROSSES, crossed_gradient, crossed_shape
from fusedops.operators.embedding_pooling import (
    POOLINGS,
    check_tensors,
    computing_dtype,
    looked_up_stock,
    mean_counts,
    of_bags,
    pooled_cpu,
    pooled_stock,
    sum_segments,
    vectors_of,
    widest_dtype,
)
from fusedops.operators.embedding_rows import embedding_rows_stock, random_bags
from fusedops.operators.pointwise import computing
from fusedops.registration import FLOATING, Cost, Kernel, Sample, looped_vmap, register

_Outputs = tuple[Tensor, Tensor, Tensor]


def _check(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    order: Tensor | None,
    bags: Tensor | None,
    segments: Tensor | None,
    counts: Tensor | None,
    count: int,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> None:
    operator = "embedding_aggregation_backward"
    check_layout(operator, ids, offsets, table_rows, feature_tables, hash, "zero")
    if grad.dtype not in FLOATING:
        raise TypeError(f"{operator}: grad is {grad.dtype}; allowed: {', '.join(map(str, FLOATING))}")
    for name, value, allowed in (("pooling", pooling, POOLINGS), ("cross", cross, CROSSES)):
        if value not in allowed:
            raise ValueError(f"{operator}: {name} is {value!r}; allowed: {', '.join(allowed)}")
    recomputed = cross != "none" and vectors is None
    if recomputed or needs_weights:
        check_tensors(operator, tables, ids, weights)
    if recomputed and (dense is not None) != has_dense:
        raise ValueError(f"{operator}: dense is {'None' if dense is None else 'given'}, has_dense is {has_dense}")
    for name, tensor in (("dense", dense), ("weights", weights), *((f"tables[{i}]", t) for i, t in enumerate(tables))):
        if tensor is not None and tensor.dtype != grad.dtype:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, grad is {grad.dtype}; they must be of one dtype")
        if tensor is not None and tensor.device != grad.device:
            raise ValueError(
                f"{operator}: {name} is on {tensor.device}, grad on {grad.device}; they must be on one device"
            )
    if vectors is not None and vectors.dtype not in (grad.dtype, computing_dtype(grad.dtype)):
        raise TypeError(f"{operator}: vectors is {vectors.dtype}, grad is {grad.dtype}; they must be of one dtype")
    if vectors is not None and vectors.device != grad.device:
        raise ValueError(
            f"{operator}: vectors is on {vectors.device}, grad on {grad.device}; they must be on one device"
        )
    given = {"order": order, "bags": bags, "segments": segments, "counts": counts}
    for name, tensor in given.items():
        if tensor is None and (count > 0 or needs_weights):
            raise ValueError(
                f"{operator}: {name} is None; gradients of tables and weights need what embedding_rows gives"
            )
    batch, n = batch_size(offsets, len(feature_tables)), len(feature_tables) + has_dense
    width = vector_width(grad, tables, vectors, n, has_dense, cross)
    if grad.shape != crossed_shape(batch, n, width, has_dense, cross):
        raise ValueError(
            f"{operator}: grad has shape {tuple(grad.shape)}; it must be "
            f"{crossed_shape(batch, n, width, has_dense, cross)}"
        )


def vector_width(
    grad: Tensor, tables: list[Tensor], vectors: Tensor | None, n: int, has_dense: bool, cross: str
) -> int:
    """D, of whichever tensor has it."""
    if cross != "dot":
        return grad.shape[-1]
    return vectors.shape[-1] if vectors is not None else tables[0].shape[1]


MOST_VECTORS, MOST_ELEMENTS = 128, 2**14


def fused_cross(vectors: int, width: int) -> bool:
    """Whether a GPU takes the cross, or its gradient, in one kernel, with all vectors of a sample in registers.

    Otherwise the vectors go through memory, to the stock cross.
    """
    return vectors <= MOST_VECTORS and vectors * width <= MOST_ELEMENTS


def _path(grad: Tensor, tables: list[Tensor], *options: Any) -> str:
    vectors, feature_tables, (cross, has_dense) = options[4], options[11], options[15:17]
    n = len(feature_tables) + has_dense
    fused = cross == "none" or fused_cross(n, vector_width(grad, tables, vectors, n, has_dense, cross))
    return "triton" if fused else "cublas+triton"


def empty_outputs(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    vectors: Tensor | None,
    count: int,
    feature_tables: list[int],
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> _Outputs:
    """Gradients of rows, dense and weights, not filled; empty where there is none."""
    n = len(feature_tables) + has_dense
    width = vector_width(grad, tables, vectors, n, has_dense, cross)
    batch = batch_size(offsets, len(feature_tables))
    return (
        grad.new_empty((count, width)),
        grad.new_empty((batch, width) if has_dense else (0,)),
        grad.new_empty(ids.shape if needs_weights else (0,)),
    )


def _shape(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    order: Tensor | None,
    bags: Tensor | None,
    segments: Tensor | None,
    counts: Tensor | None,
    count: int,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> _Outputs:
    return empty_outputs(
        grad, tables, ids, offsets, vectors, count, feature_tables, cross, has_dense, needs_weights
    )  # fmt: skip


def _cpu(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    order: Tensor | None,
    bags: Tensor | None,
    segments: Tensor | None,
    counts: Tensor | None,
    count: int,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> _Outputs:
    if cross != "none" and vectors is None:
        pooled = pooled_cpu(tables, ids, offsets, weights, feature_tables, pooling, padding_index, hash)
        vectors = vectors_of(pooled, dense)
    grad_vectors = crossed_gradient(computing(grad), vectors, has_dense, cross) if vectors is not None else grad
    outputs = empty_outputs(
        grad, tables, ids, offsets, vectors, count, feature_tables, cross, has_dense, needs_weights
    )  # fmt: skip
    row_grads, grad_dense, grad_weights = outputs
    if has_dense:
        grad_dense.copy_(grad_vectors[:, 0])
    if order is None or bags is None or segments is None or counts is None:
        return outputs
    batch, n = batch_size(offsets, len(feature_tables)), grad_vectors.shape[1]
    own = (bags % max(batch, 1)) * n + bags // max(batch, 1) + has_dense  # the row of each bag's gradient
    scale = 1 / computing(counts.to(grad_vectors.dtype)).clamp(min=1)[bags] if pooling == "mean" else None
    flat = grad_vectors.reshape(-1, grad_vectors.shape[-1])
    if count:
        counted = int(segments[-1])
        factors = scale
        if weights is not None:
            factors = computing(weights[order]) if scale is None else computing(weights[order]) * scale
        row_grads.copy_(
            sum_segments(flat, own[:counted], segments[: count + 1], None if factors is None else factors[:counted])
        )
    if needs_weights:
        looked_up = looked_up_stock(tables, locate(ids, offsets, table_rows, feature_tables, padding_index, hash))
        products = (looked_up[order] * computing(flat[own])).sum(1)
        grad_weights[order] = (products if scale is None else products * scale).to(grad.dtype)
    return outputs


def _reference(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    order: Tensor | None,
    bags: Tensor | None,
    segments: Tensor | None,
    counts: Tensor | None,
    count: int,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> _Outputs:
    width = vector_width(grad, tables, vectors, len(feature_tables) + has_dense, has_dense, cross)
    dtype = widest_dtype(tables, grad, dense, weights, vectors)
    nothing = grad.new_empty(0, dtype=dtype)
    with torch.autocast(ids.device.type, enabled=False):
        gradients = gradients_stock(
            grad, tables, ids, offsets, dense, weights, vectors, table_rows, feature_tables, pooling, padding_index,
            hash, cross, has_dense,
        )  # fmt: skip
    of_all_rows, grad_dense, grad_weights = gradients
    touched = torch.zeros(count, width, dtype=dtype, device=grad.device)
    if count:
        rows = embedding_rows_stock(ids, offsets, table_rows, feature_tables, padding_index, hash, "zero")
        total = int(rows.starts[-1])
        table = torch.searchsorted(rows.starts, torch.arange(total, device=ids.device), right=True) - 1
        keys = torch.tensor(first_keys(table_rows), device=ids.device)[table] + rows.rows[:total]
        touched[:total] = of_all_rows[keys].to(dtype)
    return (
        touched,
        grad_dense.to(dtype) if has_dense and grad_dense is not None else nothing,
        grad_weights.to(dtype) if needs_weights and grad_weights is not None else nothing,
    )


def gradients_stock(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of all rows of all tables, one after the other, of dense and of weights, in the dtype of sums.

    Made of differentiable stock operations on grad, tables, dense and weights, and on vectors where they are given.
    """
    located = locate(ids, offsets, table_rows, feature_tables, padding_index, hash)
    looked_up = looked_up_stock(tables, located) if tables else None
    total = first_keys(table_rows)[-1]
    grad = computing(grad)
    if cross != "none" and vectors is None:
        assert looked_up is not None
        pooled = pooled_stock(looked_up, located, weights, offsets, feature_tables, pooling, total)
        vectors = vectors_of(pooled, dense)
    grad_vectors = grad if vectors is None else crossed_gradient(grad, vectors.to(grad.dtype), has_dense, cross)
    per_bag = of_bags(grad_vectors, has_dense)
    if pooling == "mean":
        per_bag = per_bag / mean_counts(located, offsets, total, per_bag.dtype)
    per_id = per_bag.index_select(0, located.bags)
    grad_weights = (looked_up * per_id).sum(1) if looked_up is not None and weights is not None else None
    if weights is not None:
        per_id = per_id * weights[:, None]
    zeros = torch.zeros(total + 1, per_id.shape[1], dtype=per_id.dtype, device=per_id.device)
    of_all_rows = zeros.index_add(0, located.keys, per_id)[:-1]
    return of_all_rows, grad_vectors[:, 0] if has_dense else None, grad_weights


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    rows, features = [7, 5], [0, 1, 1]

    def sample(
        name: str,
        lengths: tuple[int, ...],
        width: int,
        *,
        cross: str = "none",
        pooling: str = "sum",
        has_dense: bool = False,
        weighted: bool = False,
        kept: bool = False,
        only_dense: bool = False,
        padding_index: int | None = None,
    ) -> Sample:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        hash = "modulo" if padding_index is None else "none"
        ids, offsets = random_bags(lengths, len(features), device, most=2**62 if padding_index is None else 9)
        batch, n = len(lengths), len(features) + has_dense
        located = None
        if not only_dense:
            located = embedding_rows_stock(ids, offsets, rows, features, padding_index, hash, "zero")
        arguments = (
            randn(*crossed_shape(batch, n, width, has_dense, cross)),
            [randn(count, width) for count in rows],
            ids,
            offsets,
            randn(batch, width) if has_dense else None,
            randn(len(ids)) if weighted else None,
            randn(batch, n, width).to(computing_dtype(dtype)) if kept else None,
            *((None,) * 4 if located is None else (located.order, located.bags, located.segments, located.counts)),
            0 if located is None else min(len(ids), sum(rows)),
        )
        return Sample(name, (*arguments, rows, features, pooling, padding_index, hash, cross, has_dense, weighted))

    yield sample("none", (1, 0, 3, 2), 3)
    yield sample("none, dense, mean", (1, 0, 3, 2), 5, has_dense=True, pooling="mean")
    yield sample("none, weights", (37, 0, 3), 8, weighted=True)
    yield sample("dot", (1, 2), 4, cross="dot")
    yield sample("dot, dense, weighted mean", (1, 2, 0), 7, cross="dot", has_dense=True, weighted=True, pooling="mean")
    yield sample("dot, vectors kept", (1, 2, 4), 16, cross="dot", has_dense=True, kept=True)
    yield sample("fm, padding", (3, 0, 4), 3, cross="fm", has_dense=True, padding_index=3, weighted=True)
    yield sample("fm, vectors kept", (70, 1), 33, cross="fm", kept=True)
    yield sample("only dense", (1, 2), 4, cross="dot", has_dense=True, only_dense=True)
    yield sample("no samples", (), 4, has_dense=True)
    yield sample("empty bags", (0, 0), 4, has_dense=True, cross="fm", weighted=True, pooling="mean")
    name, args = sample("gradient transposed", (1, 3), 5, has_dense=True)
    yield Sample(name, (torch.randn_like(args[0]).permute(2, 1, 0).contiguous().permute(2, 1, 0), *args[1:]))


def _cost(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    order: Tensor | None,
    bags: Tensor | None,
    segments: Tensor | None,
    counts: Tensor | None,
    count: int,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> Cost:
    n = len(feature_tables) + has_dense
    width = vector_width(grad, tables, vectors, n, has_dense, cross)
    # Gradients of bags are read and those of rows written once, where the cache holds what is read again.
    elements = grad.numel() + count * width + (0 if weights is None else ids.numel())
    flops = 2 * ids.numel() * width + (0 if cross == "none" else 2 * n * grad.numel() * width)
    return Cost(flops=flops, bytes=elements * grad.itemsize + 3 * 8 * ids.numel() + 8)


embedding_aggregation_backward_operator = register(
    schema=(
        "embedding_aggregation_backward(Tensor grad, Tensor[] tables, Tensor ids, Tensor offsets, Tensor? dense, "
        "Tensor? weights, Tensor? vectors, Tensor? order, Tensor? bags, Tensor? segments, Tensor? counts, int count, "
        "int[] table_rows, int[] feature_tables, str pooling, int? padding_index, str hash, str cross, bool has_dense, "
        "bool needs_weights) -> (Tensor row_grads, Tensor grad_dense, Tensor grad_weights)"
    ),
    check=_check,
    shape=_shape,
    cpu=_cpu,
    kernel=Kernel("embedding_backward", "embedding_aggregation_backward", _path),
    reference=_reference,
    samples=_samples,
    cost=_cost,
    stock="the gradients of F.embedding_bag and of the cross",
    vmap=looped_vmap,
    autocast="promote",
)
