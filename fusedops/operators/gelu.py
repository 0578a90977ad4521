"""GELU (Hendrycks and Gimpel 2016), z Phi(z), and its tanh form: what stock PyTorch has no function for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

APPROXIMATIONS = ("none", "tanh")

# The tanh form is z sigmoid(v), where v = 2 sqrt(2 / pi) (z + CUBIC z^3).
_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


def gelu_second_derivative(z: Tensor, approximate: str) -> Tensor:
    """d^2 gelu / dz^2, in differentiable stock operations."""
    if approximate == "none":
        return _density(z) * (2.0 - z * z)
    v = _SLOPE * (z + _CUBIC * z**3)
    v1 = _SLOPE * (1.0 + 3.0 * _CUBIC * z * z)
    v2 = _SLOPE * 6.0 * _CUBIC * z
    s, rest = torch.sigmoid(v), torch.sigmoid(-v)  # 1 - s would cancel
    return s * rest * (2.0 * v1 + z * (v1 * v1 * (rest - s) + v2))
