"""docs/pinn.md: the problem it adds is one file, which is solved as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine.config import TrainConfig
from engine.step import make_stepper
from fusedops.slots import SLOTS
from models.pinn import ModelConfig, ProblemConfig, Task, problems

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pinn.md"


@pytest.mark.parametrize("implementation", ["native", "fused"])
def test_the_pages_problem_is_solved(implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n# models/pinn/problems/membrane.py\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "membrane.py").write_text(block)
    monkeypatch.setattr(problems, "__path__", [*problems.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)  # which makes importlib look for new files
    task = Task(
        ModelConfig(width=16, depth=2, lbfgs_steps=40),
        ProblemConfig("membrane"),
        steps=60,
        batch_size=128,
        eval_batch_size=1000,
        learning_rate=1e-2,
        weight_decay=0.0,
        warmup_steps=0,
        min_lr_ratio=0.01,
        seed=0,
    )
    torch.manual_seed(0)
    model, step = task.build({"laplacian": SLOTS["laplacian"].implementation(implementation).function}), 0
    for phase in task.phases():
        stepper = make_stepper(task, model, phase, TrainConfig(grad_clip=0.0), torch.device("cpu"))
        for _ in range(phase.steps):
            stepper(task.batch(step))
            step += 1
    with torch.no_grad():
        assert task.evaluate(model, task.validation())["relative_l2"] < 1e-2


def test_the_page_lists_every_problem_and_implementation() -> None:
    page = PAGE.read_text()
    for name in (*problems.names(), *SLOTS["laplacian"].implementations):
        assert f"`{name}`" in page
