"""Checks of an operator's gradients, of the first three orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fusedops.registration import Sample
from fusedops.testing.accuracy import GRADIENT_FACTOR, assert_accurate, assert_same
from fusedops.testing.subject import Args, Function, NotApplicable, Subject, floating, size, with_gradient

SLOW_MODE_ELEMENTS = 64
"""Up to this many elements gradcheck computes the whole Jacobian, past it two products with random vectors."""
HIGHEST_ORDER = 3


def _gradients(function: Function, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    leaves = tuple(t.detach().requires_grad_() for t in tensors)
    return torch.autograd.grad(function(*leaves), leaves, cotangents, materialize_grads=True)


def _assert_gradients(
    subject: Subject, what: str, sample: Sample, dtype: torch.dtype, cotangent: Callable[[Tensor], Tensor]
) -> None:
    ours, reference, tensors = subject.restricted(sample.args)
    outputs = ours(*tensors)

    def draw(args: Args) -> tuple[Tensor, ...]:
        return (*floating(args), *map(cotangent, outputs))

    def of_reference(*inputs: Tensor) -> tuple[Tensor, ...]:
        return _gradients(reference, inputs[: len(tensors)], inputs[len(tensors) :])

    inputs = draw(sample.args)
    results = _gradients(ours, tensors, inputs[len(tensors) :])
    for i, (gradient, tensor) in enumerate(zip(results, tensors, strict=True)):
        assert gradient.dtype == tensor.dtype, f"{what}: gradient {i} is {gradient.dtype}, its input {tensor.dtype}"
    further = [draw(args) for args in subject.further(sample)]
    assert_accurate(what, results, of_reference, inputs, dtype=dtype, factor=GRADIENT_FACTOR, further=further)


def gradients(subject: Subject) -> None:
    """Every sample's gradients in every dtype against the reference's in float64 (in the interpreter every sample in
    float32, few in the others)."""
    subject.require_gradient()
    for dtype in subject.dtypes:
        for sample in subject.samples(dtype) if dtype in subject.sparing_dtypes else subject.few(dtype):
            _assert_gradients(subject, f"{sample.name}, {dtype}", sample, dtype, torch.randn_like)


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
                _assert_gradients(subject, f"{sample.name}, {dtype}, gradient {name}", sample, dtype, cotangent)


def no_gradient(subject: Subject) -> None:
    """An operator without a gradient raises when asked for one: it never leaves None or zero behind in silence."""
    if subject.operator.backward is not None:
        raise NotApplicable("the operator has a gradient")
    sample = subject.few(subject.dtypes[-1], 1)[0]
    try:
        for output in subject.call(*with_gradient(sample.args)):
            if output.requires_grad:
                output.sum().backward()
                raise AssertionError("backward() through the operator went through")
    except RuntimeError as error:  # already of the call, where the operator writes to an argument
        assert subject.operator.name in str(error), f"the message does not name the operator: {error}"
    else:
        assert not subject.operator.mutated, "the operator wrote to a tensor that requires a gradient"


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
    for sample in subject.few(torch.float64, 1 if subject.interpreted else 4, dense=True):
        ours, _, tensors = subject.restricted(sample.args)
        gradgradcheck(ours, tuple(t.detach().requires_grad_() for t in tensors), fast_mode=True)


def _orders(function: Function, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of each order: of a weighted sum of the last one's, in the tensors and in all weights so far."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    remaining = iter(weights)
    current = function(*leaves)
    results: list[Tensor] = []
    for _ in range(HIGHEST_ORDER):
        chosen = [next(remaining).detach().requires_grad_() for _ in current]
        total = torch.stack([(w * c).sum() for w, c in zip(chosen, current, strict=True)]).sum()
        leaves += chosen
        current = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        results += current
    return tuple(results)


def _weights(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Random weights of the outputs, then of each order's gradients."""
    weights: list[Tensor] = []
    current = outputs
    for _ in range(HIGHEST_ORDER):
        weights += [torch.randn_like(t) for t in current]
        current = [*tensors, *weights]
    return tuple(weights)


def third_order(subject: Subject) -> None:
    """Gradients of orders one to three in float64 against the reference's, in inputs and in gradients sent back."""
    subject.require_gradient()
    for sample in subject.few(torch.float64):
        ours, reference, tensors = subject.restricted(sample.args)
        outputs = ours(*tensors)
        count = len(tensors)

        def draw(args: Args, outputs: tuple[Tensor, ...] = outputs) -> tuple[Tensor, ...]:
            return (*floating(args), *_weights(outputs, floating(args)))

        def of_reference(*t: Tensor, reference: Function = reference, count: int = count) -> tuple[Tensor, ...]:
            return _orders(reference, t[:count], t[count:])

        inputs = draw(sample.args)
        assert_accurate(
            sample.name,
            _orders(ours, tensors, inputs[count:]),
            of_reference,
            inputs,
            dtype=torch.float64,
            factor=GRADIENT_FACTOR,
            further=map(draw, subject.further(sample)),
        )


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
