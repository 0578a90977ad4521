"""forward_laplacian_output(z, weight): the last activation of a forward Laplacian and a linear layer of one output.

Of every channel one number a point is written: the pass is over one stack of channels instead of three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.operators.forward_laplacian_activation import (
    activation_backward_stock,
    activation_stock,
    activation_tangent,
    check_channels,
    check_like,
    computed,
    forward_laplacian_activation,
    forward_laplacian_activation_backward_operator,
    promoted,
    setup,
    with_bias,
)
from fusedops.operators.smooth_activations import ACTIVATIONS
from fusedops.registration import Cost, Kernel, Operator, Sample, looped_vmap, register

MOST_UNITS = 1024
"""Units up to which it is defined: a point's are in one program's hands."""


def _output_check_as(
    operator: str, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> None:
    check_channels(operator, z, bias, activation, spatial)
    if z.dim() != 3 or z.shape[2] > MOST_UNITS:
        raise ValueError(
            f"{operator}: z has shape {tuple(z.shape)}; it must be (D + 2, N, W) with W up to {MOST_UNITS}"
        )
    check_like(operator, "weight", weight, (z.shape[2],), "z", z)


def _output_backward_check(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> None:
    operator = "forward_laplacian_output_backward"
    _output_check_as(operator, z, bias, weight, activation, spatial)
    check_like(operator, "grad", grad, tuple(z.shape[:2]), "z", z)


def _output_backward_reference(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    gz = activation_backward_stock(grad.unsqueeze(-1), z, bias, activation, spatial) * weight
    a = activation_stock(z, bias, activation, spatial)
    return gz, gz[0].sum(0), (grad.unsqueeze(-1) * a).sum((0, 1))


def _output_backward_cpu(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = computed(_output_backward_reference, grad, z, bias, weight, activation, spatial)
    gz, dbias, dweight = (gradient.to(z.dtype) for gradient in gradients)
    return gz, dbias, dweight


def _output_samples(device: torch.device, dtype: torch.dtype, backward: bool) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(name: str, z: Tensor, activation: str, spatial: int, bias: bool = True) -> Sample:
        grad = [randn(*z.shape[:2])] if backward else []
        bias_ = randn(z.shape[2]) if bias else None
        return Sample(f"{name}, {activation}", (*grad, z, bias_, randn(z.shape[2]), activation, spatial))

    for activation in ACTIVATIONS:
        yield sample("three coordinates", randn(5, 4, 7), activation, 3)
        yield sample("time", randn(6, 3, 5), activation, 3, bias=False)
    yield sample("one coordinate", randn(3, 37, 3), "tanh", 1)
    yield sample("two of nine coordinates", randn(11, 5, 7), "sin", 2)
    yield sample("past one block", randn(5, 33, 333), "silu", 3)
    yield sample("transposed", randn(7, 9, 5).permute(2, 1, 0), "gelu", 2)
    yield sample("expanded", randn(5, 1, 7).expand(5, 4, 7), "sin", 3)
    yield sample("no points", randn(5, 0, 7), "tanh", 3)
    yield sample("no units", randn(5, 3, 0), "tanh", 3)


def _output_cost(stacks: int, z: Tensor, flops: int) -> Cost:
    channels, points, units = z.shape
    return Cost(
        flops=points * units * (20 + flops * (channels - 2)),
        bytes=(stacks * z.numel() + channels * points + 2 * units) * z.itemsize,
    )


forward_laplacian_output_backward_operator: Operator = register(
    schema=(
        "forward_laplacian_output_backward(Tensor grad, Tensor z, Tensor? bias, Tensor weight, str activation, "
        "int spatial) -> (Tensor, Tensor, Tensor)"
    ),
    check=_output_backward_check,
    shape=lambda grad, z, bias, weight, activation, spatial: (
        z.new_empty(z.shape),
        z.new_empty(z.shape[2:]),
        z.new_empty(z.shape[2:]),
    ),
    cpu=_output_backward_cpu,
    kernel=Kernel("forward_laplacian_layers", "forward_laplacian_output_backward"),
    reference=promoted(_output_backward_reference),
    samples=lambda device, dtype: _output_samples(device, dtype, True),
    cost=lambda grad, z, bias, weight, activation, spatial: _output_cost(2, z, 18),
    stock="the gradient of the forward Laplacian's last layer",
    vmap=looped_vmap,
    autocast="promote",
)


def _output_reference(z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> Tensor:
    return activation_stock(z, bias, activation, spatial) @ weight


def _output_cpu(z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> Tensor:
    return computed(_output_reference, z, bias, weight, activation, spatial).to(z.dtype)


def _output_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    z, bias, weight = ctx.saved_tensors
    if torch.is_grad_enabled():  # a derivative may follow, and takes operators that have one
        gz = forward_laplacian_activation_backward_operator(
            grad.unsqueeze(-1) * weight, z, bias, ctx.activation, ctx.spatial
        )
        a = forward_laplacian_activation(z, bias, ctx.activation, ctx.spatial)
        dbias, dweight = gz[0].sum(0), torch.einsum("cn,cnw->w", grad, a)
    else:
        gz, dbias, dweight = forward_laplacian_output_backward_operator(
            grad, z, bias, weight, ctx.activation, ctx.spatial
        )
    return gz, None if bias is None else dbias, dweight, None, None


def _output_jvp(ctx: Any, z_t: Tensor | None, bias_t: Tensor | None, weight_t: Tensor | None, *_: None) -> Tensor:
    z, bias, weight = ctx.saved_tensors
    a = forward_laplacian_activation(z, bias, ctx.activation, ctx.spatial)
    a_t = computed(activation_tangent, with_bias(z_t, bias_t, z), z, bias, ctx.activation, ctx.spatial).to(z.dtype)
    return a_t @ weight if weight_t is None else a_t @ weight + a @ weight_t


forward_laplacian_output_operator = register(
    schema=("forward_laplacian_output(Tensor z, Tensor? bias, Tensor weight, str activation, int spatial) -> Tensor"),
    check=lambda *args: _output_check_as("forward_laplacian_output", *args),
    shape=lambda z, bias, weight, activation, spatial: z.new_empty(z.shape[:2]),
    cpu=_output_cpu,
    kernel=Kernel("forward_laplacian_layers", "forward_laplacian_output"),
    reference=_output_reference,
    samples=lambda device, dtype: _output_samples(device, dtype, False),
    cost=lambda z, bias, weight, activation, spatial: _output_cost(1, z, 6),
    stock="the forward Laplacian's formulas before a linear layer of one output",
    setup=setup,
    backward=_output_backward,
    jvp=_output_jvp,
    vmap=looped_vmap,
    autocast="cast",
)
