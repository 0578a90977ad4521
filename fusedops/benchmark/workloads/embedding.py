"""Workload of embedding_aggregation: look-up, its training step with SGD, and look-up with the dot interaction."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops import optim
from fusedops.benchmark.comparison import Contender, Outputs
from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.common import Settings, Workload, by_name

LEARNING_RATE = 1e-3


class _Problem:
    """Tables, which are parts of one memory, and bags of raw 62-bit ids, of which stock PyTorch gets the rows."""

    def __init__(self, row: Row, shape: dict[str, int], device: torch.device) -> None:
        self.features, self.batch, self.width, per_bag = (shape[k] for k in ("features", "batch", "width", "ids"))
        rows, count = shape["rows"], self.features * self.batch * per_bag
        dtype = getattr(torch, row.dtype)
        self.flat = torch.randn(self.features * rows, self.width, device=device, dtype=dtype)
        self.tables = self.flat.split(rows)
        uniform = torch.rand(count, device=device, dtype=torch.float64)
        # Skewed: by Zipf's law, row k as often as 1 / (k + 1).
        place = (rows + 1) ** uniform - 1 if row.options["skewed"] else rows * uniform
        local = place.long().clamp(max=rows - 1)
        self.raw = local + rows * torch.randint(0, 2**62 // rows - 1, (count,), device=device)
        self.offsets = torch.arange(0, count + 1, per_bag, device=device)
        self.bags = torch.arange(0, self.batch * per_bag + 1, per_bag, device=device)
        self.of_features = local.split(self.batch * per_bag)
        self.keys = local + torch.arange(self.features, device=device).repeat_interleave(self.batch * per_bag) * rows
        self.per_bag = per_bag

    def ours(self, tables: tuple[Tensor, ...]) -> Tensor:
        return fusedops.embedding_aggregation(tables, self.raw, self.offsets)

    def by_bags(self, tables: tuple[Tensor, ...]) -> Tensor:
        pooled = [
            F.embedding_bag(rows, table, self.bags, mode="sum", sparse=True, include_last_offset=True)
            for rows, table in zip(self.of_features, tables, strict=True)
        ]
        return torch.stack(pooled, 1)

    def by_one_table(self, flat: Tensor) -> Tensor:
        pooled = F.embedding_bag(self.keys, flat, self.offsets, mode="sum", sparse=True, include_last_offset=True)
        return pooled.view(self.features, self.batch, self.width).transpose(0, 1)

    def by_gather(self, flat: Tensor) -> Tensor:
        """What torch.compile makes one kernel of: bags of equal lengths."""
        looked_up = flat[self.keys].view(self.features, self.batch, self.per_bag, self.width)
        return looked_up.sum(2).transpose(0, 1).contiguous()

    def exact(self) -> Tensor:
        """The pooled vectors in float64, [B, F, D]."""
        total = torch.zeros(self.features * self.batch, self.width, device=self.raw.device, dtype=torch.float64)
        for i in range(self.per_bag):
            total += self.flat.detach()[self.keys[i :: self.per_bag]]
        return total.view(self.features, self.batch, self.width).transpose(0, 1)


def embedding_aggregation(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    """options: "skewed" ids, and "part": what is measured, "look-up", "step" or "dot"."""
    problem = _Problem(row, shape, settings.device)
    return {"look-up": _look_up, "step": _step, "dot": _dot}[row.options["part"]](problem, settings)


def _compiled(function: Callable[[], Tensor], settings: Settings) -> list[Contender]:
    if not settings.compiled:
        return []
    return [Contender("torch.compile", torch.compile(function, dynamic=False), path="inductor")]


def _look_up(problem: _Problem, settings: Settings) -> Workload:
    contenders = [
        Contender("fusedops", lambda: problem.ours(problem.tables), path=None, role="fused"),
        Contender("stock", lambda: problem.by_bags(problem.tables), role="baseline"),
        Contender("one table", lambda: problem.by_one_table(problem.flat)),
        *_compiled(lambda: problem.by_gather(problem.flat), settings),
    ]
    exact = functools.cache(problem.exact)
    return Workload(contenders, lambda outputs: by_name(("vectors",), outputs, (exact(),)))


def _step(problem: _Problem, settings: Settings) -> Workload:
    """Forward, backward, SGD on the rows touched. Returns the vectors and those rows after the update."""
    touched, place = problem.keys.unique(return_inverse=True)
    before = problem.flat[touched]
    tables = tuple(torch.nn.Parameter(table) for table in problem.tables)
    flat = torch.nn.Parameter(problem.flat)
    grad = torch.randn(problem.batch, problem.features, problem.width, device=flat.device, dtype=flat.dtype)
    ours, by_bags = optim.SGD(tables, LEARNING_RATE), torch.optim.SGD(tables, LEARNING_RATE)
    by_one_table = torch.optim.SGD([flat], LEARNING_RATE)

    def stepped(forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def step() -> Tensor:
            vectors = forward()
            vectors.backward(grad)
            optimizer.step()
            optimizer.zero_grad()
            return vectors.detach()

        return step

    def restore() -> None:
        problem.flat[touched] = before

    steps = {
        "fusedops": stepped(lambda: problem.ours(tables), ours),
        "stock": stepped(lambda: problem.by_one_table(flat), by_one_table),
        "bags": stepped(lambda: problem.by_bags(tables), by_bags),
    }
    roles = {"fusedops": "fused", "stock": "baseline", "bags": "peer"}
    contenders = [
        Contender(name, step, None if name == "fusedops" else "stock", roles[name], restore)
        for name, step in steps.items()
    ]

    @functools.cache
    def references() -> tuple[Tensor, Tensor]:
        restore()
        vectors = problem.exact()
        sums = torch.zeros(len(touched), problem.width, device=flat.device, dtype=torch.float64)
        of_bags = grad.transpose(0, 1).flatten(0, 1).double()
        for i in range(problem.per_bag):
            sums.index_add_(0, place[i :: problem.per_bag], of_bags)
        return vectors, before.double() - LEARNING_RATE * sums

    def errors(outputs: Outputs) -> dict[str, float]:
        rows = problem.flat[touched]  # as the contender that is checked has left them
        return by_name(("vectors", "rows"), (*outputs, rows), references())

    return Workload(contenders, errors)


def _dot(problem: _Problem, settings: Settings) -> Workload:
    dense = torch.randn(problem.batch, problem.width, device=problem.raw.device, dtype=problem.flat.dtype)
    i, j = torch.tril_indices(problem.features + 1, problem.features + 1, -1, device=dense.device)

    def interaction(pooled: Tensor, dense: Tensor) -> Tensor:
        vectors = torch.cat([dense[:, None], pooled], 1)
        return torch.cat([dense, torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]], 1)

    def fused() -> Tensor:
        return fusedops.embedding_aggregation(problem.tables, problem.raw, problem.offsets, dense, cross="dot")

    contenders = [
        Contender("fusedops", fused, path=None, role="fused"),
        Contender("stock", lambda: interaction(problem.by_one_table(problem.flat), dense), role="baseline"),
        Contender("apart", lambda: interaction(problem.ours(problem.tables), dense), path="triton, stock"),
        *_compiled(lambda: interaction(problem.by_gather(problem.flat), dense), settings),
    ]
    exact = functools.cache(lambda: interaction(problem.exact(), dense.double()))
    return Workload(contenders, lambda outputs: by_name(("features",), outputs, (exact(),)))
