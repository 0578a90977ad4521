"""Workloads of the pointwise operators: silu, silu_mul, smooth_relu."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops.benchmark.comparison import Contender, Outputs
from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.common import Function, Settings, Work, Workload, in_float64, wanted


def _pointwise(
    row: Row, shape: dict[str, int], settings: Settings, fused: Function, stock: Function, names: tuple[str, ...]
) -> tuple[Work, Workload]:
    size = (shape["rows"], shape["columns"])
    dtype = getattr(torch, row.dtype)
    inputs = tuple(torch.randn(size, device=settings.device, dtype=dtype) for _ in names)
    work = Work(row, inputs, size, settings)
    contenders = work.usual(fused, stock)
    if not work.backward:
        target = torch.empty_like(inputs[0])
        contenders.append(Contender("copy", lambda: target.copy_(inputs[0]), role="bound"))

    def errors(outputs: Outputs) -> dict[str, float]:
        # In slices of rows: float64 is four times the memory, and there are several of them.
        squares = torch.zeros(len(outputs), 2, dtype=torch.float64, device=settings.device)
        for start in range(0, size[0], 2**12):
            part = slice(start, start + 2**12)
            dy = None if work.dy is None else work.dy[part]
            references = in_float64(stock, tuple(tensor[part] for tensor in inputs), dy)
            for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
                squares[index, 0] += (output[part].detach().double() - reference).square().sum()
                squares[index, 1] += reference.square().sum()
        ratios = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
        return dict(zip(("y", *(f"d{name}" for name in names)), ratios, strict=False))

    return work, Workload(contenders, errors)


def silu(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    return _pointwise(row, shape, settings, fusedops.silu, F.silu, ("x",))[1]


def _stock_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu_mul(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    work, workload = _pointwise(row, shape, settings, fusedops.silu_mul, _stock_silu_mul, ("gate", "up"))
    # Of a product of two inputs, a copy is not the bound that it is of one.
    contenders = [contender for contender in workload.contenders if contender.name != "copy"]
    if wanted("Liger", row, settings) and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # Its backward overwrites what it saved, which here are the inputs: it gets its own, restored before each call.
        own = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in work.inputs)

        def restore() -> None:
            with torch.no_grad():
                for mine, original in zip(own, work.inputs, strict=True):
                    mine.copy_(original)

        contenders.append(
            Contender(
                "Liger",
                work.call(LigerSiLUMulFunction.apply, own),
                path="triton",
                prepare=restore if work.backward else None,
            )
        )
    return Workload(contenders, workload.errors)


def smooth_relu(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    alpha = row.options["alpha"]
    return _pointwise(
        row,
        shape,
        settings,
        lambda x: fusedops.smooth_relu(x, alpha),
        lambda x: torch.where(x > 0, x, alpha * x),
        ("x",),
    )[1]
