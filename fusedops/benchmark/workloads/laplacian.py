"""Workload of laplacian3d."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops.benchmark.comparison import Contender, Outputs
from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.common import Settings, Work, Workload, by_name, in_float64


def laplacian3d(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    """Zeros around the grid, order 2, against padding and slices; with `all_peers` against a convolution too."""
    size = (shape["x"], shape["y"], shape["z"])
    spacing = tuple(1 / (n + 1) for n in size)  # of a unit cube with zeros on its faces
    u = torch.randn(size, device=settings.device, dtype=getattr(torch, row.dtype))
    work = Work(row, (u,), size, settings)

    def stock(u: Tensor) -> Tensor:
        return _padding_and_slices(u, spacing)

    contenders = work.usual(lambda u: fusedops.laplacian3d(u, spacing), stock)
    if settings.all_peers:
        weight = _convolution_weight(spacing, u)
        convolved = work.call(lambda u: F.conv3d(u[None, None], weight, padding=1).view(size))
        contenders.append(Contender("conv3d", convolved, path="stock"))
    if not work.backward:
        target = torch.empty_like(u)
        contenders.append(Contender("copy", lambda: target.copy_(u), role="bound"))

    @functools.cache
    def references() -> tuple[Tensor, ...]:
        return in_float64(stock, work.inputs, work.dy)

    def errors(outputs: Outputs) -> dict[str, float]:
        return by_name(("y", "du"), outputs, references())

    return Workload(contenders, errors)


def _padding_and_slices(u: Tensor, spacing: tuple[float, ...]) -> Tensor:
    padded = F.pad(u, (1,) * 6)
    inner, twice = slice(1, -1), 2 * u
    along_x = (padded[:-2, inner, inner] - twice + padded[2:, inner, inner]) / spacing[0] ** 2
    along_y = (padded[inner, :-2, inner] - twice + padded[inner, 2:, inner]) / spacing[1] ** 2
    along_z = (padded[inner, inner, :-2] - twice + padded[inner, inner, 2:]) / spacing[2] ** 2
    return along_x + along_y + along_z


def _convolution_weight(spacing: tuple[float, ...], u: Tensor) -> Tensor:
    weight = u.new_zeros(1, 1, 3, 3, 3)
    for axis, h in enumerate(spacing):
        for offset, value in ((0, 1.0), (1, -2.0), (2, 1.0)):
            node = [1, 1, 1]
            node[axis] = offset
            weight[(0, 0, *node)] += value / h**2
    return weight
