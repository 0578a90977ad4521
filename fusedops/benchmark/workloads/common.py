"""What the operators' workloads share: inputs of a row, the ways to call a function on them, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops.benchmark.comparison import Contender, Outputs, relative_error
from fusedops.benchmark.rows import FORWARD, FORWARD_BACKWARD, Row

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Workload:
    """A row made ready: its contenders, and a contender's outputs -> the relative error of each, by name."""

    contenders: list[Contender]
    errors: Callable[[Outputs], dict[str, float]]


@dataclass(frozen=True)
class Settings:
    """What of a workload is chosen by whoever runs the benchmark.

    compiled      measure the torch.compile peers (a quick run leaves them out: they need a C++ compiler on a CPU).
    max_autotune  torch.compile in mode max-autotune too, which compiles for long.
    all_peers     every peer that runs, the ones known to be far behind included.
    """

    device: torch.device
    compiled: bool = True
    max_autotune: bool = False
    all_peers: bool = False


class Work:
    """Inputs of a row, and the ways to call a function on them in the row's direction."""

    def __init__(self, row: Row, inputs: tuple[Tensor, ...], output_shape: tuple[int, ...], settings: Settings) -> None:
        self.settings = settings
        self.backward = row.direction == FORWARD_BACKWARD
        self.inputs = tuple(tensor.requires_grad_(row.direction != FORWARD) for tensor in inputs)
        first = inputs[0]
        self.dy = torch.randn(output_shape, device=first.device, dtype=first.dtype) if self.backward else None

    def call(self, function: Function, inputs: tuple[Tensor, ...] | None = None) -> Callable[[], Any]:
        """`function` on the inputs: its output, followed by the inputs' gradients where the row has a backward."""
        inputs = self.inputs if inputs is None else inputs
        if self.dy is None:
            return lambda: function(*inputs)

        def forward_and_backward() -> Outputs:
            y = function(*inputs)
            return (y, *torch.autograd.grad(y, inputs, self.dy))

        return forward_and_backward

    def usual(self, fused: Function, stock: Function) -> list[Contender]:
        """Ours, stock PyTorch, and what torch.compile makes of stock PyTorch."""
        contenders = [
            Contender("fusedops", self.call(fused), path=None, role="fused"),
            Contender("stock", self.call(stock), role="baseline"),
        ]
        if self.settings.compiled:
            compiled = torch.compile(stock, dynamic=False)
            contenders.append(Contender("torch.compile", self.call(compiled), path="inductor"))
        if self.settings.compiled and self.settings.max_autotune:
            # Without CUDA graphs, which would copy the inputs and reuse the outputs: another piece of work.
            tuned = torch.compile(stock, dynamic=False, mode="max-autotune-no-cudagraphs")
            contenders.append(Contender("torch.compile max-autotune", self.call(tuned), path="inductor"))
        return contenders


def wanted(peer: str, row: Row, settings: Settings) -> bool:
    """Whether the row measures this peer here: those that rows name are a GPU's."""
    return peer in row.peers and settings.device.type == "cuda"


def in_float64(function: Function, inputs: tuple[Tensor, ...], dy: Tensor | None) -> tuple[Tensor, ...]:
    """The function's output on the inputs in float64, and its gradients where dy is given."""
    doubled = tuple(tensor.detach().double().requires_grad_(dy is not None) for tensor in inputs)
    y = function(*doubled)
    gradients = () if dy is None else torch.autograd.grad(y, doubled, dy.double())
    return (y.detach(), *gradients)


def by_name(names: tuple[str, ...], outputs: Outputs, references: tuple[Tensor, ...]) -> dict[str, float]:
    return {name: relative_error(*pair) for name, *pair in zip(names, outputs, references, strict=False)}
