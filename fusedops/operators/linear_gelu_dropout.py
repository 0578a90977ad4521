"""dropout(gelu(x @ weight.T + bias)), the first half of a transformer's feed-forward block, and its gradient.

Dropout's mask is never stored: the seed is, and the gradient draws the same bits again (`fusedops.operators.philox`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.operators import philox
from fusedops.operators.gelu import APPROXIMATIONS, gelu_second_derivative
from fusedops.operators.pointwise import FLOATING, check_floating, layouts
from fusedops.registration import INTERPRETING, Cost, Kernel, Sample, looped_vmap, pointwise_vmap, register


def linear_gelu_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    p: float = 0.0,
    approximate: str = "none",
    training: bool = True,
) -> Tensor:
    """F.dropout(F.gelu(F.linear(x, weight, bias), approximate=approximate), p, training).

    x: (..., K), any strides; weight: (N, K); bias: (N,) or None; one dtype (float16, bfloat16, float32 or float64) and
    device. approximate: "none" for z Phi(z), "tanh" for its tanh form. p: the probability that an element is dropped.
    Returns (..., N), contiguous. Under autocast all three are cast, as for F.linear.
    Dropout draws one seed from the device's default generator, in training and where p > 0 alone; equal seeds give
    equal masks on every device. The share dropped is p rounded to a multiple of 2^-16.
    Raises TypeError for dtypes that are not allowed or differ, ValueError for shapes or devices that do not match, p
    outside [0, 1] and another approximate.
    """
    if not training and 0.0 <= p <= 1.0:  # the operator refuses another p
        p = 0.0
    # Drawn here and passed as a tensor, so that checkpointing, compilers and captured graphs see it drawn.
    draws = 0.0 < p <= 1.0
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.device) if draws else None
    save_z = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    return linear_gelu_dropout_operator(x, weight, bias, p, approximate, seed, save_z)[0]


# ---------------------------------------------------------------------------------------------------------------------
# What both operators share


def _check_dropout(operator: str, p: float, approximate: str, seed: Tensor | None, device: torch.device) -> None:
    if not 0.0 <= p <= 1.0:  # NaN too
        raise ValueError(f"{operator}: p is {p}; allowed: a probability, from 0 to 1")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"{operator}: approximate is {approximate!r}; allowed: {', '.join(map(repr, APPROXIMATIONS))}")
    if seed is None:
        if p > 0.0:
            raise ValueError(
                f"{operator}: seed is None and p is {p}; dropout needs a seed, an int64 tensor of shape (1,)"
            )
    elif seed.dtype != torch.int64:
        raise TypeError(f"{operator}: seed is {seed.dtype}; allowed: int64")
    elif seed.shape != (1,):
        raise ValueError(f"{operator}: seed has shape {tuple(seed.shape)}; allowed: (1,)")
    elif seed.device != device:
        raise ValueError(
            f"{operator}: seed is on {seed.device}, the other tensors on {device}; they must be on one device"
        )


# ---------------------------------------------------------------------------------------------------------------------
# gelu_dropout_backward


def _check_backward(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> None:
    check_floating("gelu_dropout_backward", z=z, grad=grad)
    _check_dropout("gelu_dropout_backward", p, approximate, seed, z.device)


def _backward_shape(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> Tensor:
    return z.new_empty(z.shape)


def _backward_cpu(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> Tensor:
    return _backward_reference(grad, z, p, approximate, seed).contiguous()


def _backward_reference(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> Tensor:
    return torch.ops.aten.gelu_backward(philox.dropout(grad, p, seed), z, approximate=approximate)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, z, ctx.p, ctx.approximate, seed = inputs
    ctx.save_for_backward(grad, z, seed)
    ctx.save_for_forward(grad, z, seed)


def _through_z(ctx: Any, u: Tensor) -> Tensor:
    """u times the derivative of dz with respect to z, rounded once for half types."""
    grad, z, seed = ctx.saved_tensors
    computing = torch.promote_types(z.dtype, torch.float32)
    second = gelu_second_derivative(z.to(computing), ctx.approximate)
    return (u * philox.dropout(grad.to(computing), ctx.p, seed) * second).to(z.dtype)


def _backward_of_backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
    _, z, seed = ctx.saved_tensors
    needs_grad, needs_z = ctx.needs[:2]
    return (
        gelu_dropout_backward_operator(u, z, ctx.p, ctx.approximate, seed) if needs_grad else None,
        _through_z(ctx, u) if needs_z else None,
        None,
        None,
        None,
    )


def _jvp_of_backward(ctx: Any, grad_t: Tensor, z_t: Tensor, *_: None) -> Tensor:
    _, z, seed = ctx.saved_tensors
    return gelu_dropout_backward_operator(grad_t, z, ctx.p, ctx.approximate, seed) + _through_z(ctx, z_t)


def _backward_vmap(operator: Any, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    grad, z, p, approximate, _ = args
    if p > 0:  # an element's bits go by its place within its example
        return looped_vmap(operator, info, dims, *args)
    return pointwise_vmap(operator, info, (*dims[:4], None), grad, z, p, approximate, None)


def _backward_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    seed = torch.tensor([2**40 + 7], device=device)
    for name, z in layouts(device, dtype):
        if z.numel() == 1:  # stock's own error of one element may happen to be zero
            continue
        for approximate in APPROXIMATIONS:
            for p in (0.0, 0.25):
                grad = torch.randn_like(z)
                yield Sample(f"{name}, {approximate}, p={p}", (grad, z, p, approximate, seed if p else None))
    z = torch.randn(3, 7, device=device, dtype=dtype)
    yield Sample("expanded gradient", (torch.ones((), device=device, dtype=dtype).expand(3, 7), z, 0.25, "none", seed))
    yield Sample("all dropped", (torch.randn_like(z), z, 1.0, "none", seed))


def _backward_cost(grad: Tensor, z: Tensor, p: float, approximate: str, seed: Tensor | None) -> Cost:
    return Cost(flops=12 * z.numel(), bytes=3 * z.numel() * z.itemsize)


gelu_dropout_backward_operator = register(
    schema="gelu_dropout_backward(Tensor grad, Tensor z, float p, str approximate, Tensor? seed) -> Tensor",
    check=_check_backward,
    shape=_backward_shape,
    cpu=_backward_cpu,
    kernel=Kernel("linear_gelu_dropout", "gelu_dropout_backward"),
    reference=_backward_reference,
    samples=_backward_samples,
    cost=_backward_cost,
    stock="the gradient of F.dropout(F.gelu(z), p)",
    setup=_backward_setup,
    backward=_backward_of_backward,
    jvp=_jvp_of_backward,
    vmap=_backward_vmap,
    autocast="promote",
)


# ---------------------------------------------------------------------------------------------------------------------
# linear_gelu_dropout


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> None:
    operator = "linear_gelu_dropout"
    if x.dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"{operator}: x is {x.dtype}; allowed: {allowed}")
    if x.dim() == 0:
        raise ValueError(f"{operator}: x has no dimensions; allowed: (..., K)")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{operator}: weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; allowed: (N, K) and (..., K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{operator}: bias has shape {tuple(bias.shape)}; allowed: ({weight.shape[0]},), as weight's rows"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{operator}: {name} is {tensor.dtype}, x is {x.dtype}; they must be of one dtype")
        if tensor.device != x.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, x on {x.device}; they must be on one device")
    _check_dropout(operator, p, approximate, seed, x.device)


ONE_KERNEL_LIMIT = 2**19
"""Elements of y up to which one kernel is faster; beyond, cuBLAS's lead in the product outweighs a pass over z.

