"""The screened Poisson equation: a solution that is flat inside and falls to zero in layers along two sides."""

from __future__ import annotations

from math import cosh, pi

import torch
from torch import Tensor

from models.pinn.problem import Problem

KAPPA = 6.0
"""The inverse screening length: the layers are about 1/6 wide."""


class ScreenedPoisson(Problem):
    """-lap u + kappa^2 u = f with u = (1 - cosh(kappa (x - 1/2)) / cosh(kappa / 2)) sin(pi y) sin(pi z)."""

    equation = "-lap u + 36 u = (36 + 2 pi^2 X(x)) sin(pi y) sin(pi z), X the layer profile, u = 0 on the boundary"
    source = (
        "the linearised Poisson-Boltzmann equation between charged plates (Debye, Hueckel 1923), manufactured in y, z"
    )

    def exact(self, x: Tensor) -> Tensor:
        return _layers(x) * _across(x)

    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        # X'' = kappa^2 (X - 1): what is left of -lap u + kappa^2 u is kappa^2 + 2 pi^2 X, times the sines.
        return -lap + KAPPA**2 * u - (KAPPA**2 + 2 * pi**2 * _layers(x)) * _across(x)


def _layers(x: Tensor) -> Tensor:
    return 1 - torch.cosh(KAPPA * (x[:, 0] - 0.5)) / cosh(KAPPA / 2)


def _across(x: Tensor) -> Tensor:
    return torch.sin(pi * x[:, 1]) * torch.sin(pi * x[:, 2])
