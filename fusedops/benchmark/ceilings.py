"""What the machine can do, measured in the same run, and what a row's work must cost at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fusedops.benchmark.comparison import Contender, compare, decisive
from fusedops.benchmark.schema import Ceilings, Floor, Method
from fusedops.registration import NAMESPACE
from fusedops.registry import OPERATORS


def measure_ceilings(device: torch.device, dtypes: Sequence[str], method: Method, *, quick: bool = False) -> Ceilings:
    """Copy bandwidth and, of each dtype, the rate of a square product through the stock library, on random data."""
    elements, side = (1 << 20, 128) if quick else (1 << 28, 8192)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    contenders = [Contender("copy", lambda: target.copy_(source), role="baseline")]
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        contenders.append(Contender(dtype, lambda a=a, b=b: a @ b, role="bound"))  # type: ignore[misc]
    measured = compare(contenders, method=method, device=device)
    copy_ms = decisive(measured.contender("copy"))
    return Ceilings(
        copy_gb_s=2 * elements * source.itemsize / copy_ms / 1e6,
        gemm_tflop_s={dtype: 2 * side**3 / decisive(measured.contender(dtype)) / 1e9 for dtype in dtypes},
    )


class _CostCounter(TorchDispatchMode):
    """Adds up the cost that each operator of this library states of its calls, and of the stock products beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix(f"{NAMESPACE}::")
        if name in OPERATORS and func.namespace == NAMESPACE:
            defaults = [argument.default_value for argument in func._schema.arguments]
            cost = OPERATORS[name].cost(*args, *defaults[len(args) :])
            self.flops += cost.flops
            self.bytes += cost.bytes
        elif func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=outputs)
            tensors = [t for t in (*args, outputs) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.itemsize for t in tensors)
        return outputs


def floor_of(call: Callable[[], Any], ceilings: Ceilings, dtype: str) -> Floor:
    """The floor of the work that `call` does through operators of this library, by the cost they state.

    Raises RuntimeError where it runs none.
    """
    with _CostCounter() as counter:
        call()
    if counter.bytes == 0:
        raise RuntimeError("the call ran no operator of this library that states a cost")
    memory_ms = counter.bytes / ceilings.copy_gb_s / 1e6
    compute_ms = counter.flops / ceilings.gemm_tflop_s[dtype] / 1e9
    return Floor(
        flops=counter.flops,
        bytes=counter.bytes,
        ms=max(memory_ms, compute_ms),
        limit="memory" if memory_ms >= compute_ms else "compute",
    )
