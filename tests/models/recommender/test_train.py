"""The recommender through train.py: the default run, what it misses without its parts, MovieLens; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECBOLE = "recbole==1.2.1"
BIAS_BASELINE = 0.761
"""AUC of user and item biases on MovieLens-100K, as published for a random split of four to one."""


def train(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "tracker=none", f"hydra.run.dir={directory}", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def summary_of(directory: Path, *overrides: str) -> dict[str, Any]:
    done = train(directory, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_default_run_learns_the_planted_model_on_both_arms(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, "model=recommender", "ops=fused")
    native, fused = (summary["arms"][name]["metrics"] for name in ("native", "fused"))
    constant, ceiling = (summary["references"][name] for name in ("constant", "planted model"))
    for metrics in (native, fused):
        assert metrics["loss"] < constant["loss"]
        assert metrics["auc"] - 0.5 >= 0.9 * (ceiling["auc"] - 0.5)
        assert metrics["calibration"] == pytest.approx(1, abs=0.05)
    assert abs(fused["auc"] - native["auc"]) <= 0.0005
    ran = {row["operator"]: row["calls_per_step"] for row in summary["arms"]["fused"]["operators"]}
    assert ran["fusedops::embedding_aggregation"] == ran["fusedops::row_update_"] == 1
    assert summary["arms"]["fused"]["gb_per_s"] > 0


@pytest.mark.slow
def test_without_embeddings_and_without_the_cross_auc_is_lost(tmp_path: Path) -> None:
    """A third of the default training is enough to see it."""
    short = ["model=recommender", "ops=native", "train.steps=300", "train.timing_rounds=9"]
    found = {}
    for name, keys in (("whole", []), ("cross", ["model.cross=none"]), ("embeddings", ["model.embeddings=false"])):
        (arm,) = summary_of(tmp_path / name, *short, *keys)["arms"].values()
        found[name] = arm["metrics"]["auc"]
    print("AUC of the model, without its cross, without embeddings:", found)
    assert found["whole"] - found["cross"] >= 0.01
    assert found["whole"] - found["embeddings"] >= 0.01


@pytest.mark.slow
def test_movielens_beats_user_and_item_bias_on_both_arms(tmp_path: Path) -> None:
    """Of the copy in recbole's wheel, which is read where it is installed."""
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "1",
        "--no-deps",
        "--target",
        str(tmp_path / "w"),
        RECBOLE,
    ]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"{RECBOLE} cannot be installed, which takes a network: {done.stderr.strip()[-200:]}")
    path = tmp_path / "w" / "recbole" / "dataset_example" / "ml-100k"
    summary = summary_of(tmp_path / "run", "experiment=recommender_movielens", f"data.path={path}")
    for name in ("native", "fused"):
        auc = summary["arms"][name]["metrics"]["auc"]
        print(f"MovieLens-100K, {name}: AUC {auc:.4f}")
        assert auc > max(BIAS_BASELINE, summary["references"]["user and item bias"]["auc"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.cross=fm"], "model.cross=fm: allowed: dot, none"),
        (
            ["model.table_optimizer=rowwise_adagrad"],
            "model.table_optimizer=rowwise_adagrad: an arm of ops.embedding=native",
        ),
        (["model.embeddings=false", "ops.embedding=native"], "ops.embedding=native: there is no slot of this model"),
        (["data=stdlib"], "data=stdlib: there is no data for model=recommender 'stdlib'"),
        (["data=movielens"], "data.path: none is given; data=movielens needs the folder of its files"),
    ],
)
def test_what_cannot_run_is_refused_before_training(overrides: list[str], message: str, tmp_path: Path) -> None:
    done = train(tmp_path, "model=recommender", *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()
