"""The gradient of embedding_aggregation: by operators of ours or, where it is to be differentiated, by stock ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fusedops.operators.embedding_backward import embedding_aggregation_backward_operator, gradients_stock
from fusedops.operators.embedding_bags import first_keys
from fusedops.operators.embedding_rows import Rows, embedding_rows_operator


def setup(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    tables, ids, offsets, dense, weights, *options, ctx.cross, ctx.sparse, save_vectors = inputs
    ctx.feature_tables, ctx.pooling, ctx.padding_index, ctx.hash, ctx.out_of_range = options
    ctx.table_rows, ctx.has_dense = [table.shape[0] for table in tables], dense is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(outputs[1])
    ctx.leaves = [table if table.is_leaf else None for table in tables] if ctx.sparse else []
    # A look-up alone is linear in the tables: what they hold does not matter to its gradient, and may change.
    kept = tables if weights is not None or ctx.cross != "none" else []
    found: Sequence[Tensor | None] = (None,) * _FOUND
    if ctx.sparse and ids.is_cuda and any(table.requires_grad for table in tables):
        found = _find_ahead(ctx, ids, offsets)
    ctx.save_for_backward(ids, offsets, dense, weights, outputs[1] if save_vectors else None, *found, *kept)


_FOUND = len(Rows._fields) + 1
"""What `_find_ahead` gives."""


def _find(ctx: Any, ids: Tensor, offsets: Tensor) -> Rows:
    options = (ctx.table_rows, ctx.feature_tables, ctx.padding_index, ctx.hash, ctx.out_of_range)
    return Rows(*embedding_rows_operator(ids, offsets, *options))


def _find_ahead(ctx: Any, ids: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """The rows touched, and on the host where those of each table start: on their way while the forward pass goes on.

    A sparse gradient's size must be known to the host. In the backward pass the host would wait for all that the GPU
    has been given until then, and the GPU for the host next.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "embedding_aggregation: a CUDA graph cannot hold a sparse gradient of tables, whose size varies; allowed "
            "while a graph is captured: sparse=False, or tables that require no gradient"
        )
    rows = _find(ctx, ids, offsets)
    starts = torch.empty(rows.starts.shape, dtype=rows.starts.dtype, pin_memory=True)
    starts.copy_(rows.starts, non_blocking=True)
    ctx.ready = torch.cuda.Event()
    ctx.ready.record(torch.cuda.current_stream(ids.device))
    return *rows, starts


def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    nothing = (None,) * 8
    if grad is None:
        return (None, None, None, None, None, *nothing)
    needs_tables, _, _, needs_dense, needs_weights = ctx.needs[:5]
    if torch.is_grad_enabled():  # the gradient is to be differentiated
        if ctx.sparse and any(needs_tables):
            raise RuntimeError(
                "embedding_aggregation: a sparse gradient of tables has no derivative; allowed under create_graph and "
                "torch.func: sparse=False"
            )
        of_tables, grad_dense, grad_weights = _differentiable_gradients(ctx, grad)
    else:
        of_tables, grad_dense, grad_weights = _gradients(ctx, grad)
    return (
        [g if needed else None for g, needed in zip(of_tables, needs_tables, strict=True)],
        None,
        None,
        grad_dense if needs_dense else None,
        grad_weights if needs_weights else None,
        *nothing,
    )


_Gradients = tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]


def _differentiable_gradients(ctx: Any, grad: Tensor) -> _Gradients:
    ids, offsets, dense, weights, _, *rest = ctx.saved_tensors
    tables = rest[_FOUND:]
    of_all_rows, grad_dense, grad_weights = gradients_stock(
        grad, tables, ids, offsets, dense, weights, None, ctx.table_rows, ctx.feature_tables, ctx.pooling,
        ctx.padding_index, ctx.hash, ctx.cross, ctx.has_dense,
    )  # fmt: skip
    of_dense, of_weights = (None if g is None else g.to(grad.dtype) for g in (grad_dense, grad_weights))
    return of_all_rows.to(grad.dtype).split(ctx.table_rows), of_dense, of_weights


