"""Triton kernels of a forward Laplacian's first and last layer and their gradients.

A program has tiles of points by units in its hands, and all channels of them; the gradients' programs go over many
tiles and leave one partial sum each, so that sums over points come out the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.launching import ceil_div, launch, next_power_of_2
from fusedops.kernels.pointwise import load_computing
from fusedops.kernels.smooth_activations import derivatives
from fusedops.operators.forward_laplacian_output import MOST_UNITS

TILE = 1024  # points times units
NUM_WARPS = 4
PROGRAMS = 1024  # of a gradient: several a multiprocessor on every GPU

# The first layer's gradient sums each tile over its rows: with all of them in one warp a sum stays inside a thread.
ROWS_INPUT_BACKWARD = 2
COLUMNS_INPUT_BACKWARD = 128
WARPS_INPUT_BACKWARD = 1
PROGRAMS_INPUT_BACKWARD = 2112


@triton.jit
def tile_of(tile, points, units, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a tile, which of its elements exist, and their offsets in a channel, 64-bit."""
    blocks = tl.cdiv(units, COLUMNS)
    rows = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tile % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < points)[:, None] & (columns < units)[None, :]
    return rows, columns, mask, rows[:, None] * units + columns[None, :]


@triton.jit
def affine(
    x_pointer, weight_pointer, bias_pointer, rows, columns, points, units,
    D: tl.constexpr, SPATIAL: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    COMPUTING: tl.constexpr,
):  # fmt: skip
    """The first layer's value and, for each unit, the sum of its squared spatial weights."""
    value = tl.zeros((ROWS, COLUMNS), COMPUTING)
    curvature = tl.zeros((COLUMNS,), COMPUTING)
    if HAS_BIAS:
        value += load_computing(bias_pointer, columns, columns < units)[None, :]
    for i in tl.static_range(D):
        weight = load_computing(weight_pointer, columns * D + i, columns < units)
        value += load_computing(x_pointer, rows * D + i, rows < points)[:, None] * weight[None, :]
        if i < SPATIAL:
            curvature += weight * weight
    return value, curvature


