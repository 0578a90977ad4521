"""Activations with their derivatives in Triton, for kernels that carry derivatives through a network."""

from __future__ import annotations

import triton
import triton.language as tl

from fusedops.kernels.gelu_dropout import DENSITY_AT_ZERO, normal_cdf
from fusedops.kernels.pointwise import exp, sigmoid


@triton.jit
def tanh(z, HALF: tl.constexpr):
    """tanh(z) and its derivative, neither taken as a difference of nearly equal numbers.

    With e = exp(-|z|): tanh |z| = (1 - e^2) / (1 + e^2) = 2 e sinh |z| / (1 + e^2), the latter for small |z| by the
    series of sinh, and tanh' = 4 e^2 / (1 + e^2)^2.
    """
    size = tl.abs(z)
    e = exp(-size, HALF)
    square = size * size
    if z.dtype == tl.float64:
        series = 1.0 + square / 272.0
        series = 1.0 + square / 210.0 * series
        series = 1.0 + square / 156.0 * series
        series = 1.0 + square / 110.0 * series
    else:
        series = 1.0 + square * 0.00909090909090909
    series = 1.0 + square * 0.01388888888888889 * series
    series = 1.0 + square * 0.023809523809523808 * series
    series = 1.0 + square * 0.05 * series
    series = size * (1.0 + square * 0.16666666666666666 * series)
    inverse = 1.0 / (1.0 + e * e)
    t = tl.where(size < 1.0, 2.0 * e * series, 1.0 - e * e) * inverse
    return tl.where(z < 0.0, -t, t), 4.0 * (e * inverse) * (e * inverse)


@triton.jit
def derivatives(z, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """The activation at z and its first three derivatives; the compiler drops those that are not used."""
    if ACTIVATION == "tanh":
        t, first = tanh(z, HALF)
        return t, first, -2.0 * t * first, first * (6.0 * t * t - 2.0)
    elif ACTIVATION == "sin":
        s, c = tl.sin(z), tl.cos(z)
        return s, c, -s, -c
    elif ACTIVATION == "silu":
        s, rest = sigmoid(z, HALF), sigmoid(-z, HALF)
        p = s * rest
        bend, third = p * (rest - s), p * (1.0 - 6.0 * p)
        return z * s, s + z * p, 2.0 * p + z * bend, 3.0 * bend + z * third
    else:
        square = z * z
        square = tl.where(square > 1e4, 1e4, square)  # far out the density is 0, and must not meet an infinity
        density = tl.exp(square * -0.5) * DENSITY_AT_ZERO
        cdf = normal_cdf(z, False)
        return z * cdf, cdf + z * density, density * (2.0 - square), density * z * (square - 4.0)
