"""Checks of what many tensors are like, which the next step of a training asks of the same tensors again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor

_MOST = 1024  # arguments to remember: a program of ever new shapes must not grow without bound
_kind = attrgetter("dtype", "device", "shape")


def kinds(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Of each tensor (dtype, device, shape)."""
    return tuple(map(_kind, tensors))


def strides(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Of each tensor its strides."""
    return tuple(map(Tensor.stride, tensors))


def checked_once(check: Callable[..., None]) -> Callable[..., None]:
    """`check`, which depends on nothing but its arguments, for those that it has not passed yet."""
    passed: set[tuple[Any, ...]] = set()

    @functools.wraps(check)
    def run(*args: Any) -> None:
        try:
            known = args in passed
        except TypeError:  # sizes that are symbols of a compiler have no hash
            check(*args)
            return
        if not known:
            check(*args)
            if len(passed) >= _MOST:
                passed.clear()
            passed.add(args)

    return run
