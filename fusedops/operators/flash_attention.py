"""flash_attention(q, k, v): softmax(scale q k^T) v without the score matrix in memory (Dao 2023, FlashAttention-2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.operators.pointwise import FLOATING, check_number
from fusedops.registration import Cost, Kernel, Operator, Sample, register

ALIGNMENTS = ("top_left", "bottom_right")
MAX_HEAD_DIM = 256
INTERPRETED_DTYPES = (torch.float16, torch.float32, torch.float64)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    alignment: str = "top_left",
) -> Tensor:
    """Attention: softmax(scale * q k^T) v over the last two dimensions, the softmax over the keys.

    q: (B, Hq, Sq, D); k, v: (B, Hkv, Sk, D), D from 1 to 256. One dtype (float16, bfloat16, float32, float64), one
    device, any strides. Returns (B, Hq, Sq, D) of that dtype, in memory (B, Sq, Hq, D): merging the heads copies
    nothing. Sums are in fp32, for float64 in float64; float32 products are rounded to TF32 only where
    `torch.backends.cuda.matmul` allows it. Under autocast the inputs are cast.

    Hq may be a multiple of Hkv (grouped queries): query head h then reads head h // (Hq // Hkv) of k and v.
    scale: a finite number; D**-0.5 unless given.
    causal: a query sees no key to the right of the diagonal, which starts at the top left, as in
    F.scaled_dot_product_attention, or ends at the bottom right, as decoding against a cache needs. Seen keys are 1:

        2 queries, 4 keys           4 queries, 2 keys
        top_left    bottom_right    top_left    bottom_right
        1 0 0 0     1 1 1 0         1 0         0 0
        1 1 0 0     1 1 1 1         1 1         0 0
                                    1 1         1 0
                                    1 1         1 1

    A query that sees no key gives 0 and takes no part in a gradient. Deterministic, forward and backward; gradients of
    any order (from the second on by stock formulas, which hold score matrices); no forward mode.
    Raises TypeError for another or a mixed dtype and a tensor as scale, ValueError for shapes, devices, an alignment or
    a scale other than these.
    """
    check_number("flash_attention", "scale", scale)
    return flash_attention_operator(q, k, v, causal, scale, alignment)[0]


# ---------------------------------------------------------------------------------------------------------------------
# What the mask, the checks and the outputs are; the kernels use these too


def diagonal(queries: int, keys: int, alignment: str) -> int:
    """Query i of a causal attention sees the keys j <= i + diagonal."""
    return keys - queries if alignment == "bottom_right" else 0


def with_unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension has stride 1, otherwise a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of its shape, not filled, that lies in memory as (batch, length, heads, head dim).

    Models split heads off a last dimension and merge them into it again: in this layout, which PyTorch's own flash
    kernels have too, neither copies anything, forward or backward.
    """
    _, heads, length, head_dim = tensor.shape
    # Not a transposed view: a view returned by a custom Function may not be modified in place.
    row = max(heads, 1) * head_dim
    return tensor.new_empty_strided(tensor.shape, (max(length, 1) * row, head_dim, row, 1), dtype=dtype)


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, not filled."""
    return empty_like(q), q.new_empty(q.shape[:-1], dtype=_computing_dtype(q))


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, not filled."""
    return empty_like(q), empty_like(k), empty_like(v)


def _computing_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _check(operator: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, alignment: str) -> None:
    if q.dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"{operator}: q is {q.dtype}; allowed: {allowed}")
    _check_like_q(operator, q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{operator}: {name} has shape {tuple(tensor.shape)}; it must have four dimensions, (batch, heads, "
                "length, head dim)"
            )
    if k.shape != v.shape:
        raise ValueError(f"{operator}: k has shape {tuple(k.shape)}, v {tuple(v.shape)}; they must be of one shape")
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"{operator}: k has batch {k.shape[0]}, q {batch}; they must be equal")
    if k.shape[3] != head_dim:
        raise ValueError(f"{operator}: k has head dim {k.shape[3]}, q {head_dim}; they must be equal")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{operator}: the head dim is {head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"{operator}: q has {heads} heads, k and v {kv_heads}; q's must be a multiple of those of k and v"
        )
    if alignment not in ALIGNMENTS:
        raise ValueError(f"{operator}: alignment is {alignment!r}; allowed: {', '.join(ALIGNMENTS)}")
    if scale is not None and not abs(scale) < float("inf"):  # nor NaN
        raise ValueError(f"{operator}: scale is {scale}; allowed: a finite number, or None for D**-0.5")