def _gradients(ctx: Any, grad: Tensor) -> _Gradients:
    ids, offsets, dense, weights, vectors, *rest = ctx.saved_tensors
    found, tables = rest[:_FOUND], rest[_FOUND:]
    needs_tables, needs_weights = any(ctx.needs[0]), ctx.needs[4]
    rows, count = None, 0
    starts: list[int] = []
    if needs_tables or needs_weights:
        rows = _find(ctx, ids, offsets) if found[0] is None else Rows(*found[:-1])
    if rows is not None and needs_tables:
        if ctx.sparse:
            if found[0] is not None:
                ctx.ready.synchronize()
            starts = (rows.starts if found[0] is None else found[-1]).tolist()
            count = starts[-1]
        else:
            count = min(ids.numel(), sum(ctx.table_rows))
    reads_tables = needs_weights or (ctx.cross != "none" and vectors is None)
    row_grads, grad_dense, grad_weights = embedding_aggregation_backward_operator(
        grad, tables if reads_tables else [], ids, offsets, dense, weights, vectors,
        *((None,) * 4 if rows is None else (rows.order, rows.bags, rows.segments, rows.counts)),
        count, ctx.table_rows, ctx.feature_tables, ctx.pooling, ctx.padding_index, ctx.hash, ctx.cross, ctx.has_dense,
        needs_weights,
    )  # fmt: skip
    of_tables: Sequence[Tensor | None] = [None] * len(ctx.table_rows)
    if rows is not None and needs_tables:
        of_tables = _sparse(ctx, rows, starts, row_grads) if ctx.sparse else _dense(ctx, rows, row_grads)
    return of_tables, grad_dense, grad_weights


def _dense(ctx: Any, rows: Rows, row_grads: Tensor) -> Sequence[Tensor]:
    """Gradients of whole tables. What stands behind the last row touched is zero, and is added somewhere."""
    count, device = row_grads.shape[0], row_grads.device
    # Made on the device: a CUDA graph that is captured here could not copy it there.
    first = torch.cat([torch.full((1,), key, device=device) for key in first_keys(ctx.table_rows)[:-1]])
    # Of all starts: of a part of them, Inductor on a GPU (torch 2.11) reads the first ones.
    table = torch.searchsorted(rows.starts, torch.arange(count, device=device), right=True) - 1
    keys = first[table.clamp(max=len(ctx.table_rows) - 1)] + rows.rows[:count]
    whole = row_grads.new_zeros((sum(ctx.table_rows), row_grads.shape[1]))
    return whole.index_add_(0, keys, row_grads).split(ctx.table_rows)


def _sparse(ctx: Any, rows: Rows, starts: list[int], row_grads: Tensor) -> Sequence[Tensor | None]:
    """A coalesced gradient of each table that wants one, all of them parts of one memory."""
    counts, width = [end - begin for begin, end in pairwise(starts)], row_grads.shape[1]
    indices = torch.split_with_sizes(rows.rows[: starts[-1]][None], counts, 1)
    gradients: list[Tensor | None] = []
    leaves = []
    parts = zip(ctx.needs[0], ctx.leaves, ctx.table_rows, indices, row_grads.split_with_sizes(counts), strict=True)
    for needed, leaf, count, own, values in parts:
        if not needed:
            gradients.append(None)
            continue
        gradients.append(
            torch.sparse_coo_tensor(own, values, (count, width), check_invariants=False, is_coalesced=True)
        )
        if leaf is not None and leaf.grad is None:
            leaves.append((leaf, own.data_ptr(), values.data_ptr()))
    if leaves:
        _keep_coalesced(leaves, (rows.rows, row_grads))
    return gradients


def _keep_coalesced(leaves: list[tuple[Tensor, int, int]], memory: tuple[Tensor, Tensor]) -> None:
    """Mark as coalesced, when this backward pass ends, gradients of leaves with rows and values at these addresses.

    Autograd stores a sparse gradient without its mark, and an optimizer would sort all of it again. The addresses are
    of parts of `memory`, which until then nothing else can have; a hook may have put others in their place.
    """

    def mark(memory: tuple[Tensor, Tensor] = memory) -> None:
        for leaf, *addresses in leaves:
            gradient = leaf.grad
            if gradient is None or not gradient.is_sparse:
                continue
            if [gradient._indices().data_ptr(), gradient._values().data_ptr()] == addresses:
                gradient._coalesced_(True)

    torch.autograd.Variable._execution_engine.queue_callback(mark)
