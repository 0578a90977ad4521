"""The steady Allen-Cahn equation: nonlinear, with a forcing made for a product of sines."""

from __future__ import annotations

from math import pi

from torch import Tensor

from models.pinn.problem import Problem, sines

K = (2, 1, 1)
EPSILON_SQUARED = 0.1
"""3 pi^2 epsilon^2 > 1 makes the equation monotone: this solution is its only one."""


class AllenCahn(Problem):
    """-epsilon^2 lap u + u^3 - u = f with u = sin(2 pi x) sin(pi y) sin(pi z)."""

    equation = "-0.1 lap u + u^3 - u = f, f made for u = sin(2 pi x) sin(pi y) sin(pi z), u = 0 on the boundary"
    source = "Allen, Cahn 1979 (doi:10.1016/0001-6160(79)90196-2), steady, with a manufactured solution"
    boundary_weight = 10.0

    def exact(self, x: Tensor) -> Tensor:
        return sines(x, K)

    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        v = sines(x, K)
        forcing = (EPSILON_SQUARED * sum(k * k for k in K) * pi**2 - 1) * v + v**3
        return -EPSILON_SQUARED * lap + u**3 - u - forcing
