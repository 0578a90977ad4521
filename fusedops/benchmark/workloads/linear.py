"""Workload of linear_gelu_dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops.benchmark.comparison import Contender, Outputs, WrongResult
from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.common import Settings, Work, Workload, by_name, in_float64, wanted


def linear_gelu_dropout(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    m, k, n = (shape[name] for name in "mkn")
    dtype = getattr(torch, row.dtype)
    p, approximate, training = (row.options[name] for name in ("p", "approximate", "training"))
    dropping = training and p > 0
    x = torch.randn(m, k, device=settings.device, dtype=dtype)
    weight = torch.randn(n, k, device=settings.device, dtype=dtype) * k**-0.5
    bias = torch.randn(n, device=settings.device, dtype=dtype)
    work = Work(row, (x, weight, bias), (m, n), settings)

    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fusedops.linear_gelu_dropout(x, weight, bias, p=p, approximate=approximate, training=training)

    def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.gelu(F.linear(x, weight, bias), approximate=approximate)
        return F.dropout(y, p, training) if dropping else y

    contenders = work.usual(fused, stock)
    if wanted("cuBLASLt epilogue", row, settings):
        transposed = weight.t()
        contenders.append(
            Contender(
                "cuBLASLt epilogue",
                lambda: torch._addmm_activation(bias, x, transposed, use_gelu=True),
                path="cublas",
            )
        )
    if wanted("products alone", row, settings):
        contenders.append(Contender("products alone", _products_alone(work), path="cublas", role="bound"))

    @functools.cache
    def reference_without_mask() -> tuple[Tensor, ...]:
        return in_float64(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate=approximate), work.inputs, work.dy)

    def errors(outputs: Outputs) -> dict[str, float]:
        names = ("y", "dx", "dweight", "dbias")
        if not dropping:
            return by_name(names, outputs, reference_without_mask())
        # Each contender draws its own mask: the reference is taken with the one that its output shows.
        kept = outputs[0].detach() != 0
        check_share_dropped(1 - float(kept.double().mean()), p, kept.numel())

        def with_mask(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.gelu(F.linear(x, weight, bias), approximate=approximate) * (kept.double() / (1 - p))

        return by_name(names, outputs, in_float64(with_mask, work.inputs, work.dy))

    return Workload(contenders, errors)


def check_share_dropped(share: float, p: float, count: int) -> None:
    """Six standard deviations, and one in ten thousand for outputs that are zero without being dropped."""
    if abs(share - p) > 6 * math.sqrt(p * (1 - p) / count) + 1e-4:
        raise WrongResult(f"the share dropped is {share:.5f}, p is {p}")


def _products_alone(work: Work) -> Callable[[], Any]:
    """The matrix products of the row and nothing else."""
    x, weight, _ = (tensor.detach() for tensor in work.inputs)
    dz = work.dy
    if dz is None:
        return lambda: x @ weight.t()
    return lambda: (x @ weight.t(), dz @ weight, dz.t() @ x)
