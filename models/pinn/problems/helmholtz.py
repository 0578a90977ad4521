"""The Helmholtz equation on the unit cube: indefinite, between the first two eigenvalues of the Laplacian."""

from __future__ import annotations

from math import pi

from torch import Tensor

from models.pinn.problem import Problem, sines

K = (2, 1, 1)
WAVE_NUMBER = 2 * pi


class Helmholtz(Problem):
    """lap u + k^2 u = f, k = 2 pi: one wave length across the cube; not resonant, since 3 pi^2 < k^2 < 6 pi^2."""

    equation = "lap u + 4 pi^2 u = -2 pi^2 sin(2 pi x) sin(pi y) sin(pi z), u = 0 on the boundary"
    source = "Wang, Teng, Perdikaris 2021 (doi:10.1137/20M1318043), in three dimensions"

    def exact(self, x: Tensor) -> Tensor:
        return sines(x, K)

    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        forcing = (WAVE_NUMBER**2 - sum(k * k for k in K) * pi**2) * sines(x, K)
        return lap + WAVE_NUMBER**2 * u - forcing
