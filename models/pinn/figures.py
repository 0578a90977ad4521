"""The picture of a solution beside the exact one."""

from __future__ import annotations

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from models.pinn import data
from models.pinn.problem import Problem

POINTS = 101
"""Along each side of the picture."""


def solution(problem: Problem, model: nn.Module) -> Figure:
    """The network's solution, the exact one and their difference on the mid-plane of the first two coordinates.

    Of a problem of one coordinate, both over that coordinate, and their difference.
    """
    x = data.plane(problem, POINTS)
    first = next(model.parameters())
    flat = x.reshape(-1, problem.dimensions).to(first.device)
    with torch.no_grad():
        exact = problem.exact(flat)
        u = model(flat.to(first.dtype)).double()
    figure = Figure(figsize=(12, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a display and keep every figure
    if problem.dimensions == 1:
        _lines(figure, problem, flat[:, 0].cpu(), u.cpu(), exact.cpu())
    else:
        _images(figure, problem, u.cpu(), exact.cpu())
    middles = zip(problem.coordinates[2:], problem.lower[2:], problem.upper[2:], strict=True)
    others = ", ".join(f"{name} = {(low + high) / 2:g}" for name, low, high in middles)
    figure.suptitle(f"{problem.equation}   ({others})" if others else problem.equation, fontsize=9)
    return figure


def _lines(figure: Figure, problem: Problem, x: Tensor, u: Tensor, exact: Tensor) -> None:
    left, right = figure.subplots(1, 2)
    left.plot(x.numpy(), u.numpy(), label="network")
    left.plot(x.numpy(), exact.numpy(), "--", label="exact solution")
    left.legend()
    right.plot(x.numpy(), (u - exact).numpy())
    right.set_title(_difference(u, exact))
    for axes in (left, right):
        axes.set_xlabel(problem.coordinates[0])


def _images(figure: Figure, problem: Problem, u: Tensor, exact: Tensor) -> None:
    across, up = problem.coordinates[:2]
    extent = (problem.lower[0], problem.upper[0], problem.lower[1], problem.upper[1])
    scale, worst = float(exact.abs().max()), float((u - exact).abs().max())
    panels = (("network", u, scale), ("exact solution", exact, scale), (_difference(u, exact), u - exact, worst))
    for axes, (title, values, limit) in zip(figure.subplots(1, 3), panels, strict=True):
        # Rows of an image run along its y axis: the second coordinate.
        image = axes.imshow(
            values.reshape(POINTS, POINTS).T.numpy(),
            origin="lower",
            extent=extent,
            cmap="RdBu_r",
            vmin=-limit,
            vmax=limit,
            aspect="auto",
        )
        axes.set_title(title)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        figure.colorbar(image, ax=axes)


def _difference(u: Tensor, exact: Tensor) -> str:
    return f"difference, up to {float((u - exact).abs().max()):.2g}"
