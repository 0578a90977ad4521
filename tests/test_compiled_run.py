"""train.py with compile=, as a user meets it. The backend that generates no code stands in for Inductor's."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import train
from engine import timing
from models.transformer import Task

COMPILED = ["compile=default", "compile.backend=aot_eager"]
SMALL = [
    "train.device=cpu",
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=12",
    "model.d_ff=20",
    "model.context=16",
    "data.validation_fraction=0.0005",
    "train.steps=6",
    "train.warmup_steps=2",
    "train.batch_size=3",
    "train.sample_tokens=4",
    "tracker=none",
]


@pytest.fixture
def run(monkeypatch):
    """train.py in this process, its timing pass cut short: the exit code."""
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(Task, "references", lambda self: {})

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return train.main()

    return main


def summary_of(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.parametrize("preset", ["tiny", "tiny_swiglu"])
def test_a_comparison_of_compiled_and_eager_arms(run, tmp_path, capfd, preset):
    settings = [f"model.preset={preset}", "compile.arms=both", "train.accumulation=2", f"hydra.run.dir={tmp_path}"]
    assert run(*SMALL, *COMPILED, *settings) == 0
    summary = summary_of(tmp_path)
    assert list(summary["arms"]) == ["native", "fused", "native+compile", "fused+compile"]
    assert summary["baseline"] == "native" and set(summary["ratios"]) == set(summary["arms"]) - {"native"}
    losses = [arm["metrics"]["loss"] for arm in summary["arms"].values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-4)
    for name, arm in summary["arms"].items():
        if "+" not in name:
            assert arm["compile"] is None
        else:
            log = arm["compile"]
            assert log["seconds"] > 0 and log["training_recompiles"] == 0 and log["evaluation_recompiles"] <= 3
            assert arm["training"]["throughput"] > summary["arms"]["native"]["training"]["throughput"] / 20
    rows = {row["operator"]: row for row in summary["arms"]["fused+compile"]["operators"]}
    assert rows["fusedops::flash_attention"]["path"] == "cpu"
    assert rows["fusedops::flash_attention"]["calls_per_step"] == 4  # two layers, two batches
    if preset == "tiny":
        assert rows["fusedops::linear_gelu_dropout"]["path"] == "cpu"
    else:
        assert rows["fusedops::silu_mul"]["path"] == "aot_eager"
        assert rows["fusedops::silu_mul"]["calls_per_step"] == 4
    shown = capfd.readouterr().out.replace("\n", " ")
    assert "fused+compile: compiling took" in shown and "recompilations: 0 in training" in shown


def test_a_compiled_arms_model_is_a_plain_one(run, tmp_path):
    from transformers import AutoModelForCausalLM

    assert run(*SMALL, *COMPILED, "ops=fused", "baseline=none", f"hydra.run.dir={tmp_path}") == 0
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused+compile" / "model", output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    arm = summary_of(tmp_path)["arms"]["fused+compile"]
    with initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        task = train.make_task(train.config.resolve(compose("config", SMALL), train.MODELS))
    with torch.no_grad():
        loss = task.evaluate(model.eval(), task.validation())["loss"]
    assert loss == pytest.approx(arm["metrics"]["loss"], abs=1e-5)


def test_a_compiled_run_resumes_bit_for_bit(run, tmp_path, monkeypatch):
    settings = [*SMALL, *COMPILED, "ops=fused", "baseline=none", "model.dropout=0.1"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(*settings, f"hydra.run.dir={whole}") == 0
    batch = Task.batch

    def interrupting(self, step, rank=0):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, step, rank)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "batch", interrupting)
        assert run(*settings, f"hydra.run.dir={stopped}") == 128 + signal.SIGTERM
    assert run(f"resume={stopped}") == 0
    first, second = (summary_of(directory)["arms"]["fused+compile"] for directory in (whole, stopped))
    assert first["metrics"] == second["metrics"]
    assert first["training"]["final_loss"] == second["training"]["final_loss"]
