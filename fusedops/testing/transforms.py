"""Checks of forward mode, torch.func and vmap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fusedops.testing.accuracy import GRADIENT_FACTOR, assert_accurate
from fusedops.testing.subject import Args, Function, NotApplicable, Subject, floating

JACOBIAN_ELEMENTS, JACOBIAN_ELEMENTS_INTERPRETED = 256, 64
"""jacrev and hessian are taken of samples up to this many elements in the first tensor."""


def _compare(
    what: str,
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Sequence[Tensor],
    further: Iterable[Args] = (),
) -> None:
    """Both functions of the same float64 tensors; their results may be nested."""
    assert_accurate(
        what,
        pytree.tree_leaves(ours(*tensors)),
        lambda *t: pytree.tree_leaves(reference(*t)),
        tensors,
        dtype=torch.float64,
        factor=GRADIENT_FACTOR,
        further=map(floating, further),
    )


def _weighted_sum(outputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar that depends on every element of every output, each with another weight and not linearly."""
    total = outputs[0].new_zeros(())
    for output in outputs:
        weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
        total = total + (weights * output + output * output).sum()
    return total


def _tangents(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tangents that are the same in every dtype."""
    return tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in tensors)


def _dual(function: Function) -> Function:
    def dual(*tensors: Tensor) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            duals = (forward_ad.make_dual(t, tangent) for t, tangent in zip(tensors, _tangents(tensors), strict=True))
            unpacked = [forward_ad.unpack_dual(output) for output in function(*duals)]
            return tuple(torch.zeros_like(u.primal) if u.tangent is None else u.tangent for u in unpacked)

    return dual


def jvp(function: Function) -> Function:
    """torch.func.jvp with tangents that are the same in every dtype."""

    return lambda *tensors: torch.func.jvp(function, tensors, _tangents(tensors))[1]


def grad(function: Function) -> Function:
    """torch.func.grad of a weighted sum of the outputs, in all tensors."""

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        positions = tuple(range(len(tensors)))
        return torch.func.grad(lambda *t: _weighted_sum(function(*t)), positions)(*tensors)

    return gradient


def forward_mode(subject: Subject) -> None:
    """jvp, dual numbers, jvp(jvp) and grad(jvp) are right, or raise NotImplementedError: never zero in silence."""
    subject.require_gradient()
    for sample in subject.few(torch.float64):
        ours, reference, tensors = subject.restricted(sample.args)
        further = subject.further(sample)
        for name, transform in (
            ("jvp", jvp),
            ("dual numbers", _dual),
            ("jvp(jvp)", lambda function: jvp(jvp(function))),
            ("grad(jvp)", lambda function: grad(jvp(function))),
        ):
            try:
                _compare(f"{sample.name}, {name}", transform(ours), transform(reference), tensors, further)
            except NotImplementedError as error:
                assert subject.operator.jvp is None, f"{sample.name}, {name}: {error}"
                assert subject.operator.name in str(error), f"the message does not name the operator: {error}"
                raise NotApplicable(f"{name} raises: {error}") from error


def func_grad(subject: Subject) -> None:
    """torch.func.grad and grad(grad)."""
    subject.require_gradient()
    for sample in subject.few(torch.float64):
        ours, reference, tensors = subject.restricted(sample.args)
        further = subject.further(sample)
        _compare(f"{sample.name}, grad", grad(ours), grad(reference), tensors, further)
        _compare(f"{sample.name}, grad(grad)", grad(grad(ours)), grad(grad(reference)), tensors, further)


def func_jacobians(subject: Subject) -> None:
    """torch.func.jacrev and hessian in the first tensor (without forward mode, jacrev(jacrev) for hessian)."""
    subject.require_gradient()
    sample = subject.few(torch.float64, 1)[0]
    ours, reference, tensors = subject.restricted(sample.args)
    further = subject.further(sample)
    limit = JACOBIAN_ELEMENTS_INTERPRETED if subject.interpreted else JACOBIAN_ELEMENTS
    if tensors[0].numel() > limit:
        raise NotApplicable(f"the smallest sample has more than {limit} elements")

    def second(function: Function) -> Callable[..., Tensor]:
        def scalar(*t: Tensor) -> Tensor:
            return _weighted_sum(function(*t))

        return torch.func.hessian(scalar) if subject.operator.jvp else torch.func.jacrev(torch.func.jacrev(scalar))

    _compare(f"{sample.name}, jacrev", torch.func.jacrev(ours), torch.func.jacrev(reference), tensors, further)
    _compare(f"{sample.name}, hessian", second(ours), second(reference), tensors, further)


def _loop(function: Function, in_dims: tuple[int | None, ...]) -> Function:
    """What vmap means: one call an example, the results stacked."""

    def loop(*batched: Tensor) -> tuple[Tensor, ...]:
        examples = [
            function(*(b if dim is None else b.select(dim, i) for b, dim in zip(batched, in_dims, strict=True)))
            for i in range(batched[0].shape[-1])
        ]
        return tuple(torch.stack(parts) for parts in zip(*examples, strict=True))

    return loop


def vmap(subject: Subject) -> None:
    """vmap along the last dimension of all tensors or of the first, and of gradients, against one call an example."""
    subject.require_gradient()
    for sample in subject.few(torch.float64):
        ours, reference, tensors = subject.restricted(sample.args)
        others = map(floating, subject.again(sample, 2))
        batch = tuple(torch.stack(examples, dim=-1) for examples in zip(tensors, *others, strict=True))
        all_dims = (-1,) * len(tensors)
        one_dim = (-1, *(None for _ in tensors[1:]))
        for name, in_dims, given in (
            ("all tensors", all_dims, batch),
            ("the first tensor", one_dim, (batch[0], *tensors[1:])),
        ):
            what = f"{sample.name}, vmap over {name}"
            _compare(what, torch.func.vmap(ours, in_dims), _loop(reference, in_dims), given)
        mapped, looped = torch.func.vmap(grad(ours), all_dims), _loop(grad(reference), all_dims)
        _compare(f"{sample.name}, vmap(grad)", mapped, looped, batch)
