"""Points inside the domain, on its faces, and held out: each a pure function of its arguments, in float64."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fusedops.slots.laplacian import Grid
from models.pinn.problem import Face, Problem


def grid(problem: Problem, points: int, order: int) -> Grid:
    """The grid of about this many nodes over the domain, as many along every axis: the middles of equal cells.

    order: of the differences taken on it. Raises ValueError for fewer than three nodes along an axis.
    """
    per_axis = round(points ** (1 / problem.dimensions))
    if per_axis < 3:
        raise ValueError(
            f"train.batch_size={points}: a grid of {problem.dimensions} axes would have {per_axis} nodes along each; "
            f"at least {3**problem.dimensions} points are needed"
        )
    # The axes of a Grid are time first, then the spatial ones.
    axes = [*range(problem.spatial, problem.dimensions), *range(problem.spatial)]
    spacing = [(problem.upper[axis] - problem.lower[axis]) / per_axis for axis in axes]
    origin = [problem.lower[axis] + h / 2 for axis, h in zip(axes, spacing, strict=True)]
    return Grid((per_axis,) * problem.dimensions, tuple(spacing), tuple(origin), order)


def _random(seed: int, step: int, rank: int, use: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, rank, use])))


@lru_cache(maxsize=4)
def _sobol_set(dimensions: int, points: int, seed: int, rank: int) -> Tensor:
    seed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
    return engine.draw(points, dtype=torch.float64)


def interior(problem: Problem, sampling: str, points: int, seed: int, step: int, rank: int = 0) -> Tensor:
    """Scattered points inside the domain, [points, D] float64.

    sampling: sobol is a scrambled Sobol set of (seed, rank), moved as a whole by a random vector of (seed, step, rank),
    what leaves the box coming in on the other side; uniform draws every point by itself.
    """
    random = _random(seed, step, rank, 0)
    if sampling == "uniform":
        return _place(problem, torch.from_numpy(random.random((points, problem.dimensions))))
    shift = torch.from_numpy(random.random(problem.dimensions))
    return _place(problem, (_sobol_set(problem.dimensions, points, seed, rank) + shift) % 1)


def boundary(problem: Problem, points: int, seed: int, step: int, rank: int = 0) -> Tensor:
    """Random points on the problem's faces, which share them evenly, [points, D] float64.

    Raises ValueError naming a face that gets none.
    """
    random, parts = _random(seed, step, rank, 1), []
    for face, count in _shares(problem, points):
        s = _place(problem, torch.from_numpy(random.random((count, problem.dimensions))))
        s[:, face.axis] = face.value
        parts.append(s)
    return torch.cat(parts)


def _shares(problem: Problem, points: int) -> list[tuple[Face, int]]:
    """How many of the points each face gets."""
    faces = problem.faces
    shares = [(face, points // len(faces) + (i < points % len(faces))) for i, face in enumerate(faces)]
    for face, count in shares:
        if count == 0:
            raise ValueError(
                f"problem.boundary_points={points}: no point lies on the boundary {face.name}; "
                f"at least {len(faces)} are needed, one for each of {', '.join(f.name for f in faces)}"
            )
    return shares


def held_out(problem: Problem, per_axis: int, trained: Grid | None = None) -> Tensor:
    """A grid to take errors over, [N, D] float64: per_axis points along each axis, a third of them in time.

    They are the middles of equal cells. trained: a grid made by `grid`, none of whose nodes they may be: where they
    would be, the first axis has one point more.
    """
    counts = [per_axis if axis < problem.spatial else max(3, per_axis // 3) for axis in range(problem.dimensions)]
    # Middles (i + 1/2) / n and (j + 1/2) / m are equal for some i and j where 2 divides n and m equally often.
    if trained is not None and _twos(counts[0]) == _twos(trained.shape[0]):
        counts[0] += 1
    return _place(problem, _grid([(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in counts]))


def _twos(n: int) -> int:
    """The largest power of 2 that divides n."""
    return n & -n


def plane(problem: Problem, per_axis: int) -> Tensor:
    """A grid on the mid-plane of the first two coordinates, the others half way, [per_axis, per_axis, D] float64.

    Of a problem of one coordinate, a line: [per_axis, 1].
    """
    line = torch.linspace(0, 1, per_axis, dtype=torch.float64)
    shown = min(2, problem.dimensions)
    others = [torch.tensor([0.5], dtype=torch.float64)] * (problem.dimensions - shown)
    return _place(problem, _grid([line] * shown + others)).reshape(*[per_axis] * shown, problem.dimensions)


def _grid(axes: list[Tensor]) -> Tensor:
    """All combinations of the coordinates, the last axis fastest: [N, D]."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(math.prod(map(len, axes)), len(axes))


def _place(problem: Problem, s: Tensor) -> Tensor:
    """Points of the unit box in the problem's."""
    low = torch.tensor(problem.lower, dtype=torch.float64)
    return low + s * (torch.tensor(problem.upper, dtype=torch.float64) - low)
