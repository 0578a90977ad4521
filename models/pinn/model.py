"""The network: a multilayer perceptron given the function that takes its Laplacian; arms differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fusedops.operators.smooth_activations import ACTIVATIONS
from fusedops.slots.laplacian import Jet, Points, Transform, autograd_jet
from models.pinn.problem import Problem


@dataclass(frozen=True)
class PINNOps:
    """The function of each slot of a PINN; fusedops.slots.SLOTS has the signature."""

    laplacian: Callable[[nn.Module, Points], Jet]


class HardBoundary(Transform):
    """u = offset(x) + factor(x) N(x), which meets a problem's boundary conditions whatever the network's output is."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(lambda x: (problem.offset(x), problem.factor(x)))
        self._problem = problem
        self._latest: tuple[Tensor, tuple[Jet, Jet]] | None = None

    def jets(self, x: Tensor, spatial: int) -> tuple[Jet, Jet]:
        """Both functions with their derivatives: in closed form where they are the problem's defaults.

        Those at the same tensor as before, unless it is to be differentiated, are not computed again; a compiler, whose
        results may lie in memory of a CUDA graph, computes them each time.
        """
        if x.requires_grad or torch.compiler.is_compiling():
            return self._jets(x, spatial)
        if self._latest is None or self._latest[0] is not x:
            self._latest = (x, self._jets(x, spatial))
        return self._latest[1]

    def _jets(self, x: Tensor, spatial: int) -> tuple[Jet, Jet]:
        problem, keep_graph = self._problem, torch.is_grad_enabled() and x.requires_grad
        if type(problem).offset is Problem.offset:
            zero = torch.zeros_like(x[:, 0])
            a = Jet(zero, torch.zeros_like(x), zero)
        else:
            a = autograd_jet(problem.offset, x, spatial, keep_graph)
        if type(problem).factor is Problem.factor:
            return a, problem.factor_jet(x)
        return a, autograd_jet(problem.factor, x, spatial, keep_graph)


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
        layers = [nn.Linear(m, n) for m, n in pairwise(sizes)]
        for layer in layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        _center(layers[0], problem)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers[:-1]:
            h = ACTIVATIONS[self.activation](layer(h))
        output = self.layers[-1](h).squeeze(-1)
        return output if self.transform is None else self.transform(x, output)

    def jet(self, points: Points) -> Jet:
        """u, its gradient and its Laplacian, by the slot's function."""
        return self.ops.laplacian(self, points)


@torch.no_grad()
def _center(first: nn.Linear, problem: Problem) -> None:
    """Give a layer that was made for coordinates from -1 to 1 the problem's."""
    low, high = torch.tensor(problem.lower), torch.tensor(problem.upper)
    first.weight.mul_(2 / (high - low))
    first.bias.sub_(first.weight @ ((low + high) / 2))
