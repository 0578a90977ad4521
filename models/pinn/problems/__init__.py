"""The problems: every file of this folder is one, known by its name, and checked before a run that asks for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil

import torch
from torch import Tensor

from fusedops.slots.laplacian import autograd_jet
from models.pinn.problem import Problem

CHECKED_POINTS = 64
TOLERANCE = 1e-8
"""How far the exact solution may be from solving its equation, relative to the largest of what the residual is of."""


def names() -> list[str]:
    """The problems that there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Problem:
    """The problem of a file of this folder, checked.

    Raises ValueError naming the file where it cannot be imported, does not define one problem, has no box or no faces,
    or where its exact solution is zero everywhere, solves the equation or meets the boundary conditions less than to
    rounding in float64.
    """
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except Exception as error:  # a problem's file may raise anything
        raise ValueError(f"problem={name}: {_file(name)}: {type(error).__name__}: {error}") from error
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Problem) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"problem={name}: {_file(name)}: it defines {len(found)} subclasses of Problem; one is needed")
    try:
        problem = found[0]()
        reason = _box_error(problem) or _solution_error(problem) or _boundary_error(problem)
    except Exception as error:
        raise ValueError(f"problem={name}: {_file(name)}: {type(error).__name__}: {error}") from error
    if reason is not None:
        raise ValueError(f"problem={name}: {_file(name)}: {reason}")
    return problem


def _file(name: str) -> str:
    spec = importlib.util.find_spec(f"{__name__}.{name}")
    return name if spec is None or spec.origin is None else spec.origin


def _box_error(problem: Problem) -> str | None:
    if len(problem.lower) != len(problem.upper):
        return f"lower has {len(problem.lower)} coordinates, upper {len(problem.upper)}"
    if not all(low < high for low, high in zip(problem.lower, problem.upper, strict=True)):
        return f"lower={problem.lower} is not below upper={problem.upper} in every coordinate"
    times = problem.dimensions - problem.spatial
    if not 1 <= problem.spatial <= 3 or not 0 <= times <= 1:
        return f"spatial={problem.spatial} of {problem.dimensions} coordinates: one to three, and at most one of time"
    for attribute in ("equation", "source"):
        if not isinstance(getattr(problem, attribute, None), str):
            return f"{attribute} is not given"
    if not problem.faces:
        return "faces is empty: the solution is given nowhere on the boundary"
    return None


def _random_points(problem: Problem) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(CHECKED_POINTS, problem.dimensions, generator=generator, dtype=torch.float64)
    low, high = torch.tensor(problem.lower).double(), torch.tensor(problem.upper).double()
    return low + s * (high - low)


def _solution_error(problem: Problem) -> str | None:
    x = _random_points(problem)
    for name in ("exact", "offset", "factor"):
        value = getattr(problem, name)(x.clone().requires_grad_())
        if value.shape != (len(x),):
            return f"{name} of {len(x)} points has shape {list(value.shape)}, not [{len(x)}]"
        if not value.requires_grad and not torch.equal(value, value[:1].expand(len(x))):
            return f"{name} has no gradient: its operations must be ones that PyTorch can differentiate"
    u, du, lap = autograd_jet(problem.exact, x, problem.spatial, False)
    if not u.any():
        return "the exact solution is zero everywhere, so that no error is relative to it"
    residual = problem.residual(u, du, lap, x)
    if residual.shape != (len(x),):
        return f"residual of {len(x)} points has shape {list(residual.shape)}, not [{len(x)}]"
    scale = max(float(value.abs().max()) for value in (u, du, lap))
    worst = float(residual.abs().max())
    if not worst <= TOLERANCE * scale:
        return f"the exact solution does not solve the equation: its residual is up to {worst:.3g}, and should be 0"
    return None


def _boundary_error(problem: Problem) -> str | None:
    for face in problem.faces:
        x = _random_points(problem)
        x[:, face.axis] = face.value
        u = problem.exact(x)
        scale = max(1.0, float(u.abs().max()))
        if not float((problem.offset(x) - u).abs().max()) <= TOLERANCE * scale:
            return f"offset differs from the exact solution on the boundary {face.name}"
        if not float(problem.factor(x).abs().max()) <= TOLERANCE:
            return f"factor does not vanish on the boundary {face.name}"
    return None
