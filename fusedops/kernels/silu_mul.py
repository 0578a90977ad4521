"""Triton kernels of silu_mul and its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.pointwise import exp, flat_offsets, launch_flat, load_computing, sigmoid
from fusedops.operators.pointwise import in_layout_of


@triton.jit
def silu_mul_kernel(gate_pointer, up_pointer, y_pointer, elements, BLOCK: tl.constexpr):
    offsets, mask = flat_offsets(elements, BLOCK)
    gate = load_computing(gate_pointer, offsets, mask)
    up = load_computing(up_pointer, offsets, mask)
    y = gate / (1.0 + exp(-gate, gate_pointer.dtype.element_ty.primitive_bitwidth == 16)) * up
    tl.store(y_pointer + offsets, y, mask=mask)


@triton.jit
def silu_mul_backward_kernel(
    grad_pointer, gate_pointer, up_pointer, dgate_pointer, dup_pointer, elements, BLOCK: tl.constexpr
):
    offsets, mask = flat_offsets(elements, BLOCK)
    grad = load_computing(grad_pointer, offsets, mask)
    gate = load_computing(gate_pointer, offsets, mask)
    up = load_computing(up_pointer, offsets, mask)
    s = sigmoid(gate, gate_pointer.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(dgate_pointer + offsets, grad * up * s * (1.0 + gate * (1.0 - s)), mask=mask)
    tl.store(dup_pointer + offsets, grad * gate * s, mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    launch_flat(silu_mul_kernel, in_layout_of(gate, y), in_layout_of(up, y), y)
    return y


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    launch_flat(silu_mul_backward_kernel, *(in_layout_of(t, dgate) for t in (grad, gate, up)), dgate, dup)
    return dgate, dup
