"""Slot laplacian: (network, points) -> (u, du, lap), of a network of points, an output transform included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------------------
# What the slot's functions take and return


@dataclass(frozen=True)
class Grid:
    """A regular grid of points, and the order of the differences to be taken on it.

    shape, spacing, origin: nodes, distance between two of them and coordinate of the first, an entry an axis. The axes
    are the columns of the points that take no part in the Laplacian (time), if any, then the spatial ones: (T, X, Y, Z)
    for points (x, y, z, t). order: 2 or 4. Raises ValueError for another order and lengths that differ.
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    order: int = 2

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.spacing) == len(self.origin):
            raise ValueError(
                f"grid: shape {self.shape}, spacing {self.spacing} and origin {self.origin} must have an entry an axis"
            )
        if self.order not in (2, 4):
            raise ValueError(f"grid: order is {self.order}; allowed: 2, 4")
        if any(n < 1 for n in self.shape):
            raise ValueError(f"grid: shape is {self.shape}; every axis needs a node")
        if not all(0 < h < math.inf for h in self.spacing):
            raise ValueError(f"grid: spacing is {self.spacing}; allowed: positive finite numbers")

    def nodes(self, spatial: int, device: torch.device, dtype: torch.dtype, halo: int = 0) -> Tensor:
        """The nodes in row-major order, [N, D], their columns the `spatial` axes, then the others.

        halo: so many further nodes are added at both ends of every axis.
        """
        ends = [n + halo for n in self.shape]
        axes = [
            torch.arange(-halo, end, device=device, dtype=dtype) * h + start
            for end, h, start in zip(ends, self.spacing, self.origin, strict=True)
        ]
        columns = [column.reshape(-1) for column in torch.meshgrid(*axes, indexing="ij")]
        others = len(columns) - spatial
        return torch.stack(columns[others:] + columns[:others], dim=1)


@dataclass(frozen=True)
class Points:
    """Points x, [N, D]: the spatial coordinates, then those that take no part in the Laplacian (time).

    grid: where x are the nodes of one, in row-major order (`Grid.nodes`); None for scattered points.
    """

    x: Tensor
    grid: Grid | None = None


class Jet(NamedTuple):
    """A function at N points: value [N], gradient with respect to all D coordinates [N, D], Laplacian [N]."""

    value: Tensor
    gradient: Tensor
    laplacian: Tensor


class Transform:
    """An output transform u(x) = a(x) + b(x) N(x) of a network N, which imposes boundary conditions exactly.

    function: x [N, D] -> (a, b), both [N], twice differentiable and without parameters. A subclass that knows the
    derivatives in closed form overrides `jets`.
    """

    def __init__(self, function: Callable[[Tensor], tuple[Tensor, Tensor]]):
        self.function = function

    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        """u at x [N, D], where the network's output is N(x), [N]."""
        a, b = self.function(x)
        return a + b * output

    def jets(self, x: Tensor, spatial: int) -> tuple[Jet, Jet]:
        """a and b at x with their derivatives; here by nested autograd."""
        keep_graph = torch.is_grad_enabled() and x.requires_grad
        a, b = (autograd_jet(lambda x, part=part: self.function(x)[part], x, spatial, keep_graph) for part in (0, 1))
        return a, b


class Network(Protocol):
    """A multilayer perceptron as the slot sees it: an nn.Module that has these."""

    layers: nn.ModuleList
    """nn.Linear, two at least, the last one with one output; `activation` is applied between them."""
    activation: str
    """One of `fusedops.operators.forward_laplacian.ACTIVATIONS`, which has a stock function for each."""
    spatial: int
    """How many of the inputs, the first ones, take part in the Laplacian."""
    transform: Transform | None
    """What makes u of the last layer's output; None: u is that output."""

    def __call__(self, x: Tensor) -> Tensor:
        """u at x [N, D], as [N]: the layers, the activation between them, the transform."""


# ---------------------------------------------------------------------------------------------------------------------
# Implementations


def autograd_jet(function: Callable[[Tensor], Tensor], x: Tensor, spatial: int, keep_graph: bool) -> Jet:
    """A function of x [N, D], [N], with its derivatives by nested autograd: a backward pass a spatial coordinate.

    keep_graph: whether the results are to be differentiated further; they are detached where not.
    """
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        value = function(x)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True, materialize_grads=True)
        laplacian = torch.zeros_like(value)
        if gradient.requires_grad:  # it does not where the function is linear
            for i in range(spatial):
                (second,) = torch.autograd.grad(
                    gradient[:, i].sum(), x, create_graph=keep_graph, retain_graph=True, materialize_grads=True
                )
                laplacian = laplacian + second[:, i]
    jet = Jet(value, gradient, laplacian)
    return jet if keep_graph else Jet(*(part.detach() for part in jet))


def laplacian_native(network: Network, points: Points) -> Jet:
    """Nested torch.autograd.grad."""
    return autograd_jet(network, points.x, network.spatial, torch.is_grad_enabled())
