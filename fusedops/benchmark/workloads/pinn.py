"""Workload of the laplacian slot: a training step of a physics-informed network, the residual and its gradient."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.benchmark.comparison import Contender, Outputs
from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.common import Settings, Workload, by_name, wanted
from fusedops.slots import SLOTS
from fusedops.slots.laplacian import Grid, Jet, Points, Transform

Laplacian = Callable[[nn.Module, Points], Jet]


class Perceptron(nn.Module):
    """tanh between the layers, three coordinates to one value."""

    activation = "tanh"
    spatial = 3
    transform: Transform | None = None

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise((3, *(width,) * depth, 1)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x).squeeze(-1)


def residual_step(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    """The Laplacian plus a source, squared, and its gradient with respect to the parameters.

    Exact implementations are compared with nested autograd and with each other. Differences, which compute something
    else, are compared with differences in stock PyTorch, and with nested autograd as what they replace.
    """
    nodes, device, dtype = shape["nodes"], settings.device, getattr(torch, row.dtype)
    network = Perceptron(shape["width"], shape["depth"]).to(device, dtype)
    grid = Grid((nodes,) * 3, (1 / (nodes - 1),) * 3, (0.0,) * 3)
    points = Points(grid.nodes(3, device, dtype), grid)
    exact = row.options["exact"]

    def contender(name: str, laplacian: Laplacian, path: str | None = "stock", role: str = "peer") -> Contender:
        return Contender(name, functools.partial(_step, laplacian, network, points, row.options["tf32"]), path, role)

    def implementation(name: str) -> Laplacian:
        return SLOTS["laplacian"].implementation(name).function

    nested, baseline = implementation("native"), "native" if exact else "stencil_native"
    contenders = [
        contender("fusedops", implementation("forward" if exact else "stencil"), path=None, role="fused"),
        contender("stock", implementation(baseline), role="baseline"),
    ]
    if not exact:
        contenders.append(contender("nested autograd", nested, role="bound"))
        if settings.compiled:
            compiled = torch.compile(implementation(baseline), dynamic=False)
            contenders.append(contender("torch.compile", compiled, path="inductor"))
    else:
        stock = implementation("forward_native")
        contenders.append(contender("forward Laplacian", stock))
        if settings.compiled:
            compiled = torch.compile(stock, dynamic=False)
            contenders.append(contender("forward Laplacian, torch.compile", compiled, path="inductor"))
        if wanted("JET", row, settings):
            contenders.append(contender("JET", _jet))
    contenders.append(contender("network alone", _network_alone, role="bound"))

    @functools.cache
    def references() -> Outputs:
        doubled = Perceptron(shape["width"], shape["depth"]).to(device, torch.float64)
        doubled.load_state_dict(network.state_dict())
        # The same points, not others that float64 would make of the grid.
        return _step(implementation(baseline), doubled, Points(points.x.double(), grid), False)

    def errors(outputs: Outputs) -> dict[str, float]:
        return by_name(("laplacian", "gradient"), outputs, references())

    return Workload(contenders, errors)


def _step(laplacian: Laplacian, network: nn.Module, points: Points, tf32: bool) -> Outputs:
    """The Laplacian, and the loss's gradient with respect to all parameters."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        lap = laplacian(network, points)[2]
        loss = (lap + torch.sin(points.x).prod(1)).square().mean()
        # The last bias has no part in the Laplacian.
        gradients = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
    finally:
        setting.fp32_precision = before
    return lap.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])


def _network_alone(network: nn.Module, points: Points) -> Jet:
    """Its value in place of all three: the step without derivatives."""
    u = network(points.x)
    return Jet(u, u, u)


def _jet(network: nn.Module, points: Points) -> Any:
    """The collapsed Taylor mode of jet-for-pytorch. Raises ImportError where it is not installed."""
    jet = importlib.import_module("jet").jet
    x = points.x
    directions = torch.eye(3, device=x.device, dtype=x.dtype)[:, None, :].expand(3, *x.shape)
    return jet(network, (torch.zeros_like(x),), collapsed=True)((x, directions, torch.zeros_like(x)))