@triton.jit
def input_kernel(
    x_pointer, weight_pointer, bias_pointer, a_pointer, points, units,
    D: tl.constexpr, SPATIAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, mask, offsets = tile_of(tl.program_id(0), points, units, ROWS, COLUMNS)
    stride = tl.full((), 1, tl.int64) * points * units
    value, curvature = affine(
        x_pointer, weight_pointer, bias_pointer, rows, columns, points, units,
        D, SPATIAL, HAS_BIAS, ROWS, COLUMNS, COMPUTING,
    )  # fmt: skip
    f, f1, f2, _ = derivatives(value, ACTIVATION, a_pointer.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(a_pointer + offsets, f, mask=mask)
    for i in tl.static_range(D):
        offsets += stride
        weight = load_computing(weight_pointer, columns * D + i, columns < units)
        tl.store(a_pointer + offsets, f1 * weight[None, :], mask=mask)
    tl.store(a_pointer + offsets + stride, f2 * curvature[None, :], mask=mask)


@triton.jit
def input_backward_kernel(
    grad_pointer, x_pointer, weight_pointer, bias_pointer, partial_pointer, points, units, programs,
    D: tl.constexpr, SPATIAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Partial sums (programs, D + 1, units) of the gradients of the weight, a row a coordinate, and of the bias.

    The weight is (D, units). Sums over a tile's rows are taken at once, so that tiles and one row for each sum are all
    that registers hold.
    """
    blocks = tl.cdiv(units, COLUMNS)
    program = tl.program_id(0) // blocks
    # A row of two dimensions is loaded as the tiles are, spread over threads alike; one of one dimension is not, and
    # what is computed from it would be moved in every tile.
    columns = ((tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    stride = tl.full((), 1, tl.int64) * points * units

    weights, sums = (), ()
    curvature = tl.zeros((1, COLUMNS), COMPUTING)
    for i in tl.static_range(D):
        weight = load_computing(weight_pointer + i * units, columns, columns < units)
        weights += (weight,)
        sums += (tl.zeros((1, COLUMNS), COMPUTING),)
        if i < SPATIAL:
            curvature += weight * weight
    bias = tl.zeros((1, COLUMNS), COMPUTING)
    if HAS_BIAS:
        bias += load_computing(bias_pointer, columns, columns < units)

    dbias = tl.zeros((1, COLUMNS), COMPUTING)
    bending = tl.zeros((1, COLUMNS), COMPUTING)  # the sum of f'' times the gradient of the Laplacian
    for tile in range(program, tl.cdiv(points, ROWS), programs):
        first = tl.full((), ROWS, tl.int64) * tile
        rows = tl.arange(0, ROWS)
        exists = rows < points - first
        mask = exists[:, None] & (columns < units)
        offsets = rows[:, None] * units + columns
        grad_pointers, x_pointers = grad_pointer + first * units, x_pointer + first * D
        grad_value = load_computing(grad_pointers, offsets, mask)
        grad_laplacian = load_computing(grad_pointers + stride * (D + 1), offsets, mask)
        value = tl.zeros((ROWS, COLUMNS), COMPUTING) + bias
        for i in tl.static_range(D):
            value += load_computing(x_pointers, rows * D + i, exists)[:, None] * weights[i]
        value = tl.where(mask, value, 0.0)  # outside, infinities would meet zeros, here and in gz
        _, f1, f2, f3 = derivatives(value, ACTIVATION, x_pointer.dtype.element_ty.primitive_bitwidth == 16)

        along = tl.zeros((ROWS, COLUMNS), COMPUTING)
        through = ()
        for i in tl.static_range(D):
            grad = load_computing(grad_pointers + stride * (i + 1), offsets, mask)
            along += grad * weights[i]
            through += (sums[i] + tl.sum(f1 * grad, axis=0, keep_dims=True),)
        gz = f1 * grad_value + f2 * along + f3 * curvature * grad_laplacian
        gz = tl.where(mask, gz, 0.0)
        dbias += tl.sum(gz, axis=0, keep_dims=True)
        bending += tl.sum(f2 * grad_laplacian, axis=0, keep_dims=True)
        sums = ()
        for i in tl.static_range(D):
            x = load_computing(x_pointers, rows * D + i, exists)[:, None]
            sums += (through[i] + tl.sum(gz * x, axis=0, keep_dims=True),)

    partial_pointers = partial_pointer + program.to(tl.int64) * (D + 1) * units + columns
    for i in tl.static_range(D):
        dweight = sums[i]
        if i < SPATIAL:
            dweight += 2.0 * bending * weights[i]
        tl.store(partial_pointers + i * units, dweight, mask=columns < units)
    tl.store(partial_pointers + D * units, dbias, mask=columns < units)


@triton.jit
def output_kernel(
    z_pointer, bias_pointer, weight_pointer, out_pointer, points, units,
    D: tl.constexpr, SPATIAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, mask, offsets = tile_of(tl.program_id(0), points, units, ROWS, COLUMNS)
    stride = tl.full((), 1, tl.int64) * points * units
    out_pointers = out_pointer + rows
    weight = load_computing(weight_pointer, columns, columns < units)[None, :]
    value = load_computing(z_pointer, offsets, mask)
    if HAS_BIAS:
        value += load_computing(bias_pointer, columns, columns < units)[None, :]
    f, f1, f2, _ = derivatives(value, ACTIVATION, z_pointer.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(out_pointers, tl.sum(f * weight, axis=1), mask=rows < points)
    curvature = tl.zeros_like(value)
    for i in tl.static_range(D):
        offsets += stride
        out_pointers += points
        z = load_computing(z_pointer, offsets, mask)
        tl.store(out_pointers, tl.sum(f1 * z * weight, axis=1), mask=rows < points)
        if i < SPATIAL:
            curvature += z * z
    laplacian = load_computing(z_pointer, offsets + stride, mask)
    total = tl.sum((f2 * curvature + f1 * laplacian) * weight, axis=1)
    tl.store(out_pointers + points, total, mask=rows < points)


@triton.jit
def output_backward_kernel(
    grad_pointer, z_pointer, bias_pointer, weight_pointer, gz_pointer, partial_pointer, points, units, programs,
    D: tl.constexpr, SPATIAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of z, and partial sums (programs, 2, units) of the gradients of bias and weight."""
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    stride = tl.full((), 1, tl.int64) * points * units
    weight = load_computing(weight_pointer, columns, columns < units)[None, :]
    bias = tl.zeros((1, COLUMNS), COMPUTING)
    if HAS_BIAS:
        bias += load_computing(bias_pointer, columns, columns < units)[None, :]

    dweight = tl.zeros((ROWS, COLUMNS), COMPUTING)
    dbias = tl.zeros((ROWS, COLUMNS), COMPUTING)
    for tile in range(program, tl.cdiv(points, ROWS), programs):
        rows = tl.full((), ROWS, tl.int64) * tile + tl.arange(0, ROWS)
        mask = (rows < points)[:, None] & (columns < units)[None, :]
        first = rows[:, None] * units + columns[None, :]
        last = first + stride * (D + 1)
        grad_value = load_computing(grad_pointer, rows, rows < points)[:, None]
        grad_laplacian = load_computing(grad_pointer + stride // units * (D + 1), rows, rows < points)[:, None]
        value = load_computing(z_pointer, first, mask) + bias
        laplacian = load_computing(z_pointer, last, mask)
        f, f1, f2, f3 = derivatives(value, ACTIVATION, z_pointer.dtype.element_ty.primitive_bitwidth == 16)
        tl.store(gz_pointer + last, f1 * grad_laplacian * weight, mask=mask)

        curvature = tl.zeros_like(value)
        along = grad_laplacian * laplacian  # becomes the sum of gradient times channel, but for the value
        offsets = first
        for i in tl.static_range(D):
            offsets += stride
            z = load_computing(z_pointer, offsets, mask)
            grad = load_computing(grad_pointer + stride // units * (i + 1), rows, rows < points)[:, None]
            gz = f1 * grad
            if i < SPATIAL:
                gz += 2.0 * f2 * grad_laplacian * z
                curvature += z * z
            tl.store(gz_pointer + offsets, gz * weight, mask=mask)
            along += grad * z
        gz = (f1 * grad_value + f2 * along + f3 * curvature * grad_laplacian) * weight
        tl.store(gz_pointer + first, gz, mask=mask)
        dbias += tl.where(mask, gz, 0.0)
        dweight += tl.where(mask, f * grad_value + f1 * along + f2 * curvature * grad_laplacian, 0.0)

    partial_pointer += program.to(tl.int64) * 2 * units + columns
    tl.store(partial_pointer, tl.sum(dbias, axis=0), mask=columns < units)
    tl.store(partial_pointer + units, tl.sum(dweight, axis=0), mask=columns < units)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _tile(units: int, most_columns: int) -> tuple[int, int]:
    columns = min(next_power_of_2(units), most_columns)
    return max(TILE // columns, 1), columns


def _computing(tensor: Tensor) -> tuple[torch.dtype, tl.dtype]:
    return (torch.float64, tl.float64) if tensor.dtype == torch.float64 else (torch.float32, tl.float32)


def forward_laplacian_input(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    (points, coordinates), units = x.shape, weight.shape[0]
    a = x.new_empty((coordinates + 2, points, units))
    if a.numel():
        rows, columns = _tile(units, 128)
        launch(
            input_kernel,
            ceil_div(points, rows) * ceil_div(units, columns),
            (*_contiguous(x, weight, bias), a),
            (points, units),
            NUM_WARPS,
            D=coordinates,
            SPATIAL=spatial,
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            COMPUTING=_computing(x)[1],
            ROWS=rows,
            COLUMNS=columns,
        )
    return a


def forward_laplacian_input_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int
) -> tuple[Tensor, Tensor]:
    (points, coordinates), units = x.shape, weight.shape[0]
    if not grad.numel():
        return weight.new_zeros(weight.shape), weight.new_zeros((units,))
    columns = min(next_power_of_2(units), COLUMNS_INPUT_BACKWARD)
    rows = ROWS_INPUT_BACKWARD * max(COLUMNS_INPUT_BACKWARD // columns, 1)
    rows = max(4 * rows // max(next_power_of_2(coordinates), 4), 1)  # a tile has as many derivatives as coordinates
    blocks = ceil_div(units, columns)
    programs = min(ceil_div(PROGRAMS_INPUT_BACKWARD, blocks), ceil_div(points, rows))
    dtype, computing = _computing(x)
    partial = x.new_empty((programs, coordinates + 1, units), dtype=dtype)
    launch(
        input_backward_kernel,
        programs * blocks,
        (*_contiguous(grad, x, weight.t(), bias), partial),
        (points, units, programs),
        WARPS_INPUT_BACKWARD,
        D=coordinates,
        SPATIAL=spatial,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        COMPUTING=computing,
        ROWS=rows,
        COLUMNS=columns,
    )
    total = partial.sum(0)
    dweight, dbias = weight.new_empty(weight.shape), weight.new_empty((units,))
    return dweight.copy_(total[:-1].t()), dbias.copy_(total[-1])


def forward_laplacian_output(z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> Tensor:
    channels, points, units = z.shape
    out = z.new_empty((channels, points))
    if not z.numel():
        return out.zero_()
    rows, columns = _tile(units, MOST_UNITS)
    launch(
        output_kernel,
        ceil_div(points, rows),
        (*_contiguous(z, bias, weight), out),
        (points, units),
        NUM_WARPS,
        D=channels - 2,
        SPATIAL=spatial,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
    )
    return out


def forward_laplacian_output_backward(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    channels, points, units = z.shape
    gz = z.new_empty(z.shape)
    if not z.numel():
        return gz, z.new_zeros((units,)), z.new_zeros((units,))
    rows, columns = _tile(units, MOST_UNITS)
    programs = min(PROGRAMS, ceil_div(points, rows))
    dtype, computing = _computing(z)
    partial = z.new_empty((programs, 2, units), dtype=dtype)
    launch(
        output_backward_kernel,
        programs,
        (*_contiguous(grad, z, bias, weight), gz, partial),
        (points, units, programs),
        NUM_WARPS,
        D=channels - 2,
        SPATIAL=spatial,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        COMPUTING=computing,
        ROWS=rows,
        COLUMNS=columns,
    )
    total = partial.sum(0)
    return gz, z.new_empty((units,)).copy_(total[0]), z.new_empty((units,)).copy_(total[1])
