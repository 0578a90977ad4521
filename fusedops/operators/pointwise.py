"""What the pointwise operators share: checks, the layout rule, samples, cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedops import counting
from fusedops.registration import FLOATING, Cost, Sample


def check_floating(operator: str, **tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless the tensors are floating, of one dtype, shape and device."""
    (first_name, first), *others = tensors.items()
    if first.dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"{operator}: {first_name} is {first.dtype}; allowed: {allowed}")
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{operator}: {name} is {tensor.dtype}, {first_name} is {first.dtype}; they must be of one dtype"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"{operator}: {name} has shape {tuple(tensor.shape)}, {first_name} {tuple(first.shape)}; "
                "they must be of one shape"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{operator}: {name} is on {tensor.device}, {first_name} on {first.device}; they must be on one device"
            )


def check_number(operator: str, name: str, value: object) -> None:
    """Raise TypeError where a tensor stands for a number: the dispatcher would take its value and lose its gradient."""
    if isinstance(value, Tensor):
        raise TypeError(f"{operator}: {name} is a tensor; allowed: a number, which has no gradient")


def check_handed_over(operator: str, **tensors: Tensor) -> None:
    """Count a hand-over to the compiler, after the checks of `check_floating`: stock operations broadcast and promote.

    Under autocast dtypes may differ, as for the operator.
    """
    first, *_ = tensors.values()
    if torch.is_autocast_enabled(first.device.type):
        dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors.values()])
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    check_floating(operator, **tensors)
    counting.record_hand_over(operator)


def in_layout_of(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` with the strides of `model`, a dense tensor of its shape: itself where they agree, otherwise a copy."""
    ours, wanted = tensor.stride(), model.stride()
    if ours == wanted or all(a == b for n, a, b in zip(model.shape, ours, wanted, strict=True) if n > 1):
        return tensor
    return torch.empty_like(model).copy_(tensor)


def computing(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype of the arithmetic: float64 stays, all others become float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def layouts(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Fresh random tensors of the shapes and strides that pointwise operators meet, each with its name."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield "vector", randn(63)
    yield "matrix", randn(5, 7)
    yield "past one block", randn(3, 1111)
    yield "transposed", randn(7, 5).t()
    yield "sliced", randn(9, 12)[1::2, ::3]
    yield "expanded", randn(1, 7).expand(5, 7)
    yield "channels last", randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "permuted", randn(2, 3, 4).permute(2, 0, 1)
    yield "scalar", randn()
    yield "one element", randn(1)
    yield "empty", randn(0)
    yield "empty matrix", randn(3, 0, 2)


def samples(count: int, *rest: object, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of an operator of `count` tensors: every layout, and every layout beside a contiguous partner."""
    for name, tensor in layouts(device, dtype):
        yield Sample(name, (*(torch.randn_like(tensor) if i else tensor for i in range(count)), *rest))
        if count > 1 and not tensor.is_contiguous():
            contiguous = torch.randn(tensor.shape, device=device, dtype=dtype)
            yield Sample(f"{name}, mixed", (contiguous, *(tensor for _ in range(count - 1)), *rest))


def cost(elements: int, itemsize: int, *, tensors: int, flops: int) -> Cost:
    """The cost of one pass that touches `tensors` tensors once, with `flops` operations an element."""
    return Cost(flops=flops * elements, bytes=tensors * elements * itemsize)