def _check_like_q(operator: str, q: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != q.dtype:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, q is {q.dtype}; they must be of one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, q on {q.device}; they must be on one device")


def _check_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    alignment: str,
) -> None:
    name = "flash_attention_backward"
    _check(name, q, k, v, scale, alignment)
    _check_like_q(name, q, grad=grad, out=out)
    for argument, tensor in (("grad", grad), ("out", out)):
        if tensor.shape != q.shape:
            raise ValueError(
                f"{name}: {argument} has shape {tuple(tensor.shape)}; it must be that of q, {tuple(q.shape)}"
            )
    if lse.shape != q.shape[:-1] or lse.dtype != _computing_dtype(q) or lse.device != q.device:
        raise ValueError(
            f"{name}: lse is {lse.dtype} of shape {tuple(lse.shape)} on {lse.device}; it must be what flash_attention "
            f"returned, {_computing_dtype(q)} of shape {tuple(q.shape[:-1])} on {q.device}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Stock formulas: the reference, and the gradient of the gradient


def _grouped(kv: Tensor, q: Tensor) -> Tensor:
    """k or v with as many heads as q."""
    group = q.shape[1] // max(kv.shape[1], 1)
    return kv if group == 1 else kv.repeat_interleave(group, dim=1)


def _ungrouped(gradient: Tensor, kv: Tensor) -> Tensor:
    """A gradient of `_grouped`'s result as one of its argument."""
    if gradient.shape[1] == kv.shape[1]:
        return gradient
    # Not unflatten, which the vmap of torch.autograd.functional does not know.
    return gradient.reshape(*kv.shape[:2], gradient.shape[1] // kv.shape[1], *kv.shape[2:]).sum(2)


def _softmax(q: Tensor, k: Tensor, causal: bool, scale: float, alignment: str) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp of the scores, k having q's heads; a row that sees no key has 0 and -inf."""
    scores = q @ k.mT * scale
    queries, keys = scores.shape[-2:]
    hidden = torch.zeros((queries, keys), dtype=torch.bool, device=q.device)
    if causal:
        hidden = (~hidden).triu(1 + diagonal(queries, keys, alignment))
    blind = hidden.all(-1)
    # Hiding every key of a row would make its softmax, and the gradient of that, NaN.
    scores = scores.masked_fill(hidden & ~blind[:, None], float("-inf"))
    p = scores.softmax(-1)
    lse = scores.to(_computing_dtype(scores)).logsumexp(-1)
    lse = lse.masked_fill(p.isnan().any(-1), float("nan"))
    return p.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, float("-inf"))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, alignment: str = "top_left"
) -> tuple[Tensor, Tensor]:
    p, lse = _softmax(q, _grouped(k, q), causal, _scale(q, scale), alignment)
    return p @ _grouped(v, q), lse


def _backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    alignment: str = "top_left",
) -> tuple[Tensor, Tensor, Tensor]:
    factor, k_, v_ = _scale(q, scale), _grouped(k, q), _grouped(v, q)
    p, _ = _softmax(q, k_, causal, factor, alignment)
    dp = grad @ v_.mT
    ds = factor * p * (dp - (p * dp).sum(-1, keepdim=True))
    return ds @ k_, _ungrouped(ds.mT @ q, k), _ungrouped(p.mT @ grad, v)


