"""forward_laplacian_linear, forward_laplacian_input_linear and their gradients on a GPU: the activation's kernels, and
products of all channels at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.kernels.forward_laplacian_activation import (
    forward_laplacian_activation,
    forward_laplacian_activation_backward_,
)
from fusedops.kernels.forward_laplacian_layers import forward_laplacian_input, forward_laplacian_input_backward
from fusedops.kernels.products import product
from fusedops.operators.forward_laplacian_linear import triton_products


def _through(a: Tensor, weight: Tensor) -> Tensor:
    """The channels a (C, N, W) times weight^T, (C, N, V)."""
    rows = a.flatten(0, 1)
    if a.numel() and weight.numel() and triton_products(weight):
        y = product(rows, weight.contiguous())
    else:
        y = rows @ weight.t()
    return y.view(*a.shape[:2], weight.shape[0])


def _weight_gradient(grad: Tensor, a: Tensor) -> Tensor:
    """By cuBLAS: of sums this long its float32 products are faster than three of TF32."""
    return grad.flatten(0, 1).t() @ a.flatten(0, 1)


STRIPES = 512
"""Sums of points that are kept apart at first."""


def _sum_over_points(gradient: Tensor) -> Tensor:
    """The sum of a gradient (N, W) over the points, (W,).

    In two steps, each of many results: PyTorch splits a sum of few results among blocks, for which it takes memory of
    the size of what is summed.
    """
    striped = len(gradient) // STRIPES * STRIPES
    stripes, rest = gradient[:striped].unflatten(0, (striped // STRIPES, STRIPES)), gradient[striped:]
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return (stripes.sum(0, dtype=dtype).sum(0) + rest.sum(0, dtype=dtype)).to(gradient.dtype)


def forward_laplacian_linear(z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> Tensor:
    return _through(forward_laplacian_activation(z, bias, activation, spatial), weight)


def forward_laplacian_linear_backward(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    # The activation is freed before its gradient is there, which becomes that of z in place.
    dweight = _weight_gradient(grad, forward_laplacian_activation(z, bias, activation, spatial))
    gz = forward_laplacian_activation_backward_(_through(grad, weight.t()), z, bias, activation, spatial)
    return gz, _sum_over_points(gz[0]), dweight


def forward_laplacian_input_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> Tensor:
    return _through(forward_laplacian_input(x, weight, bias, activation, spatial), next_weight)


def forward_laplacian_input_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    dnext = _weight_gradient(grad, forward_laplacian_input(x, weight, bias, activation, spatial))
    da = _through(grad, next_weight.t())
    dweight, dbias = forward_laplacian_input_backward(da, x, weight, bias, activation, spatial)
    return dweight, dbias, dnext
