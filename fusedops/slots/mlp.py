"""Slot mlp: (x, w1, b1, w2, b2, p, approximate, training) -> y."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusedops import counting
from fusedops.operators.linear_gelu_dropout import linear_gelu_dropout
from fusedops.operators.pointwise import FLOATING


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
