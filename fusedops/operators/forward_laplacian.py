"""forward_laplacian(x, weights, biases): value, gradient and Laplacian of a multilayer perceptron in one forward sweep.

Rules and source are in `fusedops.operators.forward_laplacian_activation`. A product is of all D + 2 channels of all
points with one weight.

What a training step costs at least, with N points, D coordinates and L hidden layers of width W: products of
6 (L - 1) (D + 2) N W^2 operations, and stacks of channels of (D + 2) N W numbers, of which each hidden layer but the
first has one that is written once and read twice, and its gradient likewise. For 3-128-128-128-1 at 64^3 points in
float32: 258 GFLOP, 5.2 ms at 50 TFLOP/s of float32 products, and 671 MB a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fusedops.operators.forward_laplacian_activation import check_like, check_spatial
from fusedops.operators.forward_laplacian_linear import (
    MOST_COORDINATES,
    forward_laplacian_input_linear_operator,
    forward_laplacian_linear_operator,
    input_channels,
)
from fusedops.operators.forward_laplacian_output import MOST_UNITS, forward_laplacian_output_operator
from fusedops.operators.pointwise import check_floating
from fusedops.operators.smooth_activations import check_activation, derivatives


class Jet(NamedTuple):
    """A function at N points: value [N], gradient with respect to all D coordinates [N, D], Laplacian [N]."""

    value: Tensor
    gradient: Tensor
    laplacian: Tensor


def forward_laplacian(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str, spatial: int | None = None
) -> Jet:
    """u(x), its gradient and its Laplacian, u a multilayer perceptron of one output: exact, in one forward sweep.

    x: (N, D), any strides. weights: two or more, each (outputs, inputs) as nn.Linear has it, the first of D inputs, the
    last of one output. biases: one for each weight, (outputs,) or None. One dtype, float16, bfloat16, float32 or
    float64, and one device. activation: "tanh", "sin", "silu" or "gelu" (the exact one), between the layers. spatial:
    how many coordinates, the first ones, take part in the Laplacian; all unless given.
    Returns a Jet: value (N,), gradient (N, D), Laplacian (N,). Differentiable with respect to parameters and points,
    any order. float32 products are rounded to TF32 only where `torch.backends.cuda.matmul` allows it; elsewhere a GPU
    computes those with a weight as three of TF32, whose error is that of float32 for numbers from 1e-34 in size on.
    Raises TypeError for another or a mixed dtype, ValueError for shapes, devices, an activation or a number of spatial
    coordinates other than these.
    """
    spatial = _check(x, weights, biases, activation, spatial)
    # What follows a layer adds its bias, to the value alone.
    if x.shape[1] <= MOST_COORDINATES:
        z = forward_laplacian_input_linear_operator(x, weights[0], biases[0], weights[1], activation, spatial)
    else:
        z = input_channels(x, weights[0])
        z = forward_laplacian_linear_operator(z, biases[0], weights[1], activation, spatial)
    if len(weights) == 2:
        return _jet(z.squeeze(-1), biases[-1])
    for weight, bias in zip(weights[2:-1], biases[1:-2], strict=True):
        z = forward_laplacian_linear_operator(z, bias, weight, activation, spatial)
    if z.shape[2] <= MOST_UNITS:
        out = forward_laplacian_output_operator(z, biases[-2], weights[-1][0], activation, spatial)
    else:
        out = forward_laplacian_linear_operator(z, biases[-2], weights[-1], activation, spatial).squeeze(-1)
    return _jet(out, biases[-1])


def forward_laplacian_stock(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str, spatial: int | None = None
) -> Jet:
    """The same in stock PyTorch, so written that torch.compile fuses all between two products.

    Value (N, W), derivatives (D, N, W) and Laplacian (N, W) of a layer stay apart: put together for one product, they
    would be written once more, and kept for the backward pass beside what they were made of.
    """
    spatial = _check(x, weights, biases, activation, spatial)
    firsts = weights[0].t().unsqueeze(1)  # the same at all points, where the Laplacian is 0
    f, f1, f2 = derivatives(activation, F.linear(x, weights[0], biases[0]), 3)
    value, laplacian, firsts = f, f2 * firsts[:spatial].square().sum(0), f1 * firsts
    for weight, bias in zip(weights[1:-1], biases[1:-1], strict=True):
        value, firsts, laplacian = F.linear(value, weight, bias), firsts @ weight.t(), laplacian @ weight.t()
        f, f1, f2 = derivatives(activation, value, 3)
        laplacian = f2 * firsts[:spatial].square().sum(0) + f1 * laplacian
        value, firsts = f, f1 * firsts
    last = weights[-1][0]  # a vector, whose product with a matrix is fused, too
    value = value @ last
    return Jet(value if biases[-1] is None else value + biases[-1], (firsts @ last).t(), laplacian @ last)


def _jet(out: Tensor, bias: Tensor | None) -> Jet:
    """out: (D + 2, N)."""
    value = out[0] if bias is None else out[0] + bias
    return Jet(value, out[1:-1].t(), out[-1])


def _check(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str, spatial: int | None
) -> int:
    operator = "forward_laplacian"
    check_floating(operator, x=x)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}; it must be (N, D), D at least 1")
    if len(weights) < 2 or len(biases) != len(weights):
        raise ValueError(
            f"{operator}: {len(weights)} weights and {len(biases)} biases; allowed: two or more, one bias a weight"
        )
    inputs = x.shape[1]
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        outputs = 1 if k == len(weights) - 1 else weight.shape[0]
        check_like(operator, f"weights[{k}]", weight, (outputs, inputs), "x", x)
        check_like(operator, f"biases[{k}]", bias, (outputs,), "x", x)
        inputs = outputs
    check_activation(operator, activation)
    spatial = x.shape[1] if spatial is None else spatial
    check_spatial(operator, spatial, x.shape[1])
    return spatial