def _backward_of_backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of (dq, dk, dv) by grad, q, k and v; out and lse, being functions of those, have none of their own.

    With cotangents (a, b, c) of (dq, dk, dv), <a, dq> + <b, dk> + <c, dv> is differentiated by hand:
    e collects what meets ds, w what meets p.
    """
    grad, q, k, v = saved = ctx.saved_tensors
    dtype, scale = q.dtype, _scale(q, ctx.scale)
    grad, q, k, v, a, b, c = (t.to(_computing_dtype(t)) for t in (*saved, *cotangents))
    k_, v_, b_, c_ = (_grouped(t, q) for t in (k, v, b, c))

    def row_sum(t: Tensor) -> Tensor:
        return t.sum(-1, keepdim=True)

    p, _ = _softmax(q, k_, ctx.causal, scale, ctx.alignment)
    dp = grad @ v_.mT
    delta = row_sum(p * dp)
    ds = p * (dp - delta)
    e = scale * (a @ k_.mT + q @ b_.mT)
    epsilon = row_sum(p * e)
    f = p * (e - epsilon)
    w = (dp - delta) * e - epsilon * dp + grad @ c_.mT
    gs = p * (w - row_sum(p * w))
    gradients = (
        f @ v_ + p @ c_,
        scale * (ds @ b_ + gs @ k_),
        _ungrouped(scale * (ds.mT @ a + gs.mT @ q), k),
        _ungrouped(f.mT @ grad, v),
    )
    return (*(g.to(dtype) for g in gradients), None, None, None, None, None)


# ---------------------------------------------------------------------------------------------------------------------
# CPU


def _stock_cpu_arguments(
    q: Tensor, keys: int, causal: bool, scale: float | None, alignment: str, dtype: torch.dtype
) -> tuple[Any, ...]:
    """How to ask PyTorch's CPU kernel for a case: (rows that see nothing, sign, is_causal, mask, scale).

    The kernel knows the top left alignment only and gives NaN for rows that see nothing and for a scale below zero:
    such rows come first and are left out, the sign goes to q, and what is left of another alignment becomes a mask.
    """
    queries = q.shape[2]
    offset = diagonal(queries, keys, alignment) if causal else 0
    blind = queries if keys == 0 else min(max(-offset, 0), queries)
    offset, rows = offset + blind, queries - blind
    mask = None
    if offset > 0 and rows > 1:
        mask = q.new_full((rows, keys), float("-inf"), dtype=dtype).triu_(1 + offset)
    factor = _scale(q, scale)
    sign = (factor > 0) - (factor < 0)
    return blind, sign, causal and offset == 0, mask, abs(factor) if sign else 1.0


def _laid_out(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in a dtype and in the layout of `empty_like`: itself where it is."""
    expected = empty_like(tensor, dtype)
    if tensor.dtype == dtype and tensor.stride() == expected.stride():
        return tensor
    return expected.copy_(tensor)


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, alignment: str) -> tuple[Tensor, Tensor]:
    keys = k.shape[2]
    if q.numel() == 0 or keys == 0:
        out, lse = empty_outputs(q)
        return out.zero_(), lse.fill_(float("-inf"))
    dtype = _computing_dtype(q)  # in half types the kernel rounds sums too, and in float16 it is slow
    blind, sign, is_causal, mask, factor = _stock_cpu_arguments(q, keys, causal, scale, alignment, dtype)
    seeing = q[:, :, blind:] if blind else q
    seeing = seeing if sign == 1 else seeing * sign
    q_, k_, v_ = (with_unit_stride(t.to(dtype)) for t in (seeing, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_, k_, v_, 0.0, is_causal, attn_mask=mask, scale=factor
    )
    if not lse.all() and not (q.isfinite().all() and k.isfinite().all()):
        # The kernel takes a row of NaN scores for one that sees nothing, and gives 0.
        out, lse = _reference(q, k, v, causal, scale, alignment)
        return _laid_out(out, q.dtype), lse
    out, lse = _laid_out(out, q.dtype), lse.new_empty(lse.shape).copy_(lse)
    if blind:
        (part, part_lse), (out, lse) = (out, lse), empty_outputs(q)
        out[:, :, :blind] = 0
        lse[:, :, :blind] = float("-inf")
        out[:, :, blind:] = part
        lse[:, :, blind:] = part_lse
    return out, lse


def _backward_cpu(
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
    dtype = _computing_dtype(q)
    blind, sign, is_causal, mask, factor = _stock_cpu_arguments(q, k.shape[2], causal, scale, alignment, dtype)
    if blind == q.shape[2] or q.numel() == 0:
        dq, dk, dv = empty_gradients(q, k, v)
        return dq.zero_(), dk.zero_(), dv.zero_()
    if blind:
        grad, q, out, lse = (t[:, :, blind:] for t in (grad, q, out, lse))
    q_ = q if sign == 1 else q * sign
    grad_, q_, k_, v_, out_ = (with_unit_stride(t.to(dtype)) for t in (grad, q_, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_, q_, k_, v_, out_, lse, 0.0, is_causal, attn_mask=mask, scale=factor
    )
    if sign != 1:
        dq = dq * sign
    if blind:
        dq = torch.nn.functional.pad(dq, (0, 0, blind, 0))
    return _laid_out(dq, q.dtype), _laid_out(dk, q.dtype), _laid_out(dv, q.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def _setup(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.alignment = inputs
    ctx.mark_non_differentiable(outputs[1])
    ctx.set_materialize_grads(False)  # lse never has one
    ctx.save_for_backward(q, k, v, *outputs)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    gradients = flash_attention_backward_operator(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.alignment)
    return (*gradients, None, None, None)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    grad, q, k, v, _out, _lse, ctx.causal, ctx.scale, ctx.alignment = inputs
    ctx.save_for_backward(grad, q, k, v)


def _vmap(operator: Operator, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """The batch of the transform becomes part of the batch of the attention."""

    def lead(a: Any, dim: int | None) -> Any:
        if not isinstance(a, Tensor):
            return a
        return a.movedim(dim, 0) if dim is not None else a.expand(info.batch_size, *a.shape)

    args = tuple(lead(a, dim) for a, dim in zip(args, dims, strict=True))
    split = args[0].shape[:2]
    outputs = operator(*(a.flatten(0, 1) if isinstance(a, Tensor) else a for a in args))
    return tuple(output.unflatten(0, split) for output in outputs), (0,) * len(outputs)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def qkv(batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_dim: int) -> tuple[Tensor, ...]:
        kv = (batch, kv_heads, keys, head_dim)
        return randn(batch, heads, queries, head_dim), randn(*kv), randn(*kv)

    yield Sample("small", (*qkv(1, 2, 1, 3, 3, 4), False, None, "top_left"))
    yield Sample("full", (*qkv(2, 2, 2, 9, 9, 8), False, None, "top_left"))
    yield Sample("causal", (*qkv(1, 2, 2, 17, 17, 8), True, None, "top_left"))
    yield Sample("longer than a tile, causal", (*qkv(1, 1, 1, 63, 63, 13), True, None, "top_left"))
    yield Sample("head dim 40", (*qkv(1, 2, 2, 9, 7, 40), False, 0.3, "top_left"))
    yield Sample("head dim 1", (*qkv(1, 2, 2, 37, 37, 1), True, None, "top_left"))
    yield Sample("grouped queries", (*qkv(1, 4, 2, 5, 7, 8), True, 0.3, "top_left"))
    yield Sample("grouped queries, one head of keys", (*qkv(1, 3, 1, 17, 5, 13), False, None, "top_left"))
    yield Sample("fewer queries, bottom right", (*qkv(1, 4, 2, 5, 17, 8), True, None, "bottom_right"))
    yield Sample("more queries, bottom right", (*qkv(1, 2, 2, 17, 5, 8), True, None, "bottom_right"))
    yield Sample("more queries, top left", (*qkv(1, 2, 2, 17, 5, 8), True, None, "top_left"))
    yield Sample("one query, bottom right", (*qkv(1, 4, 2, 1, 9, 8), True, None, "bottom_right"))
    yield Sample("scale below zero", (*qkv(1, 2, 2, 9, 9, 8), True, -0.7, "top_left"))
    transposed = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(2, 2, 2, 9, 9, 8))
    yield Sample("(B, S, H, D) in memory", (*transposed, True, None, "top_left"))
    q, k, v = qkv(2, 2, 1, 5, 6, 8)
    yield Sample(
        "any strides",
        (q.mT.contiguous().mT, k[:, :, ::2], v[:, :1].expand(2, 1, 6, 8)[:, :, 1::2], False, None, "top_left"),
    )
    yield Sample("no batch", (*qkv(0, 2, 2, 5, 5, 8), True, None, "top_left"))
    yield Sample("no query", (*qkv(1, 2, 2, 0, 5, 8), True, None, "top_left"))
    yield Sample("no key", (*qkv(1, 2, 2, 5, 0, 8), False, None, "top_left"))


def _backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (q, k, v, *rest) in _samples(device, dtype):
        out, lse = _reference(*(t.to(_computing_dtype(t)) for t in (q, k, v)), *rest)
        yield Sample(name, (torch.randn_like(q), q, k, v, out.to(dtype), lse, *rest))


def _seen_pairs(queries: int, keys: int, causal: bool, alignment: str) -> int:
    if not causal:
        return queries * keys
    offset = diagonal(queries, keys, alignment)
    # Row i sees min(max(i + offset + 1, 0), keys) keys: a ramp, then a plateau.
    first = min(max(-offset, 0), queries)
    plateau = min(max(keys - offset - 1, first), queries)
    ramp = plateau - first
    return ramp * (first + offset + 1) + ramp * (ramp - 1) // 2 + (queries - plateau) * keys


def _cost(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, alignment: str = "top_left") -> Cost:
    batch, heads, queries, head_dim = q.shape
    pairs = batch * heads * _seen_pairs(queries, k.shape[2], causal, alignment)
    lse_bytes = q.numel() // head_dim * _computing_dtype(q).itemsize
    return Cost(
        flops=4 * pairs * head_dim,
        bytes=(2 * q.numel() + k.numel() + v.numel()) * q.itemsize + lse_bytes,
    )


def _backward_cost(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    alignment: str = "top_left",
) -> Cost:
    forward = _cost(q, k, v, causal, scale, alignment)
    # Five products for the forward's two; grad and dq beside q and out, dk and dv beside k and v.
    written = (2 * q.numel() + k.numel() + v.numel()) * q.itemsize
    return Cost(flops=forward.flops * 5 // 2, bytes=forward.bytes + written)


flash_attention_backward_operator = register(
    schema=(
        "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, "
        'float? scale, str alignment="top_left") -> (Tensor, Tensor, Tensor)'
    ),
    check=_check_backward,
    shape=lambda grad, q, k, v, out, lse, causal, scale, alignment: empty_gradients(q, k, v),
    cpu=_backward_cpu,
    kernel=Kernel("flash_attention_backward", "flash_attention_backward"),
    reference=_backward_reference,
    samples=_backward_samples,
    cost=_backward_cost,
    stock="the gradient of F.scaled_dot_product_attention",
    setup=_setup_backward,
    backward=_backward_of_backward,
    vmap=_vmap,
    interpreted_dtypes=INTERPRETED_DTYPES,
    exempt={
        "finite_differences": "out and lse are functions of q, k and v: one argument cannot be moved alone",
        "non_finite": "as above: NaN in out or lse alone is no case",
        "autocast": "only the gradient of flash_attention calls it, whose arguments have their dtypes by then",
    },
)

flash_attention_operator = register(
    schema=(
        "flash_attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale, "
        'str alignment="top_left") -> (Tensor, Tensor)'
    ),
    check=lambda q, k, v, causal, scale, alignment: _check("flash_attention", q, k, v, scale, alignment),
    shape=lambda q, k, v, causal, scale, alignment: empty_outputs(q),
    cpu=_cpu,
    kernel=Kernel("flash_attention", "flash_attention"),
    reference=_reference,
    samples=_samples,
    cost=_cost,
    stock="F.scaled_dot_product_attention(q, k, v)",
    setup=_setup,
    backward=_backward,
    vmap=_vmap,
    autocast="cast",
    interpreted_dtypes=INTERPRETED_DTYPES,
)
