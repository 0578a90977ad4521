"""Configuration of the PINN: the network and how it is optimized, and the problem with its points."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fusedops.operators.smooth_activations import ACTIVATIONS, WITHOUT_CURVATURE
from models.pinn import problems

DTYPES = ("float32", "float64")
BOUNDARIES = ("hard", "soft")
SAMPLINGS = ("sobol", "uniform", "grid")

_SOLVER: dict[str, Any] = {"activation": "tanh", "dtype": "float32", "lbfgs_steps": 0, "lbfgs_float64": True}
PRESETS: dict[str, dict[str, Any]] = {
    # Minutes on two CPU cores, nested autograd included.
    "tiny": {"width": 32, "depth": 3} | _SOLVER | {"lbfgs_steps": 150, "lbfgs_float64": False},
    # Seconds on a GPU.
    "small": {"width": 64, "depth": 3} | _SOLVER,
    # The network whose residual step the figures of the Laplacian are given for.
    "wide": {"width": 128, "depth": 3} | _SOLVER,
}


def check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of allowed."""
    if value not in allowed:
        raise ValueError(f"{key}={value}: allowed: {', '.join(allowed)}")


def check_activation(name: str) -> None:
    """Raise ValueError for an activation that is not offered, with the reason for those without a second derivative."""
    if name in WITHOUT_CURVATURE:
        raise ValueError(
            f"model.activation={name}: its second derivative is zero, so no Laplacian could be learnt; "
            f"allowed: {', '.join(ACTIVATIONS)}"
        )
    check_choice("model.activation", name, tuple(ACTIVATIONS))


def check_at_least(key: str, value: float, low: float) -> None:
    """Raise ValueError for a number below low."""
    if not value >= low:
        raise ValueError(f"{key}={value}: must be at least {low}")


@dataclass
class ModelConfig:
    """The network, a multilayer perceptron, and how it is optimized: a preset, and what differs from it."""

    name: str = "pinn"
    """The model's name; fixed."""
    preset: str = "tiny"
    """Where keys left null take their values from: tiny, small, wide."""
    width: int | None = None
    """Units of each hidden layer."""
    depth: int | None = None
    """Hidden layers."""
    activation: str | None = None
    """tanh, sin, silu or gelu (exact): one with a second derivative."""
    dtype: str | None = None
    """float32 or float64: of the weights and the points."""
    lbfgs_steps: int | None = None
    """Iterations of L-BFGS after the steps of Adam, on one fixed set of points; 0 is none."""
    lbfgs_float64: bool | None = None
    """Whether L-BFGS runs in float64: in float32 its line search soon finds nothing better."""

    def __post_init__(self) -> None:
        check_choice("model.name", self.name, ("pinn",))
        check_choice("model.preset", self.preset, tuple(PRESETS))
        values = self.architecture()
        check_at_least("model.width", values["width"], 1)
        check_at_least("model.depth", values["depth"], 1)
        check_activation(values["activation"])
        check_choice("model.dtype", values["dtype"], DTYPES)
        check_at_least("model.lbfgs_steps", values["lbfgs_steps"], 0)

    def architecture(self) -> dict[str, Any]:
        """Every key with its value: the override where there is one, otherwise the preset's."""
        overrides = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "preset")}
        return PRESETS[self.preset] | {key: value for key, value in overrides.items() if value is not None}


@dataclass
class ProblemConfig:
    """The problem, its points and its boundary conditions. `train.batch_size` is the number of points of a step."""

    name: str = "poisson"
    """The problem: the name of its file in models/pinn/problems/."""
    sampling: str = "sobol"
    """sobol (a scrambled Sobol set, moved at random each time), uniform (random points) or grid (its nodes)."""
    resample: bool | None = None
    """Whether every step of Adam draws new points, which null means for scattered ones; L-BFGS always keeps one set."""
    order: int = 4
    """Order of the differences, 2 or 4, of the implementations that take them on a grid."""
    boundary: str = "hard"
    """hard: the network's output is transformed so that it meets the conditions; soft: a term of the loss."""
    boundary_weight: float | None = None
    """Weight of the soft boundary's mean squared error beside the mean squared residual; null is the problem's own."""
    boundary_points: int = 600
    """Points of a step on the soft boundary, shared evenly by its faces."""
    validation_points: int = 27
    """Points along each axis of the held-out grid that the relative L2 error is taken over, in time a third of them."""
    target: float = 0.0
    """Relative L2 error at which an arm's training ends early; 0 is never. Looked at every train.eval_every steps."""

    def __post_init__(self) -> None:
        check_choice("problem", self.name, tuple(problems.names()))
        check_choice("problem.sampling", self.sampling, SAMPLINGS)
        if self.sampling == "grid" and self.resample:
            raise ValueError("problem.resample=true: the nodes of problem.sampling=grid stay; sobol and uniform move")
        if self.order not in (2, 4):
            raise ValueError(f"problem.order={self.order}: allowed: 2, 4")
        check_choice("problem.boundary", self.boundary, BOUNDARIES)
        if self.boundary_weight is not None:
            check_at_least("problem.boundary_weight", self.boundary_weight, 0)
        check_at_least("problem.boundary_points", self.boundary_points, 0)
        check_at_least("problem.validation_points", self.validation_points, 3)
        check_at_least("problem.target", self.target, 0)
