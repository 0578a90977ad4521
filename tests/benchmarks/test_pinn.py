"""benchmarks/pinn.py: what it measures, and the table that is made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import pinn, tables
from engine import timing
from engine.errors import ConfigError

SMALL = ["train.device=cpu", "train.batch_size=125", "model.width=8", "model.depth=2", "problem.validation_points=6"]
SHORT = ["train.steps=10", "model.lbfgs_steps=10", "train.eval_every=5", "problem.target=0.5"]


def test_the_slots_implementations_are_measured_without_aliases() -> None:
    assert pinn.implementations() == ["native", "stencil_native", "stencil", "forward_native", "forward"]


def test_a_result_has_the_time_until_an_error_was_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    path = pinn.measure("poisson", ["native", "stencil", "forward"], [*SMALL, *SHORT], tmp_path)
    summary = json.loads(path.read_text())
    assert path.name == "pinn_poisson.json" and list(summary["arms"]) == ["native", "stencil", "forward"]
    assert summary["arms"]["native"]["metrics"]["relative_l2"] == pytest.approx(
        summary["arms"]["forward"]["metrics"]["relative_l2"], rel=0.05
    )
    # What a training that had got further would have left:
    reached = {"step": 120, "seconds": 3.456}
    summary["arms"]["forward"]["training"]["reached"]["relative_l2"] = [reached, None, None]
    path.write_text(json.dumps(summary))
    lines = tables.table(f"{path.parent.name}/pinn", tmp_path).splitlines()
    header, _, *rows = (line.split(" | ") for line in lines[:5])
    assert header[5:7] == ["to 0.01: s (steps)", "to 0.001: s (steps)"]
    assert [row[1] for row in rows] == ["native", "stencil", "forward"]
    assert rows[0][3] == "-" and rows[2][5:7] == ["3.46 (120)", "-"]


def test_an_implementation_or_problem_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no implementation of laplacian 'stencill'; did you mean stencil"):
        pinn.measure("poisson", ["stencill"], SMALL, tmp_path)
