"""Slot activation: (gate, up) -> y."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def activation_native(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in stock PyTorch."""
    return F.silu(gate) * up
