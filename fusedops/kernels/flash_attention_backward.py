"""Triton kernels of the gradient of flash_attention: one for K and V, one for Q, no atomics, so bitwise repeatable."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels import launching
from fusedops.kernels.attention_tiles import launch, tf32_allowed, tiles
from fusedops.kernels.flash_attention import (
    LOG2_E,
    key_ranges,
    load_tile,
    padded_head_dim,
    scale_and_sign,
    seen,
    split_head,
    store_tile,
    tile_offsets,
)
from fusedops.kernels.launching import ceil_div
from fusedops.operators.flash_attention import diagonal, empty_gradients, with_unit_stride

_ROW_BLOCK = 32


@triton.jit
def row_terms_kernel(
    grad_pointer,
    out_pointer,
    lse_pointer,
    terms_pointer,
    grad_batch,
    grad_head,
    grad_row,
    out_batch,
    out_head,
    out_row,
    heads,
    queries,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What both gradients need of each row: delta = sum(grad out), and lse for base-2 exponents.

    A row that saw no key gets +inf for -inf: its probabilities then come out as 0.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    exists = row < rows
    mask = exists[:, None] & (column < D)[None, :]
    query, pair = row % queries, row // queries
    batch, head = pair // heads, pair % heads
    grad_rows = grad_pointer + batch * grad_batch + head * grad_head + query * grad_row
    out_rows = out_pointer + batch * out_batch + head * out_head + query * out_row
    lse = tl.load(lse_pointer + row, mask=exists, other=0.0)
    grad = tl.load(grad_rows[:, None] + column[None, :], mask=mask, other=0.0).to(lse.dtype)
    out = tl.load(out_rows[:, None] + column[None, :], mask=mask, other=0.0).to(lse.dtype)
    tl.store(terms_pointer + row, tl.sum(grad * out, 1), mask=exists)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(terms_pointer + rows + row, lse, mask=exists)


@triton.jit
def add_queries(
    dk,
    dv,
    k,
    v,
    q_base,
    grad_base,
    terms_base,
    terms_count,
    q_offsets,
    grad_offsets,
    q_stride,
    grad_stride,
    scale,
    first_key,
    start,
    end,
    queries,
    diagonal,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CHECK: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what the queries from start to end give to dk and dv of a block of keys. Scores are keys by queries here."""
    for m in range(start, end, BLOCK_M):
        rows = queries - m
        q = load_tile(q_base + m * q_stride, q_offsets, rows, D, CHECK)
        row = tl.arange(0, BLOCK_M)
        if CHECK:  # rows past the end have no probability
            lse = tl.load(terms_base + terms_count + m + row, mask=row < rows, other=float("inf"))
            delta = tl.load(terms_base + m + row, mask=row < rows, other=0.0)
        else:
            lse = tl.load(terms_base + terms_count + m + row)
            delta = tl.load(terms_base + m + row)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if SIGN != 1:
            s = s * SIGN
        p = tl.exp2(s * scale - lse[None, :])
        if MASKED:
            key = first_key + tl.arange(0, BLOCK_N)[:, None]
            p = tl.where(key <= m + row[None, :] + diagonal, p, 0.0)
        grad = load_tile(grad_base + m * grad_stride, grad_offsets, rows, D, CHECK)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION, out_dtype=dv.dtype)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=dk.dtype)
    return dk, dv


