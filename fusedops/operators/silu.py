"""silu(x) = x sigmoid(x), the sigmoid linear unit (Hendrycks and Gimpel 2016; also called swish)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.operators import pointwise
from fusedops.registration import Kernel, pointwise_vmap, register


def silu(x: Tensor, *, opaque: bool = False) -> Tensor:
    """x * sigmoid(x), elementwise.

    x: any shape and strides; float16, bfloat16, float32 or float64. Returns a tensor like x. Arithmetic is at least
    fp32. Under torch.compile it hands over to F.silu, which Inductor fuses with its neighbours; `opaque=True` keeps the
    operator.
    Raises TypeError for another dtype.
    """
    if torch.compiler.is_compiling() and not opaque:
        pointwise.check_handed_over("silu", x=x)
        return F.silu(x)
    return silu_operator(x)


def silu_first_derivative(x: Tensor) -> Tensor:
    """d silu / dx, in stock operations."""
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def silu_second_derivative(x: Tensor) -> Tensor:
    """d^2 silu / dx^2, in stock operations."""
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def _cpu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    return torch.ops.aten.silu.out(pointwise.in_layout_of(x, y), out=y)


def _backward_cpu(grad: Tensor, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    return torch.ops.aten.silu_backward.grad_input(
        pointwise.in_layout_of(grad, y), pointwise.in_layout_of(x, y), grad_input=y
    )


def _backward_of_backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    grad, x = ctx.saved_tensors
    return silu_backward_operator(u, x), u * grad * silu_second_derivative(x)


def _jvp_of_backward(ctx: Any, grad_t: Tensor, x_t: Tensor) -> Tensor:
    grad, x = ctx.saved_tensors
    return silu_backward_operator(grad_t, x) + grad * silu_second_derivative(x) * x_t


silu_backward_operator = register(
    schema="silu_backward(Tensor grad, Tensor x) -> Tensor",
    check=lambda grad, x: pointwise.check_floating("silu_backward", x=x, grad=grad),
    shape=lambda grad, x: torch.empty_like(x),
    cpu=_backward_cpu,
    kernel=Kernel("silu", "silu_backward"),
    reference=lambda grad, x: grad * silu_first_derivative(x),
    samples=lambda device, dtype: pointwise.samples(2, device=device, dtype=dtype),
    cost=lambda grad, x: pointwise.cost(x.numel(), x.itemsize, tensors=3, flops=8),
    stock="the gradient of F.silu",
    setup=_save_inputs,
    backward=_backward_of_backward,
    jvp=_jvp_of_backward,
    vmap=pointwise_vmap,
    autocast="promote",
)

silu_operator = register(
    schema="silu(Tensor x) -> Tensor",
    check=lambda x: pointwise.check_floating("silu", x=x),
    shape=lambda x: torch.empty_like(x),
    cpu=_cpu,
    kernel=Kernel("silu", "silu"),
    reference=F.silu,
    samples=lambda device, dtype: pointwise.samples(1, device=device, dtype=dtype),
    cost=lambda x: pointwise.cost(x.numel(), x.itemsize, tensors=2, flops=4),
    stock="F.silu(x)",
    setup=_save_inputs,
    backward=lambda ctx, grad: silu_backward_operator(grad, ctx.saved_tensors[0]),
    jvp=lambda ctx, tangent: silu_backward_operator(tangent, ctx.saved_tensors[0]),
    vmap=pointwise_vmap,
)
