"""Triton kernels of GELU followed by dropout, and their gradient: one pass over contiguous memory.

Dropout's bits are those of `fusedops.operators.philox`, 16 for an element, and are drawn again by the gradient.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.pointwise import flat_offsets, launch_flat, load_computing, scalar
from fusedops.operators import philox

# In an expression these follow a tensor: in the interpreter, a constexpr times a tensor is a constexpr.
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
DENSITY_AT_ZERO = tl.constexpr(1 / math.sqrt(2 * math.pi))
DENSITY_EXPONENT = tl.constexpr(-0.5 / math.log(2))
# The tanh form is z sigmoid(SLOPE z + CUBIC z^3), since (1 + tanh(u)) / 2 = sigmoid(2u).
SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
CUBIC_SLOPE = tl.constexpr(3 * 2 * math.sqrt(2 / math.pi) * 0.044715)


@triton.jit
def normal_cdf(z, HALF: tl.constexpr):
    """Phi(z). HALF: to 4e-5 of the smaller of Phi(z) and Phi(-z), in a third of erf's instructions."""
    if HALF:
        # log2 Phi(-t) for t in [0, 13], minimax, degree 9; it goes on falling past 13, to -infinity.
        t = tl.abs(z)
        h = -2.012395139416867e-09 * t + 1.4528772851463145e-07
        h = h * t - 4.617326339939609e-06
        h = h * t + 8.55300750117749e-05
        h = h * t - 0.0010343975154682994
        h = h * t + 0.008723312057554722
        h = h * t - 0.054088883101940155
        h = h * t - 0.4586362838745117
        h = h * t - 1.1510510444641113
        h = h * t - 1.000025749206543
        tail = tl.exp2(h)
        return tl.where(z > 0, 1.0 - tail, tail)
    else:
        return 0.5 * (1.0 + tl.erf(z * SQRT_HALF))


@triton.jit
def gelu(z, TANH: tl.constexpr, HALF: tl.constexpr):
    """z Phi(z), or its tanh form, with a sigmoid for its factor: 1 + tanh(u) would cancel for negative z."""
    if TANH:
        return z / (1.0 + tl.exp(-z * (z * z * CUBIC + SLOPE)))
    else:
        return z * normal_cdf(z, HALF)


@triton.jit
def gelu_derivative(z, TANH: tl.constexpr, HALF: tl.constexpr):
    if TANH:
        v = z * (z * z * CUBIC + SLOPE)
        decay = tl.exp(-tl.abs(v))
        larger = 1.0 / (1.0 + decay)  # of sigmoid(v) and 1 - sigmoid(v), neither of which is taken from 1
        smaller = decay * larger
        return tl.where(v > 0, larger, smaller) + z * (larger * smaller) * (z * z * CUBIC_SLOPE + SLOPE)
    elif HALF:
        return normal_cdf(z, HALF) + z * DENSITY_AT_ZERO * tl.exp2(z * z * DENSITY_EXPONENT)
    else:
        return normal_cdf(z, HALF) + z * DENSITY_AT_ZERO * tl.exp(z * z * -0.5)


@triton.jit
def halves(word):
    """The low and the high 16 bits of each word."""
    return tl.join((word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32))


@triton.jit
def keep(seed_pointer, threshold, BLOCK: tl.constexpr):
    """Which of this program's elements are kept. The joins put a group's eight next to each other, in one thread."""
    group = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    word0, word1, word2, word3 = tl.randint4x(tl.load(seed_pointer), group)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))  # [groups, word // 2, word % 2]
    return tl.reshape(halves(words), (BLOCK,)) >= threshold


@triton.jit(do_not_specialize=["threshold"])
def gelu_dropout_kernel(
    z_pointer,
    y_pointer,
    seed_pointer,
    threshold,
    scale: tl.float64,
    elements,
    TANH: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask = flat_offsets(elements, BLOCK)
    z = load_computing(z_pointer, offsets, mask)
    y = gelu(z, TANH, z_pointer.dtype.element_ty.primitive_bitwidth == 16)
    if DROPOUT:
        # A product, not a choice between y and 0: what is dropped stays NaN where stock PyTorch leaves it so.
        y *= tl.where(keep(seed_pointer, threshold, BLOCK), scalar(scale, z.dtype), 0.0)
    tl.store(y_pointer + offsets, y, mask=mask)


@triton.jit(do_not_specialize=["threshold"])
def gelu_dropout_backward_kernel(
    grad_pointer,
    z_pointer,
    dz_pointer,
    seed_pointer,
    threshold,
    scale: tl.float64,
    elements,
    TANH: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask = flat_offsets(elements, BLOCK)
    grad = load_computing(grad_pointer, offsets, mask)
    z = load_computing(z_pointer, offsets, mask)
    dz = grad * gelu_derivative(z, TANH, z_pointer.dtype.element_ty.primitive_bitwidth == 16)
    if DROPOUT:
        dz *= tl.where(keep(seed_pointer, threshold, BLOCK), scalar(scale, z.dtype), 0.0)
    tl.store(dz_pointer + offsets, dz, mask=mask)


def gelu_dropout(z: Tensor, y: Tensor, p: float, approximate: str, seed: Tensor | None) -> None:
    """Write dropout(gelu(z)) into y, both contiguous; y may be z itself."""
    numbers = (philox.threshold(p), philox.scale(p))
    launch_flat(gelu_dropout_kernel, z, y, seed, numbers=numbers, TANH=approximate == "tanh", DROPOUT=p > 0)


def gelu_dropout_backward(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> Tensor:
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    tensors, numbers = (grad.contiguous(), z.contiguous(), dz, seed), (philox.threshold(p), philox.scale(p))
    launch_flat(gelu_dropout_backward_kernel, *tensors, numbers=numbers, TANH=approximate == "tanh", DROPOUT=p > 0)
    return dz
