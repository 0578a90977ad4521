"""What a problem is: a partial differential equation on a box, with the exact solution that errors are measured by.

A problem is one file of models/pinn/problems/ with one subclass of `Problem`, known by the file's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fusedops.slots.laplacian import Jet

AXES = "xyz"
"""Names of the coordinates that the Laplacian is over, as many as there are; the one after them is t, time."""


@dataclass(frozen=True)
class Face:
    """A side of the box on which the solution is given: the coordinate `axis` has the value `value` there."""

    name: str
    axis: int
    value: float


class Problem(ABC):
    """A differential equation, its domain, its boundary values and its exact solution.

    Points x are [N, D], one coordinate a column: the `spatial` ones first, then time where there is one. Functions of
    them return [N], in the dtype of x, from operations that PyTorch can differentiate twice.
    """

    equation: ClassVar[str]
    """The equation in one line."""
    source: ClassVar[str]
    """Where the problem or its solution is from."""
    spatial: ClassVar[int] = 3
    """How many of the coordinates the Laplacian is over."""
    lower: ClassVar[tuple[float, ...]] = (0.0, 0.0, 0.0)
    """The corner of the box where all coordinates are least."""
    upper: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1.0)
    """The corner where they are largest."""
    boundary_weight: ClassVar[float] = 1000.0
    """Weight of soft boundary conditions where the configuration gives none: of the order of the residual squared."""

    @abstractmethod
    def exact(self, x: Tensor) -> Tensor:
        """The solution u(x), [N]."""

    @abstractmethod
    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        """What is zero where u solves the equation, [N], of u [N], its first derivatives [N, D] and Laplacian [N]."""

    def offset(self, x: Tensor) -> Tensor:
        """A function with the solution's boundary values, [N]; by default zero, for homogeneous conditions."""
        return torch.zeros_like(x[:, 0])

    def factor(self, x: Tensor) -> Tensor:
        """A function that vanishes on the faces and nowhere else, [N]; by default a product of one term an axis.

        The term is 4 s (1 - s) where both sides of the axis are faces, s or 1 - s where one is; s runs from 0 to 1.
        """
        terms, _, _ = self._terms(x)
        return _product(terms.unbind(1))

    def factor_jet(self, x: Tensor) -> Jet:
        """The default `factor` with its derivatives."""
        terms, first, second = self._terms(x)
        columns = terms.unbind(1)
        others = torch.ones_like(terms)
        if len(columns) > 1:
            others = torch.stack([_product(columns[:i] + columns[i + 1 :]) for i in range(len(columns))], 1)
        laplacian = (others * second)[:, : self.spatial].sum(1)
        return Jet(columns[0] * others[:, 0], first * others, laplacian)

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each axis's term of `factor` and its first derivative, [N, D], and its second, [D]."""
        start, length, c0, c1, c2 = _coefficients(self, x.device, x.dtype)
        s = (x - start) / length
        return c0 + s * (c1 + s * c2), (c1 + 2 * c2 * s) / length, 2 * c2 / length**2

    @property
    def faces(self) -> tuple[Face, ...]:
        """Where the solution is given: by default all sides of the spatial box, and the beginning of time."""
        spatial = [
            Face(f"{self.coordinates[axis]}={end[axis]:g}", axis, end[axis])
            for axis in range(self.spatial)
            for end in (self.lower, self.upper)
        ]
        times = [
            Face(f"{self.coordinates[axis]}={self.lower[axis]:g}", axis, self.lower[axis])
            for axis in range(self.spatial, self.dimensions)
        ]
        return (*spatial, *times)

    @property
    def dimensions(self) -> int:
        """How many coordinates a point has."""
        return len(self.lower)

    @property
    def coordinates(self) -> tuple[str, ...]:
        """The names of the coordinates: x, y, z, then t."""
        return (*AXES[: self.spatial], *("t" for _ in range(self.dimensions - self.spatial)))


def sines(x: Tensor, frequencies: Iterable[int]) -> Tensor:
    """The product of sin(k pi x_i) over the first coordinates, one frequency k each: [N]."""
    product = torch.ones_like(x[:, 0])
    for axis, k in enumerate(frequencies):
        product = product * torch.sin(k * torch.pi * x[:, axis])
    return product


def _product(columns: Sequence[Tensor]) -> Tensor:
    product = columns[0]
    for column in columns[1:]:
        product = product * column
    return product


@lru_cache(maxsize=8)
def _coefficients(problem: Problem, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Of each axis its start, its length, and the coefficients of 1, s and s^2 in its term: copied to a GPU once."""
    rows = []
    for axis, (low, high) in enumerate(zip(problem.lower, problem.upper, strict=True)):
        sides = {face.value for face in problem.faces if face.axis == axis}
        polynomial = (1.0, 0.0, 0.0)
        if sides == {low, high}:
            polynomial = (0.0, 4.0, -4.0)
        elif sides:
            polynomial = (0.0, 1.0, 0.0) if sides == {low} else (1.0, -1.0, 0.0)
        rows.append((low, high - low, *polynomial))
    return torch.tensor(rows, device=device, dtype=dtype).unbind(1)
