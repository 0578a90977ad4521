"""Launches that cost the host little: what Triton's dispatch decides is decided once for each kind of call.

Triton chooses the compiled kernel by its arguments: types, alignment of pointers, which numbers are 1 or multiples of
16. That choice takes longer than many kernels, and grows with the number of arguments. Here a call is recognised by its
numbers and by types and alignment of its tensors, and goes to the compiled kernel that Triton chose the first time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_ALIGNMENT = 16  # bytes: where Triton may use its widest loads
_MOST = 8192  # kinds of call to remember: a program of ever new shapes must not grow without bound
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    num_warps: int,
    num_stages: int = 3,
    **constants: Any,
) -> None:
    """Launch a Triton kernel on the current device as a grid of `programs`.

    The kernel's parameters are the tensors, then the numbers, then the constants (tl.constexpr), these in any order.
    Raises what Triton raises, OutOfResources for a kernel that does not fit this GPU among it.
    """
    pointers = [None if t is None else (t.dtype, t.data_ptr() % _ALIGNMENT == 0) for t in tensors]
    key = (id(kernel), tensors[0].get_device(), num_warps, num_stages, numbers, *constants.values(), *pointers)  # type: ignore[union-attr]
    compiled = _compiled.get(key)
    if compiled is not None:
        ordered = [constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
        compiled[(programs, 1, 1)](*tensors, *numbers, *ordered)
        return
    compiled = kernel[(programs,)](*tensors, *numbers, num_warps=num_warps, num_stages=num_stages, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled
