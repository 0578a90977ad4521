"""Faults planted on purpose: stock implementations with one thing wrong, to see what `equivalence` can see.

They are no choices of the configuration; benchmarks/equivalence.py --faults trains them beside the stock operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.arms import Arm
from fusedops.slots import Implementation

DROPOUT_SCALE = 1.02
"""What a dropped-out activation is multiplied by besides 1 / (1 - p), in training."""


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)


def attention_one_ahead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention whose mask is off by one to the right: each token sees the next one, which it is to predict."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(1)
    return _attention(q, k, v, seen, scale)


def attention_one_behind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention whose mask is off by one to the left: a token does not see itself, the first one excepted."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(-1)
    seen[0, 0] = True
    return _attention(q, k, v, seen, scale)


def mlp_half_bias_gradient(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    p: float,
    approximate: str,
    training: bool,
) -> Tensor:
    """The MLP with half the gradient of its first bias."""
    half = None if b1 is None else 0.5 * b1 + 0.5 * b1.detach()
    hidden = F.dropout(F.gelu(F.linear(x, w1, half), approximate=approximate), p, training)
    return F.linear(hidden, w2, b2)


def mlp_dropout_scale(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    p: float,
    approximate: str,
    training: bool,
) -> Tensor:
    """The MLP whose dropout scales what it keeps by 2 % too much, which evaluation does not do."""
    hidden = F.dropout(F.gelu(F.linear(x, w1, b1), approximate=approximate), p, training)
    return F.linear(DROPOUT_SCALE * hidden if training else hidden, w2, b2)


_ATTENTION, _GELU = ("aten::scaled_dot_product_attention",), ("aten::gelu", "aten::gelu_backward")
FAULTS = (
    Implementation("attention", "attention mask one ahead", attention_one_ahead, _ATTENTION),
    Implementation("attention", "attention mask one behind", attention_one_behind, _ATTENTION),
    Implementation("mlp", "dropout's scale 2 % off", mlp_dropout_scale, _GELU),
    Implementation("mlp", "half the bias gradient", mlp_half_bias_gradient, _GELU),
)
"""From blatant to subtle."""


def faulty_arms(stock: Arm, slots: Sequence[str]) -> list[Arm]:
    """For each fault in one of the slots, the stock arm with it, named as the fault is."""
    return [
        replace(
            stock,
            name=fault.name,
            implementations=tuple(fault if each.slot == fault.slot else each for each in stock.implementations),
        )
        for fault in FAULTS
        if fault.slot in slots
    ]
