"""What the checks ask of the operator under test: its samples in every dtype, its results and the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops.registration import FLOATING, INTERPRETING, Operator, Sample
from fusedops.tensor_lists import map_tensors, tensors_in

Args = tuple[Any, ...]
Function = Callable[..., tuple[Tensor, ...]]


class NotApplicable(Exception):
    """Raised by a check that has nothing to check in this operator; its message says why."""


ELEMENTS_FOR_ERROR = 256
"""Stock's own error is measured on so many elements of a sample, by drawing it again, at most MOST_DRAWS times."""
MOST_DRAWS = 8


class Subject:
    """An operator on a device, in the dtypes that can be checked there."""

    def __init__(self, operator: Operator, device: torch.device):
        self.operator = operator
        self.device = device
        self._draws: dict[torch.dtype, list[dict[str, Args]]] = {}

    @property
    def interpreted(self) -> bool:
        """Whether the kernels run, in Triton's interpreter."""
        return INTERPRETING and self.device.type == "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The floating dtypes that the operator has samples in and whose kernels run on this device."""
        possible = self.operator.interpreted_dtypes if self.interpreted else FLOATING
        return tuple(dtype for dtype in possible if self.samples(dtype))

    @property
    def sparing_dtypes(self) -> tuple[torch.dtype, ...]:
        """`dtypes`, or in the interpreter float32 alone: for
        checks whose outcome hardly depends on the dtype."""
        return tuple(dtype for dtype in self.dtypes if not self.interpreted or dtype == torch.float32)

    def require(self, dtype: torch.dtype) -> torch.dtype:
        """`dtype`. Raises NotApplicable where the operator cannot be checked in it."""
        if dtype not in self.dtypes:
            raise NotApplicable(f"no samples in {dtype}")
        return dtype

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        """Fresh samples, every argument given; two calls give the same names and shapes, and other random values."""
        defaults = tuple(argument.default_value for argument in self.operator.op._schema.arguments)
        drawn = self.operator.samples(self.device, dtype)
        return [Sample(name, (*args, *defaults[len(args) :])) for name, args in drawn]

    def few(self, dtype: torch.dtype, count: int | None = None, *, dense: bool = False) -> list[Sample]:
        """The smallest sample of each variant (arguments that differ in more than size) that has something to compute,
        and the smallest one that is not contiguous: at most `count`, for checks that are expensive.

        count: by default 4, or 2 in the interpreter, where a program takes milliseconds.
        dense: leave out tensors some of whose elements share memory.
        """
        if count is None:
            count = 2 if self.interpreted else 4
        chosen: dict[Any, Sample] = {}
        for sample in sorted(self.samples(self.require(dtype)), key=lambda sample: size(sample.args)):
            tensors = list(tensors_in(sample.args))
            shares = any(n > 1 and s == 0 for t in tensors for n, s in zip(t.shape, t.stride(), strict=True))
            if any(a.is_floating_point() and a.numel() == 0 for a in tensors) or (dense and shares):
                continue
            if max((a.numel() for a in tensors), default=0) <= 1:
                continue
            variant = _hashable(map_tensors(type, sample.args))
            contiguous = all(a.is_contiguous() for a in tensors)
            chosen.setdefault(variant if contiguous else "not contiguous", sample)
        if not chosen:
            raise NotApplicable("no sample has more than one element")
        return list(chosen.values())[:count]

    def again(self, sample: Sample, count: int) -> list[Args]:
        """The same sample `count` times, its floating tensors with other random values."""
        dtype = next((t.dtype for t in floating(sample.args)), torch.float32)
        draws = self._draws.setdefault(dtype, [])
        while len(draws) < count:
            draws.append(dict(self.samples(dtype)))
        return [with_floating(sample.args, floating(draw[sample.name])) for draw in draws[:count]]

    def further(self, sample: Sample) -> list[Args]:
        """As many other draws of a small sample as make stock's own error on it more than luck."""
        return self.again(sample, min(MOST_DRAWS, ELEMENTS_FOR_ERROR // max(size(sample.args), 1)))

    def require_gradient(self) -> None:
        """Raises NotApplicable for an operator that has none."""
        if self.operator.backward is None:
            raise NotApplicable("the operator has no gradient")

    def call(self, *args: Any) -> tuple[Tensor, ...]:
        """The operator's outputs, always a tuple; of one that writes to arguments, copies of these, written to."""
        if not self.operator.mutated:
            return _tuple(self.operator.op(*args))
        copied = list(args)
        for i in self.operator.mutated:
            copied[i] = [_copy(t) for t in args[i]] if isinstance(args[i], list | tuple) else _copy(args[i])
        self.operator.op(*copied)
        return tuple(tensors_in([copied[i] for i in self.operator.mutated]))

    def reference(self, *args: Any) -> tuple[Tensor, ...]:
        """The reference's outputs, always a tuple."""
        return _tuple(self.operator.reference(*args))

    def differentiable_outputs(self, args: Args) -> tuple[int, ...]:
        """Which outputs carry a gradient."""
        if self.operator.mutated:
            return ()
        with FakeTensorMode() as mode:
            fake = map_tensors(mode.from_tensor, args)
            outputs = self.call(*with_gradient(fake))
        return tuple(i for i, output in enumerate(outputs) if output.requires_grad)

    def restricted(self, args: Args) -> tuple[Function, Function, tuple[Tensor, ...]]:
        """Operator and reference as functions of the floating tensors in `args`, giving the differentiable outputs, and
        these tensors."""
        kept = self.differentiable_outputs(args)
        if not kept:
            raise NotApplicable("no output carries a gradient")
        return *self.with_outputs(args, kept), floating(args)

    def with_outputs(self, args: Args, kept: Sequence[int]) -> tuple[Function, Function]:
        """Operator and reference as functions of the floating tensors in `args`, giving some outputs (all, if none)."""

        def restrict(function: Function) -> Function:
            def restricted(*tensors: Tensor) -> tuple[Tensor, ...]:
                outputs = function(*with_floating(args, tensors))
                return tuple(outputs[i] for i in kept or range(len(outputs)))

            return restricted

        return restrict(self.call), restrict(self.reference)

    def argument_names(self) -> list[str]:
        """The schema's argument names, in order."""
        return [argument.name for argument in self.operator.op._schema.arguments]


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _hashable(a: Any) -> Any:
    return tuple(map(_hashable, a)) if isinstance(a, list | tuple) else a


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def is_floating(a: Any) -> bool:
    """Whether `a` is a floating tensor: what gradients and casts are about."""
    return isinstance(a, Tensor) and a.is_floating_point()


def size(args: Args) -> int:
    """Elements of all tensors together."""
    return sum(t.numel() for t in tensors_in(args))


def floating(args: Args) -> tuple[Tensor, ...]:
    """The floating tensors in `args`."""
    return tuple(t for t in tensors_in(args) if is_floating(t))


def with_floating(args: Args, tensors: Sequence[Tensor]) -> Args:
    """`args` with its floating tensors replaced, in order."""
    replacements: Iterator[Tensor] = iter(tensors)
    return map_tensors(lambda t: next(replacements) if is_floating(t) else t, args)


def cast(args: Sequence[Any], dtype: torch.dtype) -> Args:
    """`args` with its floating tensors in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if is_floating(t) else t, args)


def with_gradient(args: Args) -> Args:
    """`args` with its floating tensors as leaves that want a gradient, strides kept."""
    return map_tensors(lambda t: t.detach().requires_grad_() if is_floating(t) else t, args)
