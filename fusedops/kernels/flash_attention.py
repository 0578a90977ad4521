"""Triton kernel of flash_attention, and what it shares with the kernels of its gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.attention_tiles import launch, tf32_allowed, tiles
from fusedops.kernels.launching import ceil_div, next_power_of_2
from fusedops.operators.flash_attention import diagonal, empty_outputs, with_unit_stride

LOG2_E = 1.4426950408889634


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a tile's columns are: at least 16, which a product needs."""
    return max(16, next_power_of_2(head_dim))


def scale_and_sign(scale: float | None, head_dim: int) -> tuple[float, int]:
    """A positive scale and the sign of the scores; (1, 0) for a scale of zero.

    Kernels look for the largest score before they scale it, which holds for a positive scale only.
    """
    scale = head_dim**-0.5 if scale is None else scale
    sign = (scale > 0) - (scale < 0)
    return (abs(scale) if sign else 1.0), sign


# ---------------------------------------------------------------------------------------------------------------------
# Device functions


@triton.jit
def split_head(pair, heads, group):
    """Index of (batch, head) into batch, head, and its head of k and v; 64-bit, to reach any address."""
    batch = pair // heads
    head = pair % heads
    return batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)


@triton.jit
def tile_offsets(stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of ROWS rows from the first of them."""
    return tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(base, offsets, rows, D: tl.constexpr, CHECK: tl.constexpr):
    """The tile at base; zero past `rows` rows, which are counted only if CHECK, and past D columns."""
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    if CHECK:
        mask = tl.arange(0, ROWS)[:, None] < rows
        if D < BLOCK_D:
            mask = mask & (tl.arange(0, BLOCK_D)[None, :] < D)
        return tl.load(base + offsets, mask=mask, other=0.0)
    elif D < BLOCK_D:
        return tl.load(base + offsets, mask=tl.arange(0, BLOCK_D)[None, :] < D, other=0.0)
    else:
        return tl.load(base + offsets)


@triton.jit
def store_tile(pointer, tile, batch, head, first, heads, length, D: tl.constexpr):
    """Stores rows from `first` on of one head of a tensor laid out as operators.flash_attention.empty_like does."""
    ROWS: tl.constexpr = tile.shape[0]
    BLOCK_D: tl.constexpr = tile.shape[1]
    base = pointer + ((batch * length + first) * heads + head) * D
    mask = (tl.arange(0, ROWS)[:, None] < length - first) & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(base + tile_offsets(heads * D, ROWS, BLOCK_D), tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def seen(first_query, first_key, keys, diagonal, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Which keys of a tile exist and are seen by its queries."""
    key = first_key + tl.arange(0, BLOCK_N)[None, :]
    mask = key < keys
    if CAUSAL:
        mask = mask & (key <= first_query + tl.arange(0, BLOCK_M)[:, None] + diagonal)
    return mask


@triton.jit
def key_ranges(first_query, keys, diagonal, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Ends of the keys that a block of queries sees: of the tiles that need no mask, and of all."""
    end = keys
    clear = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(first_query + BLOCK_M + diagonal, 0))
        clear = tl.minimum(keys, tl.maximum(first_query + 1 + diagonal, 0))
    return clear // BLOCK_N * BLOCK_N, end


@triton.jit
def attend(
    acc,
    total,
    peak,
    q,
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
    """Takes the keys from start to end in: the running maximum and sum of each row, and the sum that they weight."""
    for n in range(start, end, BLOCK_N):
        k = load_tile(k_base + n * k_stride, k_offsets, keys - n, D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SIGN != 1:
            s = s * SIGN
        if MASKED:
            s = tl.where(seen(first_query, n, keys, diagonal, BLOCK_M, BLOCK_N, CAUSAL), s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
        shift = new_peak
        if MASKED:  # -inf less -inf is NaN
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(s * scale - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        v = load_tile(v_base + n * v_stride, v_offsets, keys - n, D, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION, out_dtype=acc.dtype)
        peak = new_peak
    return acc, total, peak


# ---------------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit
def flash_attention_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    out_pointer,
    lse_pointer,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    group,
    queries,
    keys,
    diagonal,
    scale: tl.float64,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a block of queries of one head. scale is that of base-2 exponents."""
    blocks = tl.cdiv(queries, BLOCK_M)
    # Under a causal mask the last block has the most to do, and goes first.
    block = blocks - 1 - tl.program_id(0) % blocks
    pair = tl.program_id(0) // blocks
    batch, head, kv_head = split_head(pair, heads, group)
    first_query = block * BLOCK_M
    q_base = q_pointer + batch * q_batch + head * q_head + first_query.to(tl.int64) * q_row
    k_base = k_pointer + batch * k_batch + kv_head * k_head
    v_base = v_pointer + batch * v_batch + kv_head * v_head

    computing: tl.constexpr = lse_pointer.dtype.element_ty
    factor = tl.full((), scale, computing)
    peak = tl.full((BLOCK_M,), float("-inf"), computing)
    total = tl.zeros((BLOCK_M,), computing)
    acc = tl.zeros((BLOCK_M, BLOCK_D), computing)
    q = load_tile(q_base, tile_offsets(q_row, BLOCK_M, BLOCK_D), queries - first_query, D, True)
    k_offsets = tile_offsets(k_row, BLOCK_N, BLOCK_D)
    v_offsets = tile_offsets(v_row, BLOCK_N, BLOCK_D)
    k_stride = tl.full((), 1, tl.int64) * k_row
    v_stride = tl.full((), 1, tl.int64) * v_row
    clear, end = key_ranges(first_query, keys, diagonal, BLOCK_M, BLOCK_N, CAUSAL)
    acc, total, peak = attend(
        acc, total, peak, q, k_base, v_base, k_offsets, v_offsets, k_stride, v_stride, factor, first_query,
        0, clear, keys, diagonal, D, BLOCK_M, BLOCK_N, CAUSAL, False, SIGN, PRECISION,
    )  # fmt: skip
    acc, total, peak = attend(
        acc, total, peak, q, k_base, v_base, k_offsets, v_offsets, k_stride, v_stride, factor, first_query,
        clear, end, keys, diagonal, D, BLOCK_M, BLOCK_N, CAUSAL, True, SIGN, PRECISION,
    )  # fmt: skip

    rows = tl.arange(0, BLOCK_M)
    # A row that sees no key gives 0; one whose scores are all -inf has the same sum, but gives NaN, as a softmax does.
    blind = rows < -(first_query + diagonal) if CAUSAL else rows < 0
    total = tl.where(blind | (keys == 0), 1.0, tl.where(total == 0, float("nan"), total))
    lse = (peak + tl.log2(total)) * 0.6931471805599453
    store_tile(out_pointer, acc / total[:, None], batch, head, first_query, heads, queries, D)
    first_row = pair.to(tl.int64) * queries + first_query
    tl.store(lse_pointer + first_row + rows, lse, mask=rows < queries - first_query)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, alignment: str
) -> tuple[Tensor, Tensor]:
    out, lse = empty_outputs(q)
    if out.numel() == 0:
        return out, lse
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    offset = diagonal(queries, keys, alignment)
    factor, sign = scale_and_sign(scale, head_dim)
    block_d, tf32 = padded_head_dim(head_dim), tf32_allowed(q.dtype)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    launch(
        tiles("forward", q.itemsize, tf32, block_d, causal, queries <= 16, q.device.index),
        lambda tile: ceil_div(queries, tile.block_m) * batch * heads,
        flash_attention_kernel,
        (q, k, v, out, lse),
        (*strides, heads, heads // k.shape[1], queries, keys, offset, factor * LOG2_E),
        D=head_dim,
        BLOCK_D=block_d,
        CAUSAL=causal,
        SIGN=sign,
        PRECISION="tf32" if tf32 else "ieee",
    )
    return out, lse
