"""A PINN as the engine trains it: the mean squared residual at points, the error against the exact solution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.config import TrainConfig
from engine.errors import ConfigError
from engine.task import Batch, Phase, Task, warmup_cosine
from fusedops.slots.laplacian import Grid, Points, laplacian_native
from models.pinn import data, problems
from models.pinn.config import ModelConfig, ProblemConfig
from models.pinn.model import PINN, PINNOps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY = 50
"""Pairs that L-BFGS keeps."""
EVALUATIONS = 25
"""Evaluations that an iteration of L-BFGS may take: those of its line search."""
GRADIENT_TOLERANCE = 1e-9
"""L-BFGS has converged when no component of the gradient is above this."""


class PINNTask(Task):
    """One problem, solved by a network.

    model            the network and its optimization.
    problem          the equation, its points and boundary conditions.
    steps            of Adam; those of L-BFGS are the model's.
    batch_size       points inside the domain a step; of a grid, about so many nodes.
    eval_batch_size  points of the held-out grid a batch.
    learning_rate    Adam's at the schedule's peak: linear up over warmup_steps, a cosine down to min_lr_ratio of it.
    weight_decay     decoupled, on all matrices.
    seed             of the points.

    Raises ValueError, naming the key or the file, for a problem that does not hold (see `problems.load`), a face
    without points and a number out of range.
    """

    name = "pinn"
    unit = "points"
    slots = ("laplacian",)
    loss_in_nats = False
    on_cpu = (
        "What they gain over nested gradients is the forward Laplacian's, which takes fewer operations on any device; "
        "the kernels add to it on a GPU."
    )
    targets = {"relative_l2": (1e-2, 1e-3, 1e-4)}  # noqa: RUF012 - as Task declares it

    def __init__(
        self,
        model: ModelConfig,
        problem: ProblemConfig,
        *,
        steps: int,
        batch_size: int,
        eval_batch_size: int,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        min_lr_ratio: float,
        seed: int,
    ) -> None:
        self.architecture = model.architecture()
        self.problem = problems.load(problem.name)
        self.settings = problem
        self.steps = steps
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.seed = seed
        self.grid: Grid | None = None
        """What the points of a step are the nodes of, or None."""
        self._other_grid: Grid | None = None
        if problem.sampling == "grid":
            self.grid = data.grid(self.problem, batch_size, problem.order)
            self._other_grid = data.grid(self.problem, (self.grid.shape[0] + 1) ** len(self.grid.shape), problem.order)
        self._resample = problem.sampling != "grid" and problem.resample is not False
        weight = problem.boundary_weight
        self._boundary_weight = self.problem.boundary_weight if weight is None else weight
        self._terms: dict[str, Tensor] = {}
        self._first = self.batch(0)
        self._fixed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def build(self, ops: Mapping[str, Callable[..., Any]]) -> nn.Module:
        a = self.architecture
        hard = self.settings.boundary == "hard"
        model = PINN(self.problem, a["width"], a["depth"], a["activation"], hard, PINNOps(**ops))
        return model.to(getattr(torch, a["dtype"]))

    def check(self, ops: Mapping[str, Callable[..., Any]], train: TrainConfig) -> None:
        if train.precision != "fp32":
            raise ConfigError(
                f"train.precision={train.precision}: second derivatives need more digits; allowed for model=pinn: fp32 "
                "(and model.dtype=float64)"
            )
        if train.accumulation != 1:
            raise ConfigError(
                f"train.accumulation={train.accumulation}: allowed for model=pinn: 1; "
                "train.batch_size is limited by memory alone"
            )
        model = PINN(self.problem, 2, 1, self.architecture["activation"], True, PINNOps(**ops))
        try:
            with torch.no_grad():
                model.jet(Points(self._in_dtype(self._first["interior"], _dtype(model), self.grid), self.grid))
        except ValueError as error:
            if self.grid is not None:
                raise ConfigError(f"ops.{error}") from error
            raise ConfigError(
                f"problem.sampling={self.settings.sampling}: {error}; set problem.sampling=grid"
            ) from error

    def batch(self, step: int, rank: int = 0) -> Batch:
        # L-BFGS keeps the points that the first step after Adam would have had.
        return self._points(self.seed, min(step, self.steps) if self._resample else 0, rank, self.grid)

    def _points(self, seed: int, step: int, rank: int, grid: Grid | None) -> Batch:
        problem, settings = self.problem, self.settings
        if grid is not None:
            points = {"interior": grid.nodes(problem.spatial, torch.device("cpu"), torch.float64)}
        else:
            points = {"interior": data.interior(problem, settings.sampling, self.batch_size, seed, step, rank)}
        if settings.boundary == "soft":
            points["boundary"] = data.boundary(problem, settings.boundary_points, seed, step, rank)
        return points

    def units(self, batch: Batch) -> int:
        return len(batch["interior"])

    def compile(self, model: nn.Module, **options: Any) -> None:
        """Compile the jet, and forward, which the boundary and the metric take.

        Raises ConfigError for the native Laplacian: torch.compile has no gradient of a compiled gradient.
        """
        assert isinstance(model, PINN)
        if model.ops.laplacian is laplacian_native:
            raise ConfigError(
                "compile: laplacian=native nests gradients, which torch.compile cannot compile; "
                "compiled arms need another ops.laplacian, and baseline=none"
            )
        model.jet = torch.compile(model.jet, **options)  # type: ignore[method-assign]
        model.compile(**options)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return self._loss(model, batch, self.grid), len(batch["interior"])

    def _loss(self, model: nn.Module, batch: Batch, grid: Grid | None) -> Tensor:
        loss = self._residual(model, batch["interior"], grid).square().mean()
        self._terms = {"residual": loss.detach()}
        if "boundary" in batch:
            x = batch["boundary"].to(_dtype(model))
            boundary = self._boundary_weight * (model(x) - self.problem.exact(x)).square().mean()
            self._terms["boundary"] = boundary.detach()
            loss = loss + boundary
        return loss

    def terms(self) -> Mapping[str, Tensor]:
        return self._terms

    def _residual(self, model: nn.Module, x: Tensor, grid: Grid | None) -> Tensor:
        x = self._in_dtype(x, _dtype(model), grid)
        u, du, lap = model.jet(Points(x, grid))  # type: ignore[operator]
        return self.problem.residual(u, du, lap, x)

    def _in_dtype(self, x: Tensor, dtype: torch.dtype, grid: Grid | None) -> Tensor:
        """The points in a dtype; the nodes of the training grid, which never move, are the same tensor every time."""
        if grid is None or grid is not self.grid:
            return x.to(dtype)
        if (x.device, dtype) not in self._fixed:
            self._fixed[x.device, dtype] = x.to(dtype)
        return self._fixed[x.device, dtype]

    def validation(self) -> Iterable[Batch]:
        return self._held_out

    @cached_property
    def _held_out(self) -> list[Batch]:
        """Points of the residual that are not trained on, then the held-out grid."""
        grid = data.held_out(self.problem, self.settings.validation_points, self.grid)
        return [
            self._points(self.seed + 1, 0, 0, self._other_grid),
            *({"x": x} for x in grid.split(self.eval_batch_size)),
        ]

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """The loss at points not trained on, and the relative L2 error |u - exact| / |exact| over the held-out grid."""
        losses, wrong, whole = [], [], []
        for batch in batches:
            if "interior" in batch:
                losses.append(self._loss(model, batch, self._other_grid))
                continue
            exact = self.problem.exact(batch["x"])
            wrong.append((model(batch["x"].to(_dtype(model))) - exact).square().sum())
            whole.append(exact.square().sum())
        squared = torch.stack(wrong).sum() / torch.stack(whole).sum()
        return {"loss": float(torch.stack(losses).mean()), "relative_l2": float(squared.sqrt())}

    def finished(self, metrics: Mapping[str, float]) -> str | None:
        target = self.settings.target
        if metrics["relative_l2"] <= target:
            return f"the relative L2 error is {metrics['relative_l2']:.3g}, and problem.target={target:g}"
        return None

    def phases(self) -> list[Phase]:
        phases = [Phase("adam", self.steps, self._adam, self._schedule)]
        if self.architecture["lbfgs_steps"]:
            dtype = torch.float64 if self.architecture["lbfgs_float64"] else None
            phases.append(
                Phase("lbfgs", self.architecture["lbfgs_steps"], _lbfgs, lambda step: 1.0, closure=True, dtype=dtype)
            )
        return phases

    def _adam(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, lr=self.learning_rate, fused=True)]

    def _schedule(self, step: int) -> float:
        return warmup_cosine(step, self.steps, self.warmup_steps, self.min_lr_ratio)

    def flops_per_step(self) -> None:
        """None: the ways to take a Laplacian differ in their FLOPs."""

    def describe(self, model: nn.Module, accumulation: int = 1) -> dict[str, str]:
        a, settings, dimensions = self.architecture, self.settings, self.problem.dimensions
        widths = "-".join(str(n) for n in (dimensions, *([a["width"]] * a["depth"]), 1))
        points = f"{accumulation * self.units(self._first):,} points a step ({settings.sampling}"
        points += ", new ones every step)" if self._resample else ", always the same)"
        if settings.boundary == "soft":
            points += f", {settings.boundary_points:,} on the boundary"
        phases = [f"{phase.steps:,} steps of {phase.name}" for phase in self.phases()]
        if a["lbfgs_steps"] and a["lbfgs_float64"]:
            phases[-1] += " in float64"
        return {
            "problem": f"{settings.name}: {self.problem.equation} ({self.problem.source})",
            "model": (
                f"{sum(p.numel() for p in model.parameters()):,} parameters: MLP {widths}, {a['activation']}, "
                f"{a['dtype']}, {settings.boundary} boundary conditions"
            ),
            "training": f"{', then '.join(phases)}; {points}",
        }

    def figures(self, model: nn.Module) -> dict[str, Figure]:
        """The solution, the exact one and the error on the mid-plane."""
        from models.pinn import figures  # matplotlib takes a while to import

        return {"solution": figures.solution(self.problem, model)}


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _lbfgs(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.LBFGS(
            model.parameters(),
            max_iter=1,
            max_eval=EVALUATIONS,
            tolerance_grad=GRADIENT_TOLERANCE,
            tolerance_change=0.0,
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
        )
    ]
