"""The first and the last layer of a forward Laplacian, which are thin: their products are part of the activation's
pass.

forward_laplacian_input: the first layer's channels before its activation are known from its weights, z_i a column of
them and z_L zero, so that only points are read. forward_laplacian_output: the last layer has one output, so that only
D + 2 numbers a point are written, and no activation. Neither pass is over more memory than one stack of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.operators.forward_laplacian_activation import (
    activation_backward_stock,
    activation_stock,
    activation_tangent,
    check_channels,
    check_like,
    check_spatial,
    computed,
    forward_laplacian_activation,
    forward_laplacian_activation_backward_operator,
)
from fusedops.operators.smooth_activations import ACTIVATIONS, check_activation
from fusedops.registration import FLOATING, Cost, Kernel, Operator, Sample, looped_vmap, register

MOST_COORDINATES = 16
"""Coordinates up to which forward_laplacian_input is defined: their gradients' sums are kept in registers."""
MOST_UNITS = 1024
"""Units up to which forward_laplacian_output is defined: a point's are in one program's hands."""


def input_channels(x: Tensor, weight: Tensor) -> Tensor:
    """The first layer's channels (D + 2, N, W) of x (N, D) and weight (W, D), without bias, in stock PyTorch."""
    value = F.linear(x, weight)
    firsts = weight.t().unsqueeze(1).expand(-1, x.shape[0], -1).to(value.dtype)
    return torch.cat([value.unsqueeze(0), firsts, torch.zeros_like(value).unsqueeze(0)])


# ---------------------------------------------------------------------------------------------------------------------
# forward_laplacian_input


def check_input(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int) -> None:
    """Raise TypeError or ValueError unless x are points (N, D) and the rest goes with them."""
    if x.dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"{operator}: x is {x.dtype}; allowed: {allowed}")
    if x.dim() != 2 or not 1 <= x.shape[1] <= MOST_COORDINATES:
        raise ValueError(
            f"{operator}: x has shape {tuple(x.shape)}; it must be (N, D) with D from 1 to {MOST_COORDINATES}"
        )
    check_like(operator, "weight", weight, (*weight.shape[:1], x.shape[1]), "x", x)
    check_like(operator, "bias", bias, tuple(weight.shape[:1]), "weight", weight)
    check_activation(operator, activation)
    check_spatial(operator, spatial, x.shape[1])


