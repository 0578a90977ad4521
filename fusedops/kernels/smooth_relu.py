"""Triton kernels of smooth_relu and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.pointwise import flat_offsets, launch_flat, load_computing, scalar
from fusedops.operators.pointwise import in_layout_of


@triton.jit
def smooth_relu_kernel(x_pointer, y_pointer, alpha: tl.float64, elements, BLOCK: tl.constexpr):
    offsets, mask = flat_offsets(elements, BLOCK)
    x = load_computing(x_pointer, offsets, mask)
    tl.store(y_pointer + offsets, tl.where(x > 0, x, scalar(alpha, x.dtype) * x), mask=mask)


@triton.jit
def smooth_relu_backward_kernel(grad_pointer, x_pointer, y_pointer, alpha: tl.float64, elements, BLOCK: tl.constexpr):
    offsets, mask = flat_offsets(elements, BLOCK)
    grad = load_computing(grad_pointer, offsets, mask)
    x = load_computing(x_pointer, offsets, mask)
    tl.store(y_pointer + offsets, tl.where(x > 0, grad, scalar(alpha, grad.dtype) * grad), mask=mask)


def smooth_relu(x: Tensor, alpha: float) -> Tensor:
    y = torch.empty_like(x)
    launch_flat(smooth_relu_kernel, in_layout_of(x, y), y, numbers=(alpha,))
    return y


def smooth_relu_backward(grad: Tensor, x: Tensor, alpha: float) -> Tensor:
    y = torch.empty_like(x)
    launch_flat(smooth_relu_backward_kernel, in_layout_of(grad, y), in_layout_of(x, y), y, numbers=(alpha,))
    return y
