"""Activations with the derivatives that a Laplacian and its gradients need: the function and its first four, in stock
PyTorch. (f to f2 for the Laplacian itself, f3 for the gradient with respect to the parameters, f4 for that one's.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def _tanh(z: Tensor, count: int) -> list[Tensor]:
    t = torch.tanh(z)
    first = 1.0 - t * t
    return [t, first, -2.0 * t * first, first * (6.0 * t * t - 2.0), 8.0 * t * first * (2.0 - 3.0 * t * t)][:count]


def _sin(z: Tensor, count: int) -> list[Tensor]:
    s, c = torch.sin(z), torch.cos(z)
    return [s, c, -s, -c, s][:count]


def _silu(z: Tensor, count: int) -> list[Tensor]:
    # silu = z s, so its k-th derivative is z s^(k) + k s^(k-1), and the sigmoid's derivatives are polynomials of s.
    s, rest = torch.sigmoid(z), torch.sigmoid(-z)
    p, tilt = s * rest, rest - s
    sigmoid = [s, p, p * tilt, p * (1.0 - 6.0 * p), p * tilt * (1.0 - 12.0 * p)]
    return [F.silu(z), *(z * sigmoid[k] + k * sigmoid[k - 1] for k in range(1, count))]


def _gelu(z: Tensor, count: int) -> list[Tensor]:
    # gelu = z Phi, Phi' = phi, phi' = -z phi: Hermite-like polynomials. Far out phi is 0, and must not meet infinity.
    square = (z * z).clamp(max=1e4)
    density = torch.exp(-0.5 * square) / math.sqrt(2.0 * math.pi)
    cdf = 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5)))
    return [
        z * cdf,
        cdf + z * density,
        density * (2.0 - square),
        density * z * (square - 4.0),
        density * (square * (7.0 - square) - 4.0),
    ][:count]


_DERIVATIVES: Mapping[str, Callable[[Tensor, int], list[Tensor]]] = {
    "tanh": _tanh,
    "sin": _sin,
    "silu": _silu,
    "gelu": _gelu,
}

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "silu": F.silu,
    "gelu": F.gelu,
}
"""The activations by name, each as its stock function; gelu is the exact one."""

WITHOUT_CURVATURE = ("relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid", "prelu", "identity")
"""Activations whose second derivative, and with it every Laplacian, is zero almost everywhere."""


def check_activation(where: str, activation: str) -> None:
    """Raise ValueError, beginning with `where`, for an activation that is not among `ACTIVATIONS`."""
    if activation in ACTIVATIONS:
        return
    why = ", whose second derivative is zero" if activation in WITHOUT_CURVATURE else ""
    raise ValueError(f"{where}: activation is {activation!r}{why}; allowed: {', '.join(map(repr, ACTIVATIONS))}")


def derivatives(activation: str, z: Tensor, count: int) -> list[Tensor]:
    """The activation at z and its derivatives, `count` functions in all (5 at most); differentiable."""
    return _DERIVATIVES[activation](z, count)
