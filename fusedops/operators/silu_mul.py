"""silu_mul(gate, up) = silu(gate) up, the activation of a SwiGLU block (Shazeer 2020)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.operators import pointwise
from fusedops.operators.silu import silu_first_derivative, silu_second_derivative
from fusedops.registration import Kernel, pointwise_vmap, register


def silu_mul(gate: Tensor, up: Tensor, *, opaque: bool = False) -> Tensor:
    """silu(gate) * up, elementwise, in one pass.

    gate, up: one shape, dtype and device, any strides; float16, bfloat16, float32 or float64. Returns a tensor like
    gate. Arithmetic is at least fp32 and silu(gate) is not rounded in between. Under autocast the widest dtype wins.
    Under torch.compile it hands over to F.silu(gate) * up, which Inductor fuses; `opaque=True` keeps the operator.
    Raises TypeError for another or a mixed dtype, ValueError for shapes or devices that differ.
    """
    if torch.compiler.is_compiling() and not opaque:
        pointwise.check_handed_over("silu_mul", gate=gate, up=up)
        return F.silu(gate) * up
    return silu_mul_operator(gate, up)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def _cpu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    gate, up = (pointwise.computing(t) for t in (gate, up))
    return y.copy_(F.silu(gate).mul_(up))


def _backward_cpu(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    grad, gate, up = (pointwise.computing(t) for t in (grad, gate, up))
    dgate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    dup.copy_(F.silu(gate).mul_(grad))
    return dgate, dup


def _backward_reference(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return grad * up * silu_first_derivative(gate), grad * F.silu(gate)


def _backward_of_backward(ctx: Any, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, v: the cotangents of (dgate, dup)."""
    grad, gate, up = ctx.saved_tensors
    first = silu_first_derivative(gate)
    return (
        u * up * first + v * F.silu(gate),
        u * grad * up * silu_second_derivative(gate) + v * grad * first,
        u * grad * first,
    )


def _jvp_of_backward(ctx: Any, grad_t: Tensor, gate_t: Tensor, up_t: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = ctx.saved_tensors
    first = silu_first_derivative(gate)
    return (
        (grad_t * up + grad * up_t) * first + grad * up * silu_second_derivative(gate) * gate_t,
        grad_t * F.silu(gate) + grad * first * gate_t,
    )


def _jvp(ctx: Any, gate_t: Tensor, up_t: Tensor) -> Tensor:
    gate, up = ctx.saved_tensors
    return silu_first_derivative(gate) * up * gate_t + F.silu(gate) * up_t


silu_mul_backward_operator = register(
    schema="silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    check=lambda grad, gate, up: pointwise.check_floating("silu_mul_backward", gate=gate, up=up, grad=grad),
    shape=lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(gate)),
    cpu=_backward_cpu,
    kernel=Kernel("silu_mul", "silu_mul_backward"),
    reference=_backward_reference,
    samples=lambda device, dtype: pointwise.samples(3, device=device, dtype=dtype),
    cost=lambda grad, gate, up: pointwise.cost(gate.numel(), gate.itemsize, tensors=5, flops=12),
    stock="the gradient of F.silu(gate) * up",
    setup=_save_inputs,
    backward=_backward_of_backward,
    jvp=_jvp_of_backward,
    vmap=pointwise_vmap,
    autocast="promote",
)

silu_mul_operator = register(
    schema="silu_mul(Tensor gate, Tensor up) -> Tensor",
    check=lambda gate, up: pointwise.check_floating("silu_mul", gate=gate, up=up),
    shape=lambda gate, up: torch.empty_like(gate),
    cpu=_cpu,
    kernel=Kernel("silu_mul", "silu_mul"),
    reference=lambda gate, up: F.silu(gate) * up,
    samples=lambda device, dtype: pointwise.samples(2, device=device, dtype=dtype),
    cost=lambda gate, up: pointwise.cost(gate.numel(), gate.itemsize, tensors=3, flops=5),
    stock="F.silu(gate) * up",
    setup=_save_inputs,
    backward=lambda ctx, grad: silu_mul_backward_operator(grad, *ctx.saved_tensors),
    jvp=_jvp,
    vmap=pointwise_vmap,
    autocast="promote",
)
