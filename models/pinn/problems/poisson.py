"""Poisson's equation on the unit cube, zero on its boundary, the forcing made for a product of sines."""

from __future__ import annotations

from math import pi

from torch import Tensor

from models.pinn.problem import Problem, sines

K = (1, 2, 1)


class Poisson(Problem):
    """-lap u = f with u = sin(pi x) sin(2 pi y) sin(pi z), so that f = 6 pi^2 u."""

    equation = "-lap u = 6 pi^2 sin(pi x) sin(2 pi y) sin(pi z), u = 0 on the boundary"
    source = "a manufactured solution, an eigenfunction of the Laplacian (Evans, Partial Differential Equations, 6.5)"

    def exact(self, x: Tensor) -> Tensor:
        return sines(x, K)

    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        return lap + sum(k * k for k in K) * pi**2 * sines(x, K)
