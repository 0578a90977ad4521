"""The network: a multilayer perceptron given the function that takes its Laplacian; arms differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedops.slots.laplacian import Jet, Points, Transform
from models.pinn.config import ACTIVATIONS
from models.pinn.problem import Problem

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = dict(
    zip(ACTIVATIONS, (torch.tanh, torch.sin, F.silu, F.gelu), strict=True)
)


@dataclass(frozen=True)
class PINNOps:
    """The function of each slot of a PINN; fusedops.slots.SLOTS has the signature."""

    laplacian: Callable[[nn.Module, Points], Jet]


class HardBoundary(Transform):
    """u = offset(x) + factor(x) N(x), which meets a problem's boundary conditions whatever the network's output is."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(lambda x: (problem.offset(x), problem.factor(x)))
        self._problem = problem

    def jets(self, x: Tensor, spatial: int) -> tuple[Jet, Jet]:
        """Both functions with their derivatives: in closed form where they are the problem's defaults."""
        problem = type(self._problem)
        if problem.offset is not Problem.offset or problem.factor is not Problem.factor:
            return super().jets(x, spatial)
        zero = torch.zeros_like(x[:, 0])
        return Jet(zero, torch.zeros_like(x), zero), self._problem.factor_jet(x)


class PINN(nn.Module):
    """u(x) of points x [N, D], as [N]: linear layers with an activation between them, then the output transform.

    The weights are Glorot's; the first layer's are then such that it sees every coordinate run from -1 to 1.

    problem   the domain, and with `hard` the transform that imposes its boundary conditions.
    width, depth, activation   as in `ModelConfig`.
    ops       the function that gives u, its gradient and its Laplacian at points.
    """

    def __init__(self, problem: Problem, width: int, depth: int, activation: str, hard: bool, ops: PINNOps) -> None:
        super().__init__()
        self.ops = ops
        self.activation = activation
        self.spatial = problem.spatial
        self.transform: Transform | None = HardBoundary(problem) if hard else None
        sizes = [problem.dimensions, *([width] * depth), 1]
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes))
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        self._center(problem)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers[:-1]:
            h = FUNCTIONS[self.activation](layer(h))
        output = self.layers[-1](h).squeeze(-1)
        return output if self.transform is None else self.transform(x, output)

    def jet(self, points: Points) -> Jet:
        """u, its gradient and its Laplacian, by the slot's function."""
        return self.ops.laplacian(self, points)

    @torch.no_grad()
    def _center(self, problem: Problem) -> None:
        first = self.layers[0]
        low, high = torch.tensor(problem.lower), torch.tensor(problem.upper)
        first.weight.mul_(2 / (high - low))
        first.bias.sub_(first.weight @ ((low + high) / 2))
