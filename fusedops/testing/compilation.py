"""Checks of an operator under torch.compile and torch.library.opcheck."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fusedops.testing.accuracy import GRADIENT_FACTOR, assert_accurate
from fusedops.testing.subject import Args, NotApplicable, Subject, floating, with_gradient
from fusedops.testing.transforms import grad, jvp

CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(subject: Subject) -> None:
    """torch.library.opcheck of every sample in every dtype, with AOT dispatch for those of `few`."""
    for dtype in subject.sparing_dtypes:
        for sample in subject.samples(dtype):
            args = sample.args if subject.operator.mutated else with_gradient(sample.args)
            torch.library.opcheck(subject.operator.op, args, test_utils=CHEAP)


def opcheck_aot(subject: Subject) -> None:
    """torch.library.opcheck's AOT dispatch with dynamic shapes, forward and backward."""
    for sample in subject.few(subject.dtypes[-1], 1 if subject.interpreted else 3):
        args = with_gradient(sample.args) if subject.operator.backward is not None else sample.args
        torch.library.opcheck(subject.operator.op, args, test_utils="test_aot_dispatch_dynamic")


def _results(function: Callable[..., Any], args: Args, differentiable: Sequence[int]) -> list[Tensor]:
    """The outputs, and the gradients of the sum of the squares of the differentiable ones."""
    leaves = with_gradient(args) if differentiable else args
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if differentiable:
        total = torch.stack([outputs[i].square().sum() for i in differentiable]).sum()
        outputs += torch.autograd.grad(total, floating(leaves), materialize_grads=True)
    return outputs


def _assert_compiles(subject: Subject, backend: str, *, dynamic: bool) -> None:
    """Forward and backward, twice at one shape: the reference's results, and no compilation in the second call."""
    sample = subject.few(subject.require(torch.float64), 1)[0]
    differentiable = subject.differentiable_outputs(sample.args) if subject.operator.backward is not None else ()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *args: subject.call(*args), backend=counter, fullgraph=True, dynamic=dynamic)
    compilations = []
    for args in subject.again(sample, 2):
        ours = _results(compiled, args, differentiable)
        compilations.append(counter.frame_count)
        assert_accurate(
            sample.name,
            ours,
            lambda *args: _results(subject.reference, args, differentiable),
            args,
            dtype=torch.float64,
            factor=GRADIENT_FACTOR,
            further=subject.further(sample),
        )
    assert compilations[0] == compilations[1], "the second call at the same shape compiled again"


def compile_static(subject: Subject) -> None:
    """torch.compile(fullgraph=True), forward and backward: right, and no second compilation at a repeated shape."""
    _assert_compiles(subject, "aot_eager", dynamic=False)


def compile_dynamic(subject: Subject) -> None:
    """The same with dynamic shapes."""
    _assert_compiles(subject, "aot_eager", dynamic=True)


def compile_inductor(subject: Subject) -> None:
    """The same through Inductor, where a C++ compiler is found."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise NotApplicable("no C++ compiler")
    _assert_compiles(subject, "inductor", dynamic=False)


def compile_transforms(subject: Subject) -> None:
    """torch.func.grad(grad), and jvp where there is one, inside torch.compile."""
    subject.require_gradient()
    sample = subject.few(subject.require(torch.float64), 1)[0]
    ours, reference, tensors = subject.restricted(sample.args)
    transforms = {"grad(grad)": lambda function: grad(grad(function))}
    if subject.operator.jvp is not None:
        transforms["jvp"] = jvp
    for name, transform in transforms.items():
        torch._dynamo.reset()
        assert_accurate(
            f"{sample.name}, {name}",
            torch.compile(transform(ours), backend="aot_eager", fullgraph=True)(*tensors),
            transform(reference),
            tensors,
            dtype=torch.float64,
            factor=GRADIENT_FACTOR,
            further=map(floating, subject.further(sample)),
        )
