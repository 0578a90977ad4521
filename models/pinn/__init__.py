"""PINN: a network trained to solve a partial differential equation, measured against the exact solution."""

from models.pinn.config import PRESETS, ModelConfig, ProblemConfig
from models.pinn.problems import names as problem_names
from models.pinn.task import PINNTask as Task

DATA: dict[str, type] = {}
"""This model learns from a problem."""
PROBLEMS = dict.fromkeys(problem_names(), ProblemConfig)
"""The problems this model solves, by name, each with the dataclass of its configuration."""

__all__ = ["DATA", "PRESETS", "PROBLEMS", "ModelConfig", "ProblemConfig", "Task"]
