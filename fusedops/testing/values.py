"""Checks of what an operator computes: values, shape rule, memory, autocast, errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops.registration import FLOATING
from fusedops.tensor_lists import map_tensors, tensors_in
from fusedops.testing.accuracy import GRADIENT_FACTOR, VALUE_FACTOR, assert_accurate, assert_same
from fusedops.testing.subject import (
    Args,
    NotApplicable,
    Subject,
    floating,
    with_floating,
    with_gradient,
)

NON_FINITE = (torch.nan, torch.inf, -torch.inf)


def values(subject: Subject) -> None:
    """Every sample in every dtype against the reference in float64."""
    for dtype in subject.dtypes:
        for sample in subject.samples(dtype):
            _assert_values(subject, f"{sample.name}, {dtype}", sample.args, dtype, subject.further(sample))


def _assert_values(subject: Subject, what: str, args: Args, dtype: torch.dtype, further: list[Args]) -> None:
    ours = subject.call(*args)
    assert_accurate(what, ours, subject.reference, args, dtype=dtype, factor=_factor(subject), further=further)


def _factor(subject: Subject) -> float:
    """An operator that computes gradients is held to what gradients are held to."""
    return GRADIENT_FACTOR if subject.operator.name.endswith("_backward") else VALUE_FACTOR


def shape_rule(subject: Subject) -> None:
    """The shape rule predicts shape, strides, dtype and device of every output of every sample."""
    for dtype in subject.sparing_dtypes:
        for sample in subject.samples(dtype):
            outputs = subject.call(*sample.args)
            with FakeTensorMode() as mode:
                predicted = subject.call(*map_tensors(mode.from_tensor, sample.args))
            for i, (output, rule) in enumerate(zip(outputs, predicted, strict=True)):
                for what in ("shape", "dtype", "device", "stride()"):
                    a, b = (t.stride() if what == "stride()" else getattr(t, what) for t in (output, rule))
                    assert a == b, f"{sample.name}, {dtype}, output {i}: {what} is {a}, by the shape rule {b}"


def non_finite(subject: Subject) -> None:
    """NaN and infinities at one element of each argument give the reference's, in every output that carries a gradient
    (in all, if none does)."""
    for dtype in subject.sparing_dtypes:
        for sample in subject.few(dtype):
            ours, reference = subject.with_outputs(sample.args, subject.differentiable_outputs(sample.args))
            for position, value in itertools.product(range(len(floating(sample.args))), NON_FINITE):
                tensors = list(floating(sample.args))
                tensors[position] = torch.empty_like(tensors[position]).copy_(tensors[position])
                tensors[position][tuple(n // 2 for n in tensors[position].shape)] = value
                assert_accurate(
                    f"{sample.name}, {dtype}, {value} in tensor {position}",
                    ours(*tensors),
                    reference,
                    tensors,
                    dtype=dtype,
                    factor=_factor(subject),
                    further=map(floating, subject.further(sample)),
                )


deterministic: Any = torch.utils.deterministic  # typed as a plain module, which cannot be assigned to


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Memory from torch.empty holds NaN instead of what happens to be there."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = before[2]


def unwritten_memory(subject: Subject) -> None:
    """Every element of every output is written: results are right with NaN in the memory that the outputs get."""
    with _poisoned_memory():
        for dtype in subject.sparing_dtypes:
            for sample in subject.samples(dtype):
                what = f"{sample.name}, {dtype}, poisoned memory"
                _assert_values(subject, what, sample.args, dtype, subject.further(sample))


def inputs_unwritten(subject: Subject) -> None:
    """No argument is written to, neither by the operator nor by its gradient."""
    dtype = subject.dtypes[-1]
    for sample in subject.samples(dtype):
        before = map_tensors(Tensor.clone, sample.args)
        outputs = subject.call(*(sample.args if subject.operator.mutated else with_gradient(sample.args)))
        kept = [output for output in outputs if output.requires_grad]
        if kept and subject.operator.backward is not None:
            cotangents = [torch.randn_like(output) for output in kept]
            saved = [cotangent.clone() for cotangent in cotangents]
            torch.autograd.backward(kept, cotangents)
            for a, b in zip(cotangents, saved, strict=True):
                assert_same(f"{sample.name}: the incoming gradient was written to", a, b)
        for name, given, kept_apart in zip(subject.argument_names(), sample.args, before, strict=True):
            for a, b in zip(tensors_in([given]), tensors_in([kept_apart]), strict=True):
                assert_same(f"{sample.name}: {name} was written to", a, b)


def autocast(subject: Subject) -> None:
    """Under autocast, dtypes and values are the reference's, and gradients have their inputs' dtypes."""
    lows = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in subject.dtypes]
    if not lows:
        raise NotApplicable("no samples in a half type")
    for low in lows:
        for sample in subject.few(subject.require(torch.float32), 2):
            for mixture in ("float32", "half", "first half", "last half"):
                args = _mixed(sample.args, low, mixture)
                _assert_autocast(subject, f"{sample.name}, {mixture} inputs, autocast {low}", args, low)


def _mixed(args: Args, low: torch.dtype, mixture: str) -> Args:
    tensors = list(floating(args))
    halves = {"float32": [], "half": range(len(tensors)), "first half": [0], "last half": [len(tensors) - 1]}
    for i in halves[mixture]:
        tensors[i] = tensors[i].to(low)
    return with_floating(args, tensors)


def _assert_autocast(subject: Subject, what: str, args: Args, low: torch.dtype) -> None:
    ours_args = with_gradient(args)
    with torch.autocast(subject.device.type, low):
        ours, stock = subject.call(*ours_args), subject.reference(*args)
    differentiable = [i for i, output in enumerate(ours) if output.requires_grad]
    for i in differentiable or range(len(ours)):
        assert ours[i].dtype == stock[i].dtype, f"{what}, output {i}: {ours[i].dtype}, reference {stock[i].dtype}"
    assert_accurate(what, ours, subject.reference, args, dtype=low, factor=_factor(subject))
    if subject.operator.backward is not None and differentiable:
        torch.autograd.backward([ours[i] for i in differentiable], [torch.ones_like(ours[i]) for i in differentiable])
        for name, given in zip(subject.argument_names(), ours_args, strict=True):
            for a in floating((given,)):
                if a.grad is not None:
                    what_of = f"{what}: the gradient of {name} is {a.grad.dtype}, {name} {a.dtype}"
                    assert a.grad.dtype == a.dtype, what_of


def wrong_dtypes(subject: Subject) -> None:
    """An integer tensor and a mixture of dtypes each raise before anything runs, naming an argument."""
    dtype = subject.dtypes[-1]
    other = next(d for d in FLOATING if d != dtype)
    sample = subject.few(dtype, 1)[0]
    tensors = floating(sample.args)
    _assert_refused(subject, with_floating(sample.args, [t.to(torch.int64) for t in tensors]), "int64 tensors")
    if len(tensors) > 1:
        mixed = with_floating(sample.args, [*tensors[:-1], tensors[-1].to(other)])
        _assert_refused(subject, mixed, f"{dtype} beside {other}")


def wrong_device(subject: Subject) -> None:
    """Tensors on different devices raise before anything runs, naming an argument."""
    if subject.device.type == "cpu":
        raise NotApplicable("needs a second device")
    sample = subject.few(subject.dtypes[-1], 1)[0]
    tensors = floating(sample.args)
    if len(tensors) < 2:
        raise NotApplicable("the operator has one tensor")
    _assert_refused(subject, with_floating(sample.args, [*tensors[:-1], tensors[-1].cpu()]), "a tensor on the CPU")


def _assert_refused(subject: Subject, args: Args, what: str) -> None:
    names = "|".join(map(re.escape, subject.argument_names()))
    try:
        subject.call(*args)
    except (TypeError, ValueError) as error:
        assert re.search(rf"\b({names})\b", str(error)), f"{what}: the message names no argument: {error}"
    else:
        raise AssertionError(f"{what}: accepted")
