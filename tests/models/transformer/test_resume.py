"""A transformer's run that was stopped and resumed is bit-equal to one that was not, whatever its text comes from."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("datasets")

import train
from engine import timing
from models.transformer import Task
from models.transformer.model import Transformer

SMALL = [
    *(
        "model.n_layer=2",
        "model.n_head=2",
        "model.d_model=16",
        "model.d_ff=24",
        "model.context=24",
        "model.dropout=0.2",
    ),
    *("train.steps=13", "train.warmup_steps=2", "train.batch_size=3", "train.accumulation=2", "train.log_every=3"),
    *("train.eval_every=5", "train.device=cpu", "train.sample_tokens=20", "tracker=none", "baseline=none"),
]


def run(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    return train.main()


def left(directory: Path) -> dict[str, Any]:
    """The models of a run, its metrics without times, its samples."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    return {
        "lines": [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines],
        "samples": summary["arms"]["fused"]["samples"],
        "model": (directory / "fused/model/model.safetensors").read_bytes(),
    }


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "stream"])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(streaming: bool, tmp_path, monkeypatch, capfd) -> None:
    rows = [{"text": f"row {i} of the text" + " and so on" * (i % 7) + "\n"} for i in range(70)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=files", f"data.path={tmp_path}/rows.jsonl", f"data.streaming={streaming}"]
    data += ["data.shuffle_buffer=8", "data.validation_bytes=100"]
    assert run(monkeypatch, *SMALL, *data, f"hydra.run.dir={tmp_path}/whole") == 0

    loss = Task.loss
    taken = stop_at = 0

    def interrupted_loss(self: Task, model: Any, batch: Any) -> Any:
        nonlocal taken
        taken += model.training
        if taken == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, model, batch)

    monkeypatch.setattr(Task, "loss", interrupted_loss)
    arguments = [*SMALL, *data, f"hydra.run.dir={tmp_path}/parts"]
    # A step has two losses, and the arm's table of operators takes three steps before the training.
    for losses in (2 * (3 + 4), 2 * (3 + 6) + 1):
        taken, stop_at = 0, losses
        assert run(monkeypatch, *arguments) == 128 + signal.SIGTERM
        assert not (tmp_path / "parts/summary.json").exists()
        arguments = [f"resume={tmp_path}/parts"]
    stop_at = 0
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace("row 1 ", "row one "))
    assert run(monkeypatch, *arguments) == 2
    assert "data.digest" in capfd.readouterr().err
    (tmp_path / "rows.jsonl").write_text(text)
    assert run(monkeypatch, *arguments) == 0
    assert left(tmp_path / "parts") == left(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts/fused/model")
    assert isinstance(model, Transformer) and model.config.d_model == 16