On an H200, bfloat16, K 1024, N 4096 (torch 2.11, Triton 3.6): 10.5 us against 12.4 at M 64, 331 against 256 at M 16384.
"""


def one_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> bool:
    """Whether a GPU computes product, bias and GELU in one kernel: half types, without dropout, z not asked for, small.

    Otherwise cuBLAS computes z, a pointwise kernel the rest. (Triton's interpreter gets products of bfloat16 wrong.)
    """
    half = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not INTERPRETING)
    return half and p == 0.0 and not save_z and x.shape[:-1].numel() * weight.shape[0] <= ONE_KERNEL_LIMIT


def _path(*args: Any) -> str:
    return "triton" if one_kernel(*args) else "cublas+triton"


def _shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if save_z else (0,))


def _cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight, bias).contiguous()
    y = F.gelu(z, approximate=approximate)
    if seed is not None and p > 0:
        y.mul_(philox.keep_mask(seed, y.shape, p)).mul_(philox.scale(p))
    return y, z if save_z else x.new_empty((0,))


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight, bias)
    y = philox.dropout(F.gelu(z, approximate=approximate), p, seed)
    return y, z if save_z else x.new_empty((0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.p, ctx.approximate, seed, ctx.save_z = inputs
    _, z = outputs
    # z has the gradient of a linear layer: it is differentiable, so that derivatives of the backward pass reach x
    # through it. Most calls hide it, and no zeros of its size are to be made up for its gradient.
    ctx.set_materialize_grads(False)
    if not ctx.save_z:
        ctx.mark_non_differentiable(z)
    saved = (x, weight, bias, seed, z if ctx.save_z else None)
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """x, weight, bias, seed and z, computed again where it was not saved."""
    x, weight, bias, seed, z = ctx.saved_tensors
    return x, weight, bias, seed, F.linear(x, weight, bias) if z is None else z


def _backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 4
    if dy is not None:
        x, weight, _, seed, z = _saved(ctx)
        through_y = gelu_dropout_backward_operator(dy, z, ctx.p, ctx.approximate, seed)
        dz = through_y if dz is None or not ctx.save_z else through_y + dz
    elif dz is None or not ctx.save_z:
        return (None, None, None, *nothing)
    else:
        x, weight = ctx.saved_tensors[:2]
    rows = math.prod(x.shape[:-1])
    dz = dz.reshape(rows, weight.shape[0])
    needs_x, needs_weight, needs_bias = ctx.needs[:3]
    return (
        (dz @ weight).reshape(x.shape) if needs_x else None,
        dz.t() @ x.reshape(rows, x.shape[-1]) if needs_weight else None,
        dz.sum(0) if needs_bias else None,
        *nothing,
    )


def _jvp(
    ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, *_: None
) -> tuple[Tensor, Tensor | None]:
    x, weight, _, seed, z = _saved(ctx)
    z_t = torch.zeros_like(z)
    if x_t is not None:
        z_t = z_t + F.linear(x_t, weight)
    if weight_t is not None:
        z_t = z_t + F.linear(x, weight_t)
    if bias_t is not None:
        z_t = z_t + bias_t
    y_t = gelu_dropout_backward_operator(z_t, z, ctx.p, ctx.approximate, seed)
    return y_t, z_t if ctx.save_z else None


def _vmap(operator: Any, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    x, weight, bias, p, approximate, _, save_z = args
    x_dim, weight_dim, bias_dim = dims[:3]
    if p > 0 or weight_dim is not None or bias_dim is not None or x_dim is None:
        return looped_vmap(operator, info, dims, *args)
    outputs = operator(x.movedim(x_dim, 0), weight, bias, p, approximate, None, save_z)
    return outputs, (0, 0 if save_z else None)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    seed = torch.tensor([2**40 + 7], device=device)
    for name, x, N in (
        ("vector", randn(7), 3),
        ("matrix", randn(33, 17), 7),
        ("three dimensions", randn(3, 1, 17), 33),
        ("one row", randn(1, 3), 17),
        ("transposed", randn(5, 3).t(), 3),
        ("sliced", randn(5, 14, 9)[:, ::2, 1:4], 7),
        ("expanded", randn(1, 17).expand(33, 17), 3),
        ("no rows", randn(0, 3), 7),
        ("no columns", randn(3, 7), 0),
        ("no depth", randn(3, 0), 7),
    ):
        weight, bias = randn(N, x.shape[-1]), randn(N)
        yield Sample(name, (x, weight, bias, 0.25, "none", seed, True))
        yield Sample(f"{name}, no dropout", (x, weight, None, 0.0, "tanh", None, True))
        yield Sample(f"{name}, z not saved", (x, weight, bias, 0.0, "none", None, False))
    x, weight, bias = randn(3, 7), randn(17, 7), randn(17)
    yield Sample("tanh, dropout", (x, weight, bias, 0.25, "tanh", seed, True))
    yield Sample("no bias, dropout, z not saved", (x, weight, None, 0.25, "none", seed, False))
    yield Sample("all dropped", (x, weight, bias, 1.0, "none", seed, True))
    yield Sample("transposed weight", (x, randn(7, 17).t(), bias, 0.0, "none", None, False))
    yield Sample("strided bias", (x, weight, randn(34)[::2], 0.0, "tanh", None, False))


def _cost(
    x: Tensor, weight: Tensor, bias: Tensor | None, p: float, approximate: str, seed: Tensor | None, save_z: bool
) -> Cost:
    rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
    outputs = rows * columns * (2 if save_z else 1)
    elements = x.numel() + weight.numel() + (0 if bias is None else columns) + outputs
    return Cost(flops=2 * rows * columns * x.shape[-1], bytes=elements * x.itemsize)


linear_gelu_dropout_operator = register(
    schema=(
        "linear_gelu_dropout(Tensor x, Tensor weight, Tensor? bias, float p, str approximate, Tensor? seed, "
        "bool save_z) -> (Tensor y, Tensor z)"
    ),
    check=_check,
    shape=_shape,
    cpu=_cpu,
    kernel=Kernel("linear_gelu_dropout", "linear_gelu_dropout", _path),
    reference=_reference,
    samples=_samples,
    cost=_cost,
    stock="F.dropout(F.gelu(F.linear(x, weight, bias)), p)",
    setup=_setup,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
    autocast="cast",
    interpreted_dtypes=tuple(dtype for dtype in FLOATING if dtype != torch.bfloat16),
)
