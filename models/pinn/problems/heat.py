"""The heat equation in three dimensions and time: two modes that fade at different rates."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from models.pinn.problem import Problem, sines

DIFFUSIVITY = 0.04
MODES = ((1.0, (1, 1, 1)), (0.5, (2, 1, 1)))
"""Amplitude and frequencies of each."""


class Heat(Problem):
    """du/dt = 0.04 lap u on the unit cube for a unit of time, zero on the sides, two modes at the beginning."""

    equation = "du/dt = 0.04 lap u, u = 0 on the sides, u = sin(pi x) sin(pi y) sin(pi z) (1 + cos(pi x)) at t = 0"
    source = (
        "the series of the heat equation (Carslaw, Jaeger, Conduction of Heat in Solids, chapter 6), two terms of it"
    )
    lower = (0.0, 0.0, 0.0, 0.0)
    upper = (1.0, 1.0, 1.0, 1.0)
    boundary_weight = 10.0

    def exact(self, x: Tensor) -> Tensor:
        return _modes(x, x[:, 3])

    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        return du[:, 3] - DIFFUSIVITY * lap

    def offset(self, x: Tensor) -> Tensor:
        return _modes(x, torch.zeros_like(x[:, 3]))


def _modes(x: Tensor, t: Tensor) -> Tensor:
    terms = []
    for amplitude, frequencies in MODES:
        rate = DIFFUSIVITY * pi**2 * sum(k * k for k in frequencies)
        terms.append(amplitude * torch.exp(-rate * t) * sines(x, frequencies))
    return torch.stack(terms).sum(0)
