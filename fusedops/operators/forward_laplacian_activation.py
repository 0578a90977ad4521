"""forward_laplacian_activation(z): value, first derivatives and Laplacian through an activation, in one pass.

The forward Laplacian (Li et al. 2024, "A computational framework for neural network-based variational Monte Carlo with
Forward Laplacian") carries, through a network of coordinates x, every unit's value z0, its derivatives z_i with respect
to D coordinates and its Laplacian z_L, the sum of second derivatives over the first `spatial` ones. A linear layer acts
on each of the D + 2 channels alike; an activation f maps

    a0 = f(z0),   a_i = f'(z0) z_i,   a_L = f''(z0) S + f'(z0) z_L,   S = sum of z_i^2 over the spatial coordinates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops.operators import pointwise
from fusedops.operators.smooth_activations import ACTIVATIONS, check_activation, derivatives
from fusedops.registration import Cost, Kernel, Operator, Sample, looped_vmap, register


def forward_laplacian_activation(z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    """The activation of a forward Laplacian: value, D derivatives and Laplacian of every unit.

    z: (D + 2, ..., W), D at least 1: value, derivatives with respect to D coordinates, Laplacian; any strides; float16,
    bfloat16, float32 or float64. bias: (W,), of z's dtype, added to the value first, or None. activation: "tanh",
    "sin", "silu" or "gelu" (the exact one). spatial: how many coordinates, the first ones, take part in the Laplacian,
    1 to D. Returns a tensor of z's shape and dtype, contiguous; arithmetic is at least fp32. Under autocast the widest
    dtype wins. Derivatives of every order, from the second on by stock formulas.
    Raises TypeError for another or a mixed dtype, ValueError for shapes, devices, an activation or a number of spatial
    coordinates other than these; an activation without a second derivative, such as relu, is among them.
    """
    return forward_laplacian_activation_operator(z, bias, activation, spatial)


# ---------------------------------------------------------------------------------------------------------------------
# The formulas in stock PyTorch. With F: z -> a and g a cotangent of a: J u, J^T g, and H u, H the Hessian of g . F(z)


def _parts(z: Tensor, bias: Tensor | None, activation: str, spatial: int, count: int) -> tuple[list[Tensor], Tensor]:
    """The activation and its derivatives at the value, `count` in all, and S."""
    value = z[0] if bias is None else z[0] + bias
    return derivatives(activation, value, count), z[1 : 1 + spatial].square().sum(0)


def _stack(value: Tensor, firsts: Tensor, laplacian: Tensor) -> Tensor:
    return torch.cat([value[None], firsts, laplacian[None]])


def _only_spatial(firsts: Tensor, spatial: int) -> Tensor:
    """`firsts` (D, ...), zero from the coordinate `spatial` on."""
    return torch.cat([firsts[:spatial], torch.zeros_like(firsts[spatial:])])


def activation_stock(z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    """F(z)."""
    (f, f1, f2), curvature = _parts(z, bias, activation, spatial, 3)
    return _stack(f, f1 * z[1:-1], f2 * curvature + f1 * z[-1])


def activation_tangent(u: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    """J u: the change of F(z) where z changes by u."""
    (_, f1, f2, f3), curvature = _parts(z, bias, activation, spatial, 4)
    across = (u[1 : 1 + spatial] * z[1 : 1 + spatial]).sum(0)
    return _stack(
        f1 * u[0],
        f2 * u[0] * z[1:-1] + f1 * u[1:-1],
        (f3 * curvature + f2 * z[-1]) * u[0] + 2.0 * f2 * across + f1 * u[-1],
    )


def activation_backward_stock(grad: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    """J^T grad."""
    (_, f1, f2, f3), curvature = _parts(z, bias, activation, spatial, 4)
    return _stack(
        f1 * grad[0] + f2 * ((grad[1:-1] * z[1:-1]).sum(0) + grad[-1] * z[-1]) + f3 * curvature * grad[-1],
        f1 * grad[1:-1] + 2.0 * f2 * grad[-1] * _only_spatial(z[1:-1], spatial),
        f1 * grad[-1],
    )


def activation_hessian(
    u: Tensor, grad: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int
) -> Tensor:
    """H u: the change of J^T grad where z changes by u, and, H being symmetric, the gradient of u . J^T grad."""
    (_, _, f2, f3, f4), curvature = _parts(z, bias, activation, spatial, 5)
    mixed = f2 * grad[1:-1] + 2.0 * f3 * grad[-1] * _only_spatial(z[1:-1], spatial)
    second = f2 * grad[0] + f3 * (grad[1:-1] * z[1:-1]).sum(0) + grad[-1] * (f4 * curvature + f3 * z[-1])
    return _stack(
        second * u[0] + (mixed * u[1:-1]).sum(0) + f2 * grad[-1] * u[-1],
        mixed * u[0] + 2.0 * f2 * grad[-1] * _only_spatial(u[1:-1], spatial),
        f2 * grad[-1] * u[0],
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the operator and its gradient share


def check_spatial(operator: str, spatial: int, coordinates: int) -> None:
    """Raise ValueError unless `spatial` is a number of coordinates."""
    if not 1 <= spatial <= coordinates:
        raise ValueError(f"{operator}: spatial is {spatial}; allowed: 1 to {coordinates}, the number of coordinates")


def check_like(operator: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], first: str, of: Tensor) -> None:
    """Raise TypeError or ValueError unless a tensor, if there is one, has this shape, and dtype and device of `of`."""
    if tensor is None:
        return
    if tensor.dtype != of.dtype:
        raise TypeError(f"{operator}: {name} is {tensor.dtype}, {first} is {of.dtype}; they must be of one dtype")
    if tensor.shape != shape:
        raise ValueError(f"{operator}: {name} has shape {tuple(tensor.shape)}; with this {first} it must be {shape}")
    if tensor.device != of.device:
        raise ValueError(
            f"{operator}: {name} is on {tensor.device}, {first} on {of.device}; they must be on one device"
        )


def check_channels(operator: str, z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> None:
    """Raise TypeError or ValueError unless z are channels (D + 2, ..., W) and the rest goes with it."""
    pointwise.check_floating(operator, z=z)
    if z.dim() < 2 or z.shape[0] < 3:
        raise ValueError(
            f"{operator}: z has shape {tuple(z.shape)}; it must be (D + 2, ..., W), D at least 1: value, "
            "D derivatives, Laplacian"
        )
    check_like(operator, "bias", bias, (z.shape[-1],), "z", z)
    check_activation(operator, activation)
    check_spatial(operator, spatial, z.shape[0] - 2)


def _vmap(operator: Operator, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """The batch becomes a dimension behind the channels."""
    *channels, bias, activation, spatial = args
    if dims[len(channels)] is not None:
        return looped_vmap(operator, info, dims, *args)

    def second(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is not None:
            return tensor.movedim(dim, 1)
        return tensor.unsqueeze(1).expand(tensor.shape[0], info.batch_size, *tensor.shape[1:])

    moved = [second(tensor, dim) for tensor, dim in zip(channels, dims, strict=False)]
    return operator(*moved, bias, activation, spatial), 1


def _samples(device: torch.device, dtype: torch.dtype, count: int) -> Iterator[Sample]:
    """Samples of an operator of `count` tensors like z."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(name: str, z: Tensor, activation: str, spatial: int, bias: bool = True) -> Sample:
        tensors = (*(torch.randn_like(z) for _ in range(count - 1)), z)
        return Sample(f"{name}, {activation}", (*tensors, randn(z.shape[-1]) if bias else None, activation, spatial))

    for activation in ACTIVATIONS:
        yield sample("three coordinates", randn(5, 4, 7), activation, 3)
        yield sample("time", randn(6, 3, 5), activation, 3, bias=False)
    yield sample("one coordinate", randn(3, 37), "tanh", 1)
    yield sample("two of nine coordinates", randn(11, 2, 1, 5), "sin", 2)
    yield sample("past one block", randn(5, 3, 1111), "silu", 3)
    yield sample("transposed", randn(7, 9, 5).permute(2, 1, 0), "gelu", 2, bias=False)
    yield sample("sliced", randn(5, 8, 9)[:, ::2, 1:8], "tanh", 3)
    yield sample("expanded", randn(5, 1, 7).expand(5, 4, 7), "sin", 3)
    yield sample("no points", randn(5, 0, 7), "tanh", 3)
    yield sample("no units", randn(5, 3, 0), "silu", 3)


