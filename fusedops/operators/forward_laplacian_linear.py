"""forward_laplacian_linear(z, weight): the activation of a forward Laplacian, then a linear layer on every channel.

forward_laplacian_input_linear(x, weight, bias, next_weight) is the same behind the first layer, whose channels are
known from points and weights. Gradients compute the activation again: neither its result nor its gradient outlives a
call, so that a network's step holds one stack of channels a layer instead of two, and none for the first.
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
    setup,
    with_bias,
)
from fusedops.operators.pointwise import check_floating
from fusedops.operators.smooth_activations import ACTIVATIONS, check_activation
from fusedops.registration import Cost, Kernel, Operator, Sample, looped_vmap, register

MOST_COORDINATES = 16
"""Coordinates up to which forward_laplacian_input_linear is defined: their gradients' sums are kept in registers."""


def triton_products(weight: Tensor) -> bool:
    """Whether a GPU multiplies channels by a weight in a Triton kernel, each float32 product as three of TF32.

    These keep float32's accuracy; cuBLAS's float32 products run outside of the tensor cores. It computes the others:
    float64, half types, float32 where `torch.backends.cuda.matmul` allows TF32, few units, which would leave a tile
    mostly empty, and the weights' gradients.
    """
    return (
        weight.dtype == torch.float32
        and min(weight.shape) >= 32
        and torch.backends.cuda.matmul.fp32_precision not in ("tf32", "bf16")
    )


def _path(*args: Any) -> str:
    weight = args[-3]
    return "triton" if triton_products(weight) else "cublas+triton"


