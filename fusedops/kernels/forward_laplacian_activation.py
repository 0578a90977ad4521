"""Triton kernels of forward_laplacian_activation and its gradient: all channels of a unit in one program's hands."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.launching import ceil_div, launch
from fusedops.kernels.pointwise import load_computing
from fusedops.kernels.smooth_activations import derivatives

BLOCK = 512  # units a program
NUM_WARPS = 4
MOST_UNROLLED = 8  # coordinates whose loop is unrolled, so that all their loads are on their way at once


@triton.jit
def units_of(units, columns, BLOCK: tl.constexpr):
    """This program's units, 64-bit, which of them exist, and their columns."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    return first + lanes, first + lanes < units, ((first % columns).to(tl.int32) + lanes) % columns


@triton.jit
def value_of(z_pointer, bias_pointer, offsets, column, mask, HAS_BIAS: tl.constexpr):
    value = load_computing(z_pointer, offsets, mask)
    if HAS_BIAS:
        value += load_computing(bias_pointer, column, mask)
    return value


@triton.jit
def first_derivative(z_pointer, a_pointer, offsets, mask, f1, curvature, i, SPATIAL: tl.constexpr):
    z = load_computing(z_pointer, offsets, mask)
    tl.store(a_pointer + offsets, f1 * z, mask=mask)
    if i < SPATIAL:
        curvature += z * z
    return curvature


@triton.jit
def activation_kernel(
    z_pointer,
    bias_pointer,
    a_pointer,
    units,
    columns,
    D: tl.constexpr,
    SPATIAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask, column = units_of(units, columns, BLOCK)
    stride = tl.full((), 1, tl.int64) * units
    value = value_of(z_pointer, bias_pointer, offsets, column, mask, HAS_BIAS)
    f, f1, f2, _ = derivatives(value, ACTIVATION, z_pointer.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(a_pointer + offsets, f, mask=mask)
    curvature = tl.zeros_like(value)
    if UNROLL:
        for i in tl.static_range(D):
            offsets += stride
            curvature = first_derivative(z_pointer, a_pointer, offsets, mask, f1, curvature, i, SPATIAL)
    else:
        for i in range(D):
            offsets += stride
            curvature = first_derivative(z_pointer, a_pointer, offsets, mask, f1, curvature, i, SPATIAL)
    offsets += stride
    laplacian = load_computing(z_pointer, offsets, mask)
    tl.store(a_pointer + offsets, f2 * curvature + f1 * laplacian, mask=mask)


@triton.jit
def first_derivative_backward(
    grad_pointer, z_pointer, gz_pointer, offsets, mask, f1, bend, curvature, along, i, SPATIAL: tl.constexpr
):
    """bend: 2 f'' times the gradient of the Laplacian. along: the sum of gradient times z over the coordinates."""
    z = load_computing(z_pointer, offsets, mask)
    grad = load_computing(grad_pointer, offsets, mask)
    gz = f1 * grad
    if i < SPATIAL:
        gz += bend * z
        curvature += z * z
    tl.store(gz_pointer + offsets, gz, mask=mask)
    return curvature, along + grad * z


@triton.jit
def activation_backward_kernel(
    grad_pointer,
    z_pointer,
    bias_pointer,
    gz_pointer,
    units,
    columns,
    D: tl.constexpr,
    SPATIAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, mask, column = units_of(units, columns, BLOCK)
    stride = tl.full((), 1, tl.int64) * units
    last = first + stride * (D + 1)
    value = value_of(z_pointer, bias_pointer, first, column, mask, HAS_BIAS)
    grad_value = load_computing(grad_pointer, first, mask)
    laplacian = load_computing(z_pointer, last, mask)
    grad_laplacian = load_computing(grad_pointer, last, mask)
    _, f1, f2, f3 = derivatives(value, ACTIVATION, z_pointer.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(gz_pointer + last, f1 * grad_laplacian, mask=mask)
    bend = 2.0 * f2 * grad_laplacian
    curvature = tl.zeros_like(value)
    along = grad_laplacian * laplacian
    offsets = first
    if UNROLL:
        for i in tl.static_range(D):
            offsets += stride
            curvature, along = first_derivative_backward(
                grad_pointer, z_pointer, gz_pointer, offsets, mask, f1, bend, curvature, along, i, SPATIAL
            )
    else:
        for i in range(D):
            offsets += stride
            curvature, along = first_derivative_backward(
                grad_pointer, z_pointer, gz_pointer, offsets, mask, f1, bend, curvature, along, i, SPATIAL
            )
    gz = f1 * grad_value + f2 * along + f3 * curvature * grad_laplacian
    tl.store(gz_pointer + first, gz, mask=mask)


def _launch(kernel, tensors, z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> None:
    coordinates, columns = z.shape[0] - 2, z.shape[-1]
    units = z.numel() // z.shape[0]
    if units:
        launch(
            kernel,
            ceil_div(units, BLOCK),
            tensors,
            (units, columns),
            NUM_WARPS,
            D=coordinates,
            SPATIAL=spatial,
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            UNROLL=coordinates <= MOST_UNROLLED,
            BLOCK=BLOCK,
        )


def forward_laplacian_activation(z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    z, bias = z.contiguous(), None if bias is None else bias.contiguous()
    a = z.new_empty(z.shape)
    _launch(activation_kernel, (z, bias, a), z, bias, activation, spatial)
    return a


def forward_laplacian_activation_backward(
    grad: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int
) -> Tensor:
    gz = z.new_empty(z.shape)
    _backward(grad.contiguous(), z, bias, gz, activation, spatial)
    return gz


def forward_laplacian_activation_backward_(
    grad: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int
) -> Tensor:
    """The same in place of grad, which is contiguous: a unit's channels are read before they are written."""
    _backward(grad, z, bias, grad, activation, spatial)
    return grad


def _backward(grad: Tensor, z: Tensor, bias: Tensor | None, gz: Tensor, activation: str, spatial: int) -> None:
    z, bias = z.contiguous(), None if bias is None else bias.contiguous()
    _launch(activation_backward_kernel, (grad, z, bias, gz), z, bias, activation, spatial)