def _cost(tensors: int, z: Tensor, flops: int) -> Cost:
    coordinates = z.shape[0] - 2
    units = z.numel() // z.shape[0]
    return Cost(flops=units * (20 + flops * coordinates), bytes=tensors * z.numel() * z.itemsize)


def _bias_gradient(gz: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else gz[0].reshape(math.prod(gz.shape[1:-1]), gz.shape[-1]).sum(0)


def computed(function: Callable[..., Any], *args: Any) -> Any:
    """The function of these arguments, with tensors in the dtype of the arithmetic."""
    return function(*(pointwise.computing(a) if isinstance(a, Tensor) else a for a in args))


def promoted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in the widest dtype of its tensors, as the operators promote, whatever autocast makes of sums."""

    @functools.wraps(function)
    def of_promoted(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*(a.to(dtype) if isinstance(a, Tensor) else a for a in args))

    return of_promoted


def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all tensors; the last two inputs are the activation and the number of spatial coordinates."""
    *tensors, ctx.activation, ctx.spatial = inputs
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def with_bias(tangent: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
    """The tangents of z and bias together, as one of z, which is `like`."""
    tangent = torch.zeros_like(like) if tangent is None else tangent
    return tangent if bias is None else torch.cat([(tangent[0] + bias)[None], tangent[1:]])


# ---------------------------------------------------------------------------------------------------------------------
# The gradient


def _backward_check(grad: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> None:
    operator = "forward_laplacian_activation_backward"
    check_channels(operator, z, bias, activation, spatial)
    check_like(operator, "grad", grad, tuple(z.shape), "z", z)


def _backward_cpu(grad: Tensor, z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    return computed(activation_backward_stock, grad, z, bias, activation, spatial).to(z.dtype)


def _backward_of_backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
    grad, z, bias = ctx.saved_tensors
    through_grad = computed(activation_tangent, u, z, bias, ctx.activation, ctx.spatial).to(z.dtype)
    through_z = computed(activation_hessian, u, grad, z, bias, ctx.activation, ctx.spatial).to(z.dtype)
    return through_grad, through_z, _bias_gradient(through_z, bias), None, None


def _jvp_of_backward(ctx: Any, grad_t: Tensor | None, z_t: Tensor | None, bias_t: Tensor | None, *_: None) -> Tensor:
    grad, z, bias = ctx.saved_tensors
    u = with_bias(z_t, bias_t, z)
    tangent = computed(activation_hessian, u, grad, z, bias, ctx.activation, ctx.spatial).to(z.dtype)
    if grad_t is None:
        return tangent
    return tangent + forward_laplacian_activation_backward_operator(grad_t, z, bias, ctx.activation, ctx.spatial)


forward_laplacian_activation_backward_operator: Operator = register(
    schema=(
        "forward_laplacian_activation_backward(Tensor grad, Tensor z, Tensor? bias, str activation, int spatial) "
        "-> Tensor"
    ),
    check=_backward_check,
    shape=lambda grad, z, bias, activation, spatial: z.new_empty(z.shape),
    cpu=_backward_cpu,
    kernel=Kernel("forward_laplacian_activation", "forward_laplacian_activation_backward"),
    reference=promoted(activation_backward_stock),
    samples=lambda device, dtype: _samples(device, dtype, 2),
    cost=lambda grad, z, bias, activation, spatial: _cost(3, z, 9),
    stock="the gradient of the forward Laplacian's formulas",
    setup=setup,
    backward=_backward_of_backward,
    jvp=_jvp_of_backward,
    vmap=_vmap,
    autocast="promote",
)


# ---------------------------------------------------------------------------------------------------------------------
# The operator


def _cpu(z: Tensor, bias: Tensor | None, activation: str, spatial: int) -> Tensor:
    return computed(activation_stock, z, bias, activation, spatial).to(z.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    z, bias = ctx.saved_tensors
    gz = forward_laplacian_activation_backward_operator(grad, z, bias, ctx.activation, ctx.spatial)
    return gz, _bias_gradient(gz, bias) if ctx.needs[1] else None, None, None


def _jvp(ctx: Any, z_t: Tensor | None, bias_t: Tensor | None, *_: None) -> Tensor:
    z, bias = ctx.saved_tensors
    u = with_bias(z_t, bias_t, z)
    return computed(activation_tangent, u, z, bias, ctx.activation, ctx.spatial).to(z.dtype)


forward_laplacian_activation_operator = register(
    schema="forward_laplacian_activation(Tensor z, Tensor? bias, str activation, int spatial) -> Tensor",
    check=lambda *args: check_channels("forward_laplacian_activation", *args),
    shape=lambda z, bias, activation, spatial: z.new_empty(z.shape),
    cpu=_cpu,
    kernel=Kernel("forward_laplacian_activation", "forward_laplacian_activation"),
    reference=promoted(activation_stock),
    samples=lambda device, dtype: _samples(device, dtype, 1),
    cost=lambda z, bias, activation, spatial: _cost(2, z, 4),
    stock="the forward Laplacian's formulas",
    setup=setup,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
    autocast="promote",
)
