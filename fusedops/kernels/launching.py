"""Launches that cost the host little: what Triton's dispatch decides is decided once for each kind of call.

Triton chooses the compiled kernel by its arguments: types, alignment of pointers, which numbers are 1 or multiples of
16. That choice takes longer than many kernels, and grows with the number of arguments. Here a call is recognised by its
numbers and by types and alignment of its tensors, and goes to the compiled kernel that Triton chose the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

_ALIGNMENT = 16  # bytes: where Triton may use its widest loads
_MOST = 8192  # kinds of call to remember: a program of ever new shapes must not grow without bound
_Launch = Callable[[int, tuple[Tensor | None, ...]], None]
_launches: dict[tuple[Any, ...], _Launch] = {}


def ceil_div(n: int, divisor: int) -> int:
    """n / divisor, rounded up. (triton.cdiv takes a microsecond outside of a kernel.)"""
    return -(-n // divisor)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, for n of at least 1."""
    return 1 << (n - 1).bit_length()


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
    known = _launches.get(key)
    if known is not None:
        known(programs, tensors)
        return
    compiled = kernel[(programs,)](*tensors, *numbers, num_warps=num_warps, num_stages=num_stages, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_launches) >= _MOST:
            _launches.clear()
        rest = (*numbers, *(constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]))
        _launches[key] = _launch_of(compiled, rest, tensors[0].get_device())  # type: ignore[union-attr]


def _launch_of(compiled: Any, rest: tuple[Any, ...], device: int) -> _Launch:
    """Launches a compiled kernel with its tensors and the `rest` of its arguments.

    What Triton's own `compiled[grid](...)` does at each call, but for what is the same at every call. Where a profiler
    (Proton) has hooked into launches, as it may at any time, the call is left to Triton.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, runtime = triton.runtime.driver.active.get_current_stream, triton.knobs.runtime

    def launch(programs: int, tensors: tuple[Tensor | None, ...]) -> None:
        if _hooked(runtime.launch_enter_hook) or _hooked(runtime.launch_exit_hook):
            compiled[(programs, 1, 1)](*tensors, *rest)
        else:
            run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *tensors, *rest)

    return launch


def _hooked(hook: Any) -> bool:
    """Whether there is a hook: None, a function, or a chain of functions, by Triton's version."""
    return bool(getattr(hook, "calls", hook))
