"""The two roads of linear_gelu_dropout on a GPU: one kernel, or cuBLAS's product and one pointwise kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.kernels import gelu_dropout as pointwise
from fusedops.kernels.linear_gelu import linear_gelu
from fusedops.operators.linear_gelu_dropout import one_kernel


def linear_gelu_dropout(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    z = x.new_empty(y.shape if save_z else (0,))
    if y.numel() == 0:
        return y, z
    matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if one_kernel(x, weight, bias, p, approximate, seed, save_z):
        linear_gelu(matrix, weight, bias, y.view(-1, y.shape[-1]), approximate)
        return y, z
    product = z if save_z else y  # GELU and dropout may overwrite a product that nobody asked for
    if bias is None:
        torch.mm(matrix, weight.t(), out=product.view(-1, y.shape[-1]))
    else:
        torch.addmm(bias, matrix, weight.t(), out=product.view(-1, y.shape[-1]))
    pointwise.gelu_dropout(product, y, p, approximate, seed)
    return y, z


def gelu_dropout_backward(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> Tensor:
    return pointwise.gelu_dropout_backward(grad, z, p, approximate, seed)