def _input_backward_check(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> None:
    operator = "forward_laplacian_input_backward"
    check_input(operator, x, weight, *rest)
    check_like(operator, "grad", grad, (x.shape[1] + 2, x.shape[0], weight.shape[0]), "x", x)


def input_gradients(gz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, from that of the channels."""
    return gz[0].t() @ x + gz[1:-1].sum(1).t(), gz[0].sum(0)


def _input_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int
) -> tuple[Tensor, Tensor]:
    gz = activation_backward_stock(grad, input_channels(x, weight), bias, activation, spatial)
    return input_gradients(gz, x)


def _input_backward_cpu(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int
) -> tuple[Tensor, Tensor]:
    gradients = computed(_input_backward_reference, grad, x, weight, bias, activation, spatial)
    dweight, dbias = (gradient.to(x.dtype) for gradient in gradients)
    return dweight.contiguous(), dbias


def _input_samples(device: torch.device, dtype: torch.dtype, backward: bool) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(name: str, x: Tensor, weight: Tensor, activation: str, spatial: int, bias: bool = True) -> Sample:
        args = (x, weight, randn(weight.shape[0]) if bias else None, activation, spatial)
        grad = [randn(x.shape[1] + 2, x.shape[0], weight.shape[0])] if backward else []
        return Sample(f"{name}, {activation}", (*grad, *args))

    for activation in ACTIVATIONS:
        yield sample("three coordinates", randn(4, 3), randn(7, 3), activation, 3)
        yield sample("time", randn(3, 4), randn(5, 4), activation, 3, bias=False)
    yield sample("one coordinate", randn(37, 1), randn(3, 1), "tanh", 1)
    yield sample("two of nine coordinates", randn(5, 9), randn(11, 9), "sin", 2)
    yield sample("past one block", randn(33, 3), randn(333, 3), "silu", 3)
    yield sample("transposed", randn(3, 9).t(), randn(3, 7).t(), "gelu", 2)
    yield sample("expanded", randn(1, 3).expand(5, 3), randn(7, 1).expand(7, 3), "sin", 3)
    yield sample("no points", randn(0, 3), randn(7, 3), "tanh", 3)
    yield sample("no units", randn(5, 3), randn(0, 3), "tanh", 3)


def _input_cost(x: Tensor, weight: Tensor, flops: int) -> Cost:
    (points, coordinates), units = x.shape, weight.shape[0]
    return Cost(
        flops=points * units * (20 + flops * coordinates),
        bytes=((coordinates + 2) * points * units + x.numel() + weight.numel() + units) * x.itemsize,
    )


forward_laplacian_input_backward_operator: Operator = register(
    schema=(
        "forward_laplacian_input_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, str activation, "
        "int spatial) -> (Tensor, Tensor)"
    ),
    check=_input_backward_check,
    shape=lambda grad, x, weight, bias, activation, spatial: (
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[:1]),
    ),
    cpu=_input_backward_cpu,
    kernel=Kernel("forward_laplacian_layers", "forward_laplacian_input_backward"),
    reference=_input_backward_reference,
    samples=lambda device, dtype: _input_samples(device, dtype, True),
    cost=lambda grad, x, weight, bias, activation, spatial: _input_cost(x, weight, 15),
    stock="the gradient of the forward Laplacian's first layer",
    vmap=looped_vmap,
    autocast="promote",
    exempt={"autocast": "autocast rounds one part of the reference's sum, a product, and leaves the other"},
)


def _input_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    return computed(_input_reference, x, weight, bias, activation, spatial).to(x.dtype)


def _input_reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    return activation_stock(input_channels(x, weight), bias, activation, spatial)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.spatial = inputs
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _input_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    if (
        torch.is_grad_enabled() or ctx.needs[0]
    ):  # a derivative of this one may follow, and takes operators that have one
        z = input_channels(x, weight)
        gz = forward_laplacian_activation_backward_operator(grad, z, bias, ctx.activation, ctx.spatial)
        dx = gz[0] @ weight
        dweight, dbias = input_gradients(gz, x)
    else:
        dx = None
        dweight, dbias = forward_laplacian_input_backward_operator(grad, x, weight, bias, ctx.activation, ctx.spatial)
    return dx, dweight, None if bias is None else dbias, None, None


def input_tangent(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None) -> Tensor:
    """The change of the first layer's channels where points, weight and bias change; ctx saved these three first."""
    x, weight, bias = ctx.saved_tensors[:3]
    x_t = torch.zeros_like(x) if x_t is None else x_t
    weight_t = torch.zeros_like(weight) if weight_t is None else weight_t
    value = F.linear(x_t, weight, bias_t) + F.linear(x, weight_t)
    u, z = torch.cat([value.unsqueeze(0), input_channels(x, weight_t)[1:]]), input_channels(x, weight)
    return computed(activation_tangent, u, z, bias, ctx.activation, ctx.spatial).to(x.dtype)


forward_laplacian_input_operator = register(
    schema=("forward_laplacian_input(Tensor x, Tensor weight, Tensor? bias, str activation, int spatial) -> Tensor"),
    check=lambda *args: check_input("forward_laplacian_input", *args),
    shape=lambda x, weight, bias, activation, spatial: x.new_empty((x.shape[1] + 2, x.shape[0], weight.shape[0])),
    cpu=_input_cpu,
    kernel=Kernel("forward_laplacian_layers", "forward_laplacian_input"),
    reference=_input_reference,
    samples=lambda device, dtype: _input_samples(device, dtype, False),
    cost=lambda x, weight, bias, activation, spatial: _input_cost(x, weight, 7),
    stock="the forward Laplacian's formulas after a linear layer of the coordinates",
    setup=_setup,
    backward=_input_backward,
    jvp=lambda ctx, *tangents: input_tangent(ctx, *tangents[:3]),
    vmap=looped_vmap,
    autocast="cast",
)


# ---------------------------------------------------------------------------------------------------------------------
# forward_laplacian_output


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
    reference=_output_backward_reference,
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
    if torch.is_grad_enabled():  # as above
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
    u = torch.zeros_like(z) if z_t is None else z_t
    if bias_t is not None:
        u = torch.cat([(u[0] + bias_t).unsqueeze(0), u[1:]])
    a_t = computed(activation_tangent, u, z, bias, ctx.activation, ctx.spatial).to(z.dtype)
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
    setup=_setup,
    backward=_output_backward,
    jvp=_output_jvp,
    vmap=looped_vmap,
    autocast="cast",
)