@triton.jit
def key_value_gradient_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    grad_pointer,
    terms_pointer,
    dk_pointer,
    dv_pointer,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    grad_batch,
    grad_head,
    grad_row,
    kv_heads,
    group,
    queries,
    keys,
    diagonal,
    terms_count,
    scale: tl.float64,
    factor: tl.float64,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHECK: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a block of keys of one head of k and v, over all queries of its group. factor is the scale of dk."""
    blocks = tl.cdiv(keys, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    pair = tl.program_id(0) // blocks
    batch, kv_head, _ = split_head(pair, kv_heads, 1)
    remaining = keys - first_key
    k_base = k_pointer + batch * k_batch + kv_head * k_head + first_key.to(tl.int64) * k_row
    v_base = v_pointer + batch * v_batch + kv_head * v_head + first_key.to(tl.int64) * v_row
    k = load_tile(k_base, tile_offsets(k_row, BLOCK_N, BLOCK_D), remaining, D, True)
    v = load_tile(v_base, tile_offsets(v_row, BLOCK_N, BLOCK_D), remaining, D, True)

    computing: tl.constexpr = terms_pointer.dtype.element_ty
    scale_ = tl.full((), scale, computing)
    dk = tl.zeros((BLOCK_N, BLOCK_D), computing)
    dv = tl.zeros((BLOCK_N, BLOCK_D), computing)
    q_offsets = tile_offsets(q_row, BLOCK_M, BLOCK_D)
    grad_offsets = tile_offsets(grad_row, BLOCK_M, BLOCK_D)
    q_stride = tl.full((), 1, tl.int64) * q_row
    grad_stride = tl.full((), 1, tl.int64) * grad_row
    # Query i sees this block's keys in part from first_key - diagonal on, all of them from its last key's diagonal on.
    start = queries * 0
    clear = queries * 0
    if CAUSAL:
        start = tl.minimum(tl.maximum(first_key - diagonal, 0), queries) // BLOCK_M * BLOCK_M
        clear = tl.maximum(first_key + BLOCK_N - 1 - diagonal, 0)
        clear = tl.minimum(tl.cdiv(clear, BLOCK_M) * BLOCK_M, tl.cdiv(queries, BLOCK_M) * BLOCK_M)
    for member in range(0, group):
        head = kv_head * group + member
        q_base = q_pointer + batch * q_batch + head * q_head
        grad_base = grad_pointer + batch * grad_batch + head * grad_head
        terms_base = terms_pointer + (batch * kv_heads * group + head) * queries
        if CAUSAL:
            dk, dv = add_queries(
                dk, dv, k, v, q_base, grad_base, terms_base, terms_count, q_offsets, grad_offsets, q_stride,
                grad_stride, scale_, first_key, start, clear, queries, diagonal, D, BLOCK_M, BLOCK_N, True, CHECK,
                SIGN, PRECISION,
            )  # fmt: skip
        dk, dv = add_queries(
            dk, dv, k, v, q_base, grad_base, terms_base, terms_count, q_offsets, grad_offsets, q_stride,
            grad_stride, scale_, first_key, clear, queries, queries, diagonal, D, BLOCK_M, BLOCK_N, False, CHECK,
            SIGN, PRECISION,
        )  # fmt: skip
    dk = dk * tl.full((), factor, computing)
    store_tile(dk_pointer, dk, batch, kv_head, first_key, kv_heads, keys, D)
    store_tile(dv_pointer, dv, batch, kv_head, first_key, kv_heads, keys, D)


@triton.jit
def add_keys(
    dq,
    q,
    grad,
    lse,
    delta,
    k_base,
    v_base,
    k_offsets,
    v_offsets,
    k_stride,
    v_stride,
    scale,
    first_query,
    start,
    end,
    keys,
    diagonal,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what the keys from start to end give to dq of one block of queries."""
    for n in range(start, end, BLOCK_N):
        k = load_tile(k_base + n * k_stride, k_offsets, keys - n, D, MASKED)
        v = load_tile(v_base + n * v_stride, v_offsets, keys - n, D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SIGN != 1:
            s = s * SIGN
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            p = tl.where(seen(first_query, n, keys, diagonal, BLOCK_M, BLOCK_N, CAUSAL), p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=dq.dtype)
    return dq


@triton.jit
def query_gradient_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    grad_pointer,
    terms_pointer,
    dq_pointer,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    grad_batch,
    grad_head,
    grad_row,
    heads,
    group,
    queries,
    keys,
    diagonal,
    terms_count,
    scale: tl.float64,
    factor: tl.float64,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a block of queries of one head. factor is the scale of dq."""
    blocks = tl.cdiv(queries, BLOCK_M)
    # Under a causal mask the last block has the most to do, and goes first.
    first_query = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    pair = tl.program_id(0) // blocks
    batch, head, kv_head = split_head(pair, heads, group)
    remaining = queries - first_query
    first_row = pair.to(tl.int64) * queries + first_query
    wide_query = first_query.to(tl.int64)
    q_base = q_pointer + batch * q_batch + head * q_head + wide_query * q_row
    grad_base = grad_pointer + batch * grad_batch + head * grad_head + wide_query * grad_row
    q = load_tile(q_base, tile_offsets(q_row, BLOCK_M, BLOCK_D), remaining, D, True)
    grad = load_tile(grad_base, tile_offsets(grad_row, BLOCK_M, BLOCK_D), remaining, D, True)
    row = tl.arange(0, BLOCK_M)
    delta = tl.load(terms_pointer + first_row + row, mask=row < remaining, other=0.0)
    lse = tl.load(terms_pointer + terms_count + first_row + row, mask=row < remaining, other=float("inf"))

    computing: tl.constexpr = terms_pointer.dtype.element_ty
    scale_ = tl.full((), scale, computing)
    dq = tl.zeros((BLOCK_M, BLOCK_D), computing)
    k_base = k_pointer + batch * k_batch + kv_head * k_head
    v_base = v_pointer + batch * v_batch + kv_head * v_head
    k_offsets = tile_offsets(k_row, BLOCK_N, BLOCK_D)
    v_offsets = tile_offsets(v_row, BLOCK_N, BLOCK_D)
    k_stride = tl.full((), 1, tl.int64) * k_row
    v_stride = tl.full((), 1, tl.int64) * v_row
    clear, end = key_ranges(first_query, keys, diagonal, BLOCK_M, BLOCK_N, CAUSAL)
    dq = add_keys(
        dq, q, grad, lse, delta, k_base, v_base, k_offsets, v_offsets, k_stride, v_stride, scale_, first_query,
        0, clear, keys, diagonal, D, BLOCK_M, BLOCK_N, CAUSAL, False, SIGN, PRECISION,
    )  # fmt: skip
    dq = add_keys(
        dq, q, grad, lse, delta, k_base, v_base, k_offsets, v_offsets, k_stride, v_stride, scale_, first_query,
        clear, end, keys, diagonal, D, BLOCK_M, BLOCK_N, CAUSAL, True, SIGN, PRECISION,
    )  # fmt: skip
    store_tile(dq_pointer, dq * tl.full((), factor, computing), batch, head, first_query, heads, queries, D)


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    alignment: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_gradients(q, k, v)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    grad, q, k, v, out = (with_unit_stride(t) for t in (grad, q, k, v, out))
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    offset = diagonal(queries, keys, alignment)
    scale_, sign = scale_and_sign(scale, head_dim)
    block_d, tf32 = padded_head_dim(head_dim), tf32_allowed(q.dtype)

    terms = torch.empty((2, *lse.shape), dtype=lse.dtype, device=lse.device)
    launching.launch(
        row_terms_kernel,
        ceil_div(lse.numel(), _ROW_BLOCK),
        (grad, out, lse.contiguous(), terms),
        (*grad.stride()[:3], *out.stride()[:3], heads, queries, lse.numel()),
        num_warps=4,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK=_ROW_BLOCK,
    )
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    sizes = (heads // kv_heads, queries, keys, offset, lse.numel(), scale_ * LOG2_E, scale_ * sign)
    precision = "tf32" if tf32 else "ieee"
    constants = {"D": head_dim, "BLOCK_D": block_d, "CAUSAL": causal, "SIGN": sign, "PRECISION": precision}
    tile_key = (q.itemsize, tf32, block_d, causal, False, q.device.index)
    if keys:
        choice = tiles("keys", *tile_key)
        # Whichever is taken, its last step has all of its queries.
        check = queries % max(tile.block_m for tile in choice) != 0
        launch(
            choice,
            lambda tile: ceil_div(keys, tile.block_n) * batch * kv_heads,
            key_value_gradient_kernel,
            (q, k, v, grad, terms, dk, dv),
            (*strides, kv_heads, *sizes),
            CHECK=check,
            **constants,
        )
    launch(
        tiles("queries", *tile_key),
        lambda tile: ceil_div(queries, tile.block_m) * batch * heads,
        query_gradient_kernel,
        (q, k, v, grad, terms, dq),
        (*strides, heads, *sizes),
        **constants,
    )
    return dq, dk, dv
