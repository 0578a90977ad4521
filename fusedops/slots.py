"""The slots: places in a model where an implementation is chosen, each with its signature and its implementations.

A fused implementation says why it does not support a case, falls back to the native one, and announces that once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops import counting
from fusedops.operators.flash_attention import MAX_HEAD_DIM, flash_attention
from fusedops.operators.linear_gelu_dropout import linear_gelu_dropout
from fusedops.operators.pointwise import FLOATING
from fusedops.operators.silu_mul import silu_mul


@dataclass(frozen=True)
class Implementation:
    """One way to fill a slot: a plain module-level function of the slot's signature.

    operators: what a profile of one call shows, forward and, where it has one, backward: "fusedops::silu_mul" of ours,
    "aten::silu" of stock PyTorch. A fused slot that shows none of its own, with no fallback announced, swapped nothing.
    """

    slot: str
    name: str
    function: Callable[..., Any]
    operators: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether it runs operators of this library."""
        return any(operator.startswith("fusedops::") for operator in self.operators)


@dataclass(frozen=True)
class Slot:
    """A slot: its name, the signature of its implementations, and these by name ("native" and "fused" among them)."""

    name: str
    signature: str
    implementations: dict[str, Implementation] = field(default_factory=dict)

    def implementation(self, name: str) -> Implementation:
        """The implementation `name`. Raises KeyError naming those that exist."""
        if name not in self.implementations:
            raise KeyError(
                f"ops.{self.name}={name}: no such implementation; there are {', '.join(self.implementations)}"
            )
        return self.implementations[name]


# ---------------------------------------------------------------------------------------------------------------------
# activation: (gate, up) -> y


def activation_native(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in stock PyTorch."""
    return F.silu(gate) * up


# ---------------------------------------------------------------------------------------------------------------------
# mlp: (x, w1, b1, w2, b2, p, approximate, training) -> y


def mlp_native(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    p: float,
    approximate: str,
    training: bool,
) -> Tensor:
    """linear, GELU, dropout, linear in stock PyTorch."""
    hidden = F.dropout(F.gelu(F.linear(x, w1, b1), approximate=approximate), p, training)
    return F.linear(hidden, w2, b2)


def mlp_unsupported(x: Tensor) -> str | None:
    """Why linear_gelu_dropout cannot do a case, or None where it can."""
    if x.dtype not in FLOATING:
        return f"the dtype is {str(x.dtype).removeprefix('torch.')}"
    if x.device.type not in ("cpu", "cuda"):
        return f"the device is {x.device.type}"
    return None


def mlp_fused(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    p: float,
    approximate: str,
    training: bool,
) -> Tensor:
    """linear_gelu_dropout where it can, then a stock linear; `mlp_unsupported` says where not."""
    reason = mlp_unsupported(x)
    if reason is not None:
        counting.announce_fallback("mlp", "linear_gelu_dropout", reason)
        return mlp_native(x, w1, b1, w2, b2, p, approximate, training)
    return F.linear(linear_gelu_dropout(x, w1, b1, p, approximate, training), w2, b2)


# ---------------------------------------------------------------------------------------------------------------------
# attention: (q, k, v, causal, scale, mask, dropout_p) -> out, all (B, H, S, D), GQA by K and V of fewer heads


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


def _slot(name: str, signature: str, **implementations: tuple[Callable[..., Any], tuple[str, ...]]) -> Slot:
    return Slot(name, signature, {n: Implementation(name, n, f, ops) for n, (f, ops) in implementations.items()})


SLOTS: dict[str, Slot] = {
    slot.name: slot
    for slot in (
        _slot(
            "attention",
            "(q, k, v, causal, scale, mask=None, dropout_p=0.0) -> out",
            native=(attention_native, ("aten::scaled_dot_product_attention",)),
            fused=(attention_fused, ("fusedops::flash_attention", "fusedops::flash_attention_backward")),
            unfused=(attention_unfused, ("aten::softmax",)),
        ),
        _slot(
            "mlp",
            "(x, w1, b1, w2, b2, p, approximate, training) -> y",
            native=(mlp_native, ("aten::gelu", "aten::gelu_backward")),
            fused=(mlp_fused, ("fusedops::linear_gelu_dropout", "fusedops::gelu_dropout_backward")),
        ),
        _slot(
            "activation",
            "(gate, up) -> y",
            native=(activation_native, ("aten::silu", "aten::silu_backward")),
            fused=(silu_mul, ("fusedops::silu_mul", "fusedops::silu_mul_backward")),
        ),
    )
}