def _check_as(operator: str, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> None:
    check_channels(operator, z, bias, activation, spatial)
    if z.dim() != 3:
        raise ValueError(f"{operator}: z has shape {tuple(z.shape)}; it must be (D + 2, N, W)")
    check_like(operator, "weight", weight, (*weight.shape[:1], z.shape[2]), "z", z)


def _samples(device: torch.device, dtype: torch.dtype, backward: bool) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(name: str, z: Tensor, weight: Tensor, activation: str, spatial: int, bias: bool = True) -> Sample:
        grad = [randn(*z.shape[:2], weight.shape[0])] if backward else []
        return Sample(
            f"{name}, {activation}",
            (*grad, z, randn(z.shape[2]) if bias else None, weight / z.shape[2] ** 0.5, activation, spatial),
        )

    for activation in ACTIVATIONS:
        yield sample("three coordinates", randn(5, 4, 7), randn(3, 7), activation, 3)
        yield sample("time", randn(6, 3, 5), randn(7, 5), activation, 3, bias=False)
    yield sample("one coordinate", randn(3, 17, 3), randn(5, 3), "tanh", 1)
    yield sample("past one block", randn(5, 33, 150), randn(65, 150), "silu", 3)
    yield sample("transposed", randn(7, 9, 5).permute(2, 1, 0), randn(7, 3).t(), "gelu", 2)
    yield sample("expanded", randn(5, 1, 7).expand(5, 4, 7), randn(1, 7).expand(3, 7), "sin", 3)
    yield sample("no points", randn(5, 0, 7), randn(3, 7), "tanh", 3)
    yield sample("no units behind", randn(5, 3, 7), randn(0, 7), "tanh", 3)


def _cost(z: Tensor, weight: Tensor, products: int, stacks: int) -> Cost:
    channels, points, units = z.shape
    rows = channels * points
    return Cost(
        flops=2 * products * rows * units * weight.shape[0],
        bytes=(stacks * z.numel() + rows * weight.shape[0] + products * weight.numel()) * z.itemsize,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The gradient


def _backward_check(grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, *rest: Any) -> None:
    operator = "forward_laplacian_linear_backward"
    _check_as(operator, z, bias, weight, *rest)
    check_like(operator, "grad", grad, (*z.shape[:2], weight.shape[0]), "z", z)


def _rows(channels: Tensor) -> Tensor:
    return channels.flatten(0, 1)


def _backward_reference(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    gz = activation_backward_stock(grad @ weight, z, bias, activation, spatial)
    a = activation_stock(z, bias, activation, spatial)
    return gz, gz[0].sum(0), _rows(grad).t() @ _rows(a)


def _backward_cpu(
    grad: Tensor, z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = computed(_backward_reference, grad, z, bias, weight, activation, spatial)
    gz, dbias, dweight = (gradient.to(z.dtype) for gradient in gradients)
    return gz, dbias, dweight.contiguous()


forward_laplacian_linear_backward_operator: Operator = register(
    schema=(
        "forward_laplacian_linear_backward(Tensor grad, Tensor z, Tensor? bias, Tensor weight, str activation, "
        "int spatial) -> (Tensor, Tensor, Tensor)"
    ),
    check=_backward_check,
    shape=lambda grad, z, bias, weight, activation, spatial: (
        z.new_empty(z.shape),
        z.new_empty(z.shape[2:]),
        weight.new_empty(weight.shape),
    ),
    cpu=_backward_cpu,
    kernel=Kernel("forward_laplacian_linear", "forward_laplacian_linear_backward", "cublas+triton"),
    reference=_backward_reference,
    samples=lambda device, dtype: _samples(device, dtype, True),
    cost=lambda grad, z, bias, weight, activation, spatial: _cost(z, weight, 2, 2),
    stock="the gradient of a forward Laplacian's hidden layer",
    vmap=looped_vmap,
    autocast="promote",
    exempt={"autocast": "autocast rounds the reference's products, and leaves what is between them"},
)


# ---------------------------------------------------------------------------------------------------------------------
# The operator


def _reference(z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> Tensor:
    return activation_stock(z, bias, activation, spatial) @ weight.t()


def _cpu(z: Tensor, bias: Tensor | None, weight: Tensor, activation: str, spatial: int) -> Tensor:
    return computed(_reference, z, bias, weight, activation, spatial).to(z.dtype).contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    z, bias, weight = ctx.saved_tensors
    if torch.is_grad_enabled():  # a derivative may follow, and takes operators that have one
        gz = forward_laplacian_activation_backward_operator(grad @ weight, z, bias, ctx.activation, ctx.spatial)
        a = forward_laplacian_activation(z, bias, ctx.activation, ctx.spatial)
        dbias, dweight = gz[0].sum(0), _rows(grad).t() @ _rows(a)
    else:
        gz, dbias, dweight = forward_laplacian_linear_backward_operator(
            grad, z, bias, weight, ctx.activation, ctx.spatial
        )
    return gz, None if bias is None else dbias, dweight, None, None


def _jvp(ctx: Any, z_t: Tensor | None, bias_t: Tensor | None, weight_t: Tensor | None, *_: None) -> Tensor:
    z, bias, weight = ctx.saved_tensors
    a = forward_laplacian_activation(z, bias, ctx.activation, ctx.spatial)
    a_t = computed(activation_tangent, with_bias(z_t, bias_t, z), z, bias, ctx.activation, ctx.spatial).to(z.dtype)
    return a_t @ weight.t() if weight_t is None else a_t @ weight.t() + a @ weight_t.t()


forward_laplacian_linear_operator = register(
    schema=("forward_laplacian_linear(Tensor z, Tensor? bias, Tensor weight, str activation, int spatial) -> Tensor"),
    check=lambda *args: _check_as("forward_laplacian_linear", *args),
    shape=lambda z, bias, weight, activation, spatial: z.new_empty((*z.shape[:2], weight.shape[0])),
    cpu=_cpu,
    kernel=Kernel("forward_laplacian_linear", "forward_laplacian_linear", _path),
    reference=_reference,
    samples=lambda device, dtype: _samples(device, dtype, False),
    cost=lambda z, bias, weight, activation, spatial: _cost(z, weight, 1, 1),
    stock="the forward Laplacian's formulas before a linear layer",
    setup=setup,
    backward=_backward,
    jvp=_jvp,
    vmap=looped_vmap,
    autocast="cast",
)


# ---------------------------------------------------------------------------------------------------------------------
# Behind the first layer


def input_channels(x: Tensor, weight: Tensor) -> Tensor:
    """The first layer's channels (D + 2, N, W) of x (N, D) and weight (W, D), without bias, in stock PyTorch."""
    value = F.linear(x, weight)
    firsts = weight.t().unsqueeze(1).expand(-1, x.shape[0], -1).to(value.dtype)
    return torch.cat([value.unsqueeze(0), firsts, torch.zeros_like(value).unsqueeze(0)])


def _input_gradients(gz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, from that of the channels."""
    return gz[0].t() @ x + gz[1:-1].sum(1).t(), gz[0].sum(0)


def _input_tangent(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None) -> Tensor:
    """The change of the first layer's channels where points, weight and bias change; ctx saved these three first."""
    x, weight, bias = ctx.saved_tensors[:3]
    x_t = torch.zeros_like(x) if x_t is None else x_t
    weight_t = torch.zeros_like(weight) if weight_t is None else weight_t
    value = F.linear(x_t, weight, bias_t) + F.linear(x, weight_t)
    u, z = torch.cat([value.unsqueeze(0), input_channels(x, weight_t)[1:]]), input_channels(x, weight)
    return computed(activation_tangent, u, z, bias, ctx.activation, ctx.spatial).to(x.dtype)


def _input_check_as(
    operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> None:
    check_floating(operator, x=x)
    if x.dim() != 2 or not 1 <= x.shape[1] <= MOST_COORDINATES:
        raise ValueError(
            f"{operator}: x has shape {tuple(x.shape)}; it must be (N, D) with D from 1 to {MOST_COORDINATES}"
        )
    check_like(operator, "weight", weight, (*weight.shape[:1], x.shape[1]), "x", x)
    check_like(operator, "bias", bias, tuple(weight.shape[:1]), "weight", weight)
    check_activation(operator, activation)
    check_spatial(operator, spatial, x.shape[1])
    check_like(operator, "next_weight", next_weight, (*next_weight.shape[:1], weight.shape[0]), "weight", weight)


def _input_backward_check(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> None:
    operator = "forward_laplacian_input_linear_backward"
    _input_check_as(operator, x, weight, bias, *rest)
    check_like(operator, "grad", grad, (x.shape[1] + 2, x.shape[0], rest[0].shape[0]), "x", x)


def _input_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    z = input_channels(x, weight)
    gz, _, dnext = _backward_reference(grad, z, bias, next_weight, activation, spatial)
    return *_input_gradients(gz, x), dnext


def _input_backward_cpu(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> tuple[Tensor, ...]:
    gradients = computed(_input_backward_reference, grad, x, weight, bias, next_weight, activation, spatial)
    return tuple(gradient.to(x.dtype).contiguous() for gradient in gradients)


def _input_samples(device: torch.device, dtype: torch.dtype, backward: bool) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(
        name: str, x: Tensor, weight: Tensor, outputs: int, activation: str, spatial: int, bias: bool = True
    ) -> Sample:
        units = weight.shape[0]
        grad = [randn(x.shape[1] + 2, x.shape[0], outputs)] if backward else []
        next_weight = randn(outputs, units) / max(units, 1) ** 0.5
        return Sample(
            f"{name}, {activation}",
            (*grad, x, weight, randn(units) if bias else None, next_weight, activation, spatial),
        )

    for activation in ACTIVATIONS:
        yield sample("three coordinates", randn(4, 3), randn(7, 3), 3, activation, 3)
        yield sample("time", randn(3, 4), randn(5, 4), 7, activation, 3, bias=False)
    yield sample("one coordinate", randn(17, 1), randn(3, 1), 5, "tanh", 1)
    yield sample("past one block", randn(33, 3), randn(150, 3), 65, "silu", 3)
    yield sample("transposed", randn(3, 9).t(), randn(3, 7).t(), 3, "gelu", 2)
    yield sample("expanded", randn(1, 3).expand(5, 3), randn(7, 1).expand(7, 3), 3, "sin", 3)
    yield sample("no points", randn(0, 3), randn(7, 3), 3, "tanh", 3)
    yield sample("no units behind", randn(5, 3), randn(7, 3), 0, "tanh", 3)


def _input_cost(x: Tensor, next_weight: Tensor, products: int) -> Cost:
    (points, coordinates), (outputs, units) = x.shape, next_weight.shape
    rows = (coordinates + 2) * points
    return Cost(
        flops=2 * products * rows * units * outputs,
        bytes=(x.numel() + rows * outputs + products * next_weight.numel()) * x.itemsize,
    )


forward_laplacian_input_linear_backward_operator: Operator = register(
    schema=(
        "forward_laplacian_input_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, "
        "Tensor next_weight, str activation, int spatial) -> (Tensor, Tensor, Tensor)"
    ),
    check=_input_backward_check,
    shape=lambda grad, x, weight, bias, next_weight, activation, spatial: (
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[:1]),
        weight.new_empty(next_weight.shape),
    ),
    cpu=_input_backward_cpu,
    kernel=Kernel("forward_laplacian_linear", "forward_laplacian_input_linear_backward", "cublas+triton"),
    reference=_input_backward_reference,
    samples=lambda device, dtype: _input_samples(device, dtype, True),
    cost=lambda grad, x, weight, bias, next_weight, activation, spatial: _input_cost(x, next_weight, 2),
    stock="the gradient of a forward Laplacian's first two layers",
    vmap=looped_vmap,
    autocast="promote",
    exempt={"autocast": "autocast rounds the reference's products, and leaves what is between them"},
)


def _input_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> Tensor:
    return _reference(input_channels(x, weight), bias, next_weight, activation, spatial)


def _input_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, next_weight: Tensor, activation: str, spatial: int
) -> Tensor:
    return computed(_input_reference, x, weight, bias, next_weight, activation, spatial).to(x.dtype).contiguous()


def _input_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, next_weight = ctx.saved_tensors
    if torch.is_grad_enabled() or ctx.needs[0]:  # as above; and the operator gives no gradient of the points
        z = input_channels(x, weight)
        gz = forward_laplacian_activation_backward_operator(grad @ next_weight, z, bias, ctx.activation, ctx.spatial)
        a = forward_laplacian_activation(z, bias, ctx.activation, ctx.spatial)
        dx, dnext = gz[0] @ weight, _rows(grad).t() @ _rows(a)
        dweight, dbias = _input_gradients(gz, x)
    else:
        dx = None
        dweight, dbias, dnext = forward_laplacian_input_linear_backward_operator(
            grad, x, weight, bias, next_weight, ctx.activation, ctx.spatial
        )
    return dx, dweight, None if bias is None else dbias, dnext, None, None


def _input_jvp(
    ctx: Any,
    x_t: Tensor | None,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
    next_weight_t: Tensor | None,
    *_: None,
) -> Tensor:
    x, weight, bias, next_weight = ctx.saved_tensors
    tangent = _input_tangent(ctx, x_t, weight_t, bias_t) @ next_weight.t()
    if next_weight_t is None:
        return tangent
    a = forward_laplacian_activation(input_channels(x, weight), bias, ctx.activation, ctx.spatial)
    return tangent + a @ next_weight_t.t()


forward_laplacian_input_linear_operator = register(
    schema=(
        "forward_laplacian_input_linear(Tensor x, Tensor weight, Tensor? bias, Tensor next_weight, str activation, "
        "int spatial) -> Tensor"
    ),
    check=lambda *args: _input_check_as("forward_laplacian_input_linear", *args),
    shape=lambda x, weight, bias, next_weight, activation, spatial: x.new_empty(
        (x.shape[1] + 2, x.shape[0], next_weight.shape[0])
    ),
    cpu=_input_cpu,
    kernel=Kernel("forward_laplacian_linear", "forward_laplacian_input_linear", _path),
    reference=_input_reference,
    samples=lambda device, dtype: _input_samples(device, dtype, False),
    cost=lambda x, weight, bias, next_weight, activation, spatial: _input_cost(x, next_weight, 1),
    stock="the forward Laplacian's formulas between two linear layers, the first one of the coordinates",
    setup=setup,
    backward=_input_backward,
    jvp=_input_jvp,
    vmap=looped_vmap,
    autocast="cast",
)
