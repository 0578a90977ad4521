"""Checks of an operator's gradients, of the first three orders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fusedops.testing.accuracy import GRADIENT_FACTOR, assert_accurate, assert_same, stock_dtype
from fusedops.testing.subject import Args, Function, NotApplicable, Subject, cast, size, with_gradient

SLOW_MODE_ELEMENTS = 64
"""Up to this many elements gradcheck computes the whole Jacobian, past it two products with random vectors."""


def _gradients(function: Function, tensors: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = tuple(t.detach().requires_grad_() for t in tensors)
    return torch.autograd.grad(function(*leaves), leaves, cotangents, materialize_grads=True)


def _assert_gradients(
    subject: Subject, what: str, args: Args, dtype: torch.dtype, cotangent: Callable[[Tensor], Tensor]
) -> None:
    ours, reference, tensors = subject.restricted(args)
    cotangents = tuple(cotangent(output) for output in ours(*tensors))
    stock = stock_dtype(dtype)
    results = (
        _gradients(ours, tensors, cotangents),
        _gradients(reference, cast(tensors, torch.float64), cast(cotangents, torch.float64)),
        _gradients(reference, cast(tensors, stock), cast(cotangents, stock)),
    )
    for i, (tensor, *gradients) in enumerate(zip(tensors, *results, strict=True)):
        assert gradients[0].dtype == tensor.dtype, (
            f"{what}: gradient {i} is {gradients[0].dtype}, its input {tensor.dtype}"
        )
        assert_accurate(f"{what}, gradient {i}", *gradients, dtype=dtype, factor=GRADIENT_FACTOR)


def gradients(subject: Subject) -> None:
    """Every sample's gradients in every dtype against the reference's in float64."""
    subject.require_gradient()
    for dtype in subject.dtypes:
        for sample in subject.samples(dtype):
            _assert_gradients(subject, f"{sample.name}, {dtype}", sample.args, dtype, torch.randn_like)


def _expanded_in_one_dimension(output: Tensor) -> Tensor:
    if output.dim() == 0:
        return torch.randn_like(output)
    return torch.randn_like(output[:1]).expand_as(output)


def _every_other_element(output: Tensor) -> Tensor:
    padded = torch.randn(*output.shape, 2, dtype=output.dtype, device=output.device)
    return padded[..., 0]


def _reversed_strides(output: Tensor) -> Tensor:
    shape = tuple(reversed(output.shape))
    return torch.randn(shape, dtype=output.dtype, device=output.device).permute(*reversed(range(output.dim())))


def gradient_layouts(subject: Subject) -> None:
    """Gradients that arrive with stride 0 (what out.sum() sends back), expanded, sliced or transposed."""
    subject.require_gradient()
    for dtype in subject.sparing_dtypes:
        for sample in subject.few(dtype):
            for name, cotangent in (
                (
                    "of out.sum()",
                    lambda output: torch.ones((), dtype=output.dtype, device=output.device).expand_as(output),
                ),
                ("expanded", _expanded_in_one_dimension),
                ("sliced", _every_other_element),
                ("transposed", _reversed_strides),
            ):
                _assert_gradients(subject, f"{sample.name}, {dtype}, gradient {name}", sample.args, dtype, cotangent)


def no_gradient(subject: Subject) -> None:
    """An operator without a gradient raises when asked for one: it never leaves None or zero behind in silence."""
    if subject.operator.backward is not None:
        raise NotApplicable("the operator has a gradient")
    sample = subject.few(subject.dtypes[-1], 1)[0]
    for output in subject.call(*with_gradient(sample.args)):
        if output.requires_grad:
            try:
                output.sum().backward()
            except RuntimeError as error:
                assert subject.operator.name in str(error), f"the message does not name the operator: {error}"
            else:
                raise AssertionError("backward() through the operator went through")


def finite_differences(subject: Subject) -> None:
    """gradcheck in float64."""
    subject.require_gradient()
    for sample in subject.few(torch.float64, dense=True):
        ours, _, tensors = subject.restricted(sample.args)
        fast = size(sample.args) > SLOW_MODE_ELEMENTS
        gradcheck(ours, tuple(t.detach().requires_grad_() for t in tensors), fast_mode=fast)


def second_finite_differences(subject: Subject) -> None:
    """gradgradcheck in float64."""
    subject.require_gradient()
    for sample in subject.few(torch.float64, dense=True):
        ours, _, tensors = subject.restricted(sample.args)
        gradgradcheck(ours, tuple(t.detach().requires_grad_() for t in tensors), fast_mode=True)


def _orders(
    function: Function, tensors: tuple[Tensor, ...], cotangents: list[list[Tensor]]
) -> list[tuple[Tensor, ...]]:
    """The gradients of each order: of a weighted sum of the last one's, in the inputs and in all weights so far."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    results: list[tuple[Tensor, ...]] = []
    current = function(*leaves)
    for weights in cotangents:
        weights = [w.detach().requires_grad_() for w in weights[: len(current)]]
        total = sum(((w * c).sum() for w, c in zip(weights, current, strict=True)), start=torch.zeros(()))
        leaves += weights
        current = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        results.append(current)
    return results


def third_order(subject: Subject) -> None:
    """Gradients of orders one to three in float64 against the reference's, in inputs and in gradients sent back."""
    subject.require_gradient()
    for sample in subject.few(torch.float64):
        ours, reference, tensors = subject.restricted(sample.args)
        shapes: list[Tensor] = list(ours(*tensors))
        cotangents: list[list[Tensor]] = []
        leaves = list(tensors)
        for _ in range(3):
            cotangents.append([torch.randn_like(t) for t in shapes])
            leaves += cotangents[-1]
            shapes = leaves
        single = [[w.float() for w in weights] for weights in cotangents]
        results = (
            _orders(ours, tensors, cotangents),
            _orders(reference, tensors, cotangents),
            _orders(reference, cast(tensors, torch.float32), single),
        )
        for order, gradients in enumerate(zip(*results, strict=True), 1):
            for i, triple in enumerate(zip(*gradients, strict=True)):
                what = f"{sample.name}, order {order}, gradient {i}"
                assert_accurate(what, *triple, dtype=torch.float64, factor=GRADIENT_FACTOR)


def repeated_backward(subject: Subject) -> None:
    """Two backwards over one graph give the same gradients: what was saved is not overwritten."""
    subject.require_gradient()
    for dtype in subject.sparing_dtypes:
        for sample in subject.few(dtype):
            ours, _, tensors = subject.restricted(sample.args)
            leaves = tuple(t.detach().requires_grad_() for t in tensors)
            outputs = ours(*leaves)
            cotangents = tuple(torch.randn_like(output) for output in outputs)
            first, second = (
                torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, materialize_grads=True)
                for _ in range(2)
            )
            for i, (a, b) in enumerate(zip(first, second, strict=True)):
                assert_same(f"{sample.name}, {dtype}, gradient {i} of the second backward", a, b)
