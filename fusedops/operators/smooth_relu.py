"""smooth_relu(x, alpha): x where x > 0, alpha x elsewhere (a leaky ReLU; the name is that of the Triton tutorials).

The worked example of docs/adding_an_operator.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.operators import pointwise
from fusedops.registration import Kernel, Operator, pointwise_vmap, register


def smooth_relu(x: Tensor, alpha: float = 0.01, *, opaque: bool = False) -> Tensor:
    """x where x > 0, alpha * x elsewhere; the derivative at 0 is alpha.

    x: any shape and strides; float16, bfloat16, float32 or float64. Returns a tensor like x.
    Under torch.compile it hands over to the stock formula, which Inductor fuses; `opaque=True` keeps the operator.
    Raises TypeError for another dtype, and for a tensor as alpha.
    """
    pointwise.check_number("smooth_relu", "alpha", alpha)
    if torch.compiler.is_compiling() and not opaque:
        pointwise.check_handed_over("smooth_relu", x=x)
        return _reference(x, alpha)
    return smooth_relu_operator(x, alpha)


def _reference(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x > 0, x, alpha * x)


def _backward_reference(grad: Tensor, x: Tensor, alpha: float) -> Tensor:
    return grad * torch.where(x > 0, torch.ones_like(x), alpha)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.alpha = inputs
    ctx.save_for_backward(tensors[-1])
    ctx.save_for_forward(tensors[-1])


def _cpu(x: Tensor, alpha: float) -> Tensor:
    y = torch.empty_like(x)
    return torch.ops.aten.leaky_relu.out(pointwise.in_layout_of(x, y), alpha, out=y)


def _backward_cpu(grad: Tensor, x: Tensor, alpha: float) -> Tensor:
    y = torch.empty_like(x)
    return y.copy_(torch.where(x > 0, grad, alpha * grad))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return smooth_relu_backward_operator(grad, ctx.saved_tensors[0], ctx.alpha), None


def _backward_of_backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, None]:
    # Piecewise linear in x: its second derivative is zero wherever it exists.
    return smooth_relu_backward_operator(u, ctx.saved_tensors[0], ctx.alpha), None, None


smooth_relu_backward_operator: Operator = register(
    schema="smooth_relu_backward(Tensor grad, Tensor x, float alpha) -> Tensor",
    check=lambda grad, x, alpha: pointwise.check_floating("smooth_relu_backward", x=x, grad=grad),
    shape=lambda grad, x, alpha: torch.empty_like(x),
    cpu=_backward_cpu,
    kernel=Kernel("smooth_relu", "smooth_relu_backward"),
    reference=_backward_reference,
    samples=lambda device, dtype: pointwise.samples(2, 0.1, device=device, dtype=dtype),
    cost=lambda grad, x, alpha: pointwise.cost(x.numel(), x.itemsize, tensors=3, flops=1),
    stock="the gradient of where(x > 0, x, alpha * x)",
    setup=_setup,
    backward=_backward_of_backward,
    jvp=lambda ctx, grad_t, x_t, _: smooth_relu_backward_operator(grad_t, ctx.saved_tensors[0], ctx.alpha),
    vmap=pointwise_vmap,
    autocast="promote",
)

smooth_relu_operator = register(
    schema="smooth_relu(Tensor x, float alpha) -> Tensor",
    check=lambda x, alpha: pointwise.check_floating("smooth_relu", x=x),
    shape=lambda x, alpha: torch.empty_like(x),
    cpu=_cpu,
    kernel=Kernel("smooth_relu", "smooth_relu"),
    reference=_reference,
    samples=lambda device, dtype: pointwise.samples(1, 0.1, device=device, dtype=dtype),
    cost=lambda x, alpha: pointwise.cost(x.numel(), x.itemsize, tensors=2, flops=1),
    stock="torch.where(x > 0, x, alpha * x)",
    setup=_setup,
    backward=_backward,
    jvp=lambda ctx, tangent, _: smooth_relu_backward_operator(tangent, ctx.saved_tensors[0], ctx.alpha),
    vmap=pointwise_vmap,
)
