"""Triton kernels of silu and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.pointwise import exp, flat_offsets, launch_flat, load_computing, sigmoid
from fusedops.operators.pointwise import in_layout_of


@triton.jit
def silu_kernel(x_pointer, y_pointer, elements, BLOCK: tl.constexpr):
    offsets, mask = flat_offsets(elements, BLOCK)
    x = load_computing(x_pointer, offsets, mask)
    tl.store(y_pointer + offsets, x / (1.0 + exp(-x, x_pointer.dtype.element_ty.primitive_bitwidth == 16)), mask=mask)


@triton.jit
def silu_backward_kernel(grad_pointer, x_pointer, y_pointer, elements, BLOCK: tl.constexpr):
    offsets, mask = flat_offsets(elements, BLOCK)
    grad = load_computing(grad_pointer, offsets, mask)
    x = load_computing(x_pointer, offsets, mask)
    s = sigmoid(x, x_pointer.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(y_pointer + offsets, grad * s * (1.0 + x * (1.0 - s)), mask=mask)


def silu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch_flat(silu_kernel, in_layout_of(x, y), y)
    return y


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch_flat(silu_backward_kernel, in_layout_of(grad, y), in_layout_of(x, y), y)
    return y
