"""Slot attention: (q, k, v, causal, scale, mask, dropout_p) -> out, all (B, H, S, D), GQA by K and V of fewer heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops import counting
from fusedops.operators.flash_attention import MAX_HEAD_DIM, flash_attention


def attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """F.scaled_dot_product_attention; causal means aligned at the top left, as there."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention_unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> str | None:
    """Why flash_attention cannot do a case, or None where it can."""
    if mask is not None:
        return "an attention mask was given"
    if dropout_p > 0:
        return f"attention dropout is {dropout_p}"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"the head dim is {q.shape[-1]}, above {MAX_HEAD_DIM}"
    if v.shape[-1] != q.shape[-1]:
        return f"v has head dim {v.shape[-1]}, q {q.shape[-1]}"
    if q.device.type not in ("cpu", "cuda"):
        return f"the device is {q.device.type}"
    return None


def attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """flash_attention where it can; `attention_unsupported` says where not."""
    reason = attention_unsupported(q, k, v, mask, dropout_p)
    if reason is not None:
        counting.announce_fallback("attention", "flash_attention", reason)
        return attention_native(q, k, v, causal, scale, mask, dropout_p)
    return flash_attention(q, k, v, causal, scale)


def attention_unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The textbook: scores, softmax and weighted sum as three steps, the whole score matrix in memory."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0) @ v
