"""The recommender's benchmark: its arms compute and learn the same; its figures are those of the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recommender, tables
from engine.signals import StopSignal

CPU = torch.device("cpu")
TINY = recommender.Workload(rows=50, width=8, ids_per_bag=3, skew=0.999, batch=32)
EAGER = {name: arm for name, arm in recommender.arms_of(TINY).items() if not arm.compiled}


def test_arms_learn_the_same() -> None:
    """One table for all, or one a feature; stock or ours."""
    assert list(EAGER) == ["bags", "one_table", "fused"]
    batch, found = recommender.random_batch(TINY, CPU), {}
    first = recommender.Steps(EAGER["bags"], TINY, batch, CPU).model.state_dict()
    flat = torch.cat([first[f"tables.{i}"] for i in range(recommender.FEATURES)])
    for name, arm in EAGER.items():
        steps = recommender.Steps(arm, TINY, batch, CPU)
        own = {"tables.0": flat} if arm.one_table else {}
        others = {key: value for key, value in first.items() if not arm.one_table or not key.startswith("tables")}
        steps.model.load_state_dict(others | own)
        for _ in range(3):
            steps.whole()
        found[name] = torch.cat([table.detach() for table in steps.model.tables])
    assert not torch.equal(found["bags"], flat)
    torch.testing.assert_close(found["one_table"], found["bags"])
    torch.testing.assert_close(found["fused"], found["bags"])


def test_ids_hash_to_rows_by_the_power_law() -> None:
    batch = recommender.random_batch(TINY, CPU)
    assert len(batch["ids"]) == 26 * 32 * 3 and batch["offsets"].tolist() == list(range(0, 26 * 32 * 3 + 1, 3))
    counts = (batch["ids"] % TINY.rows).bincount(minlength=TINY.rows)
    assert counts[0] > 5 * counts[10] > 0 and len(batch["ids"].unique()) > 0.99 * len(batch["ids"])


def test_what_is_measured_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommender.timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(recommender, "arms_of", lambda workload: EAGER)
    with StopSignal() as stop:
        found = recommender.measure(TINY, CPU, 9, stop)
    assert found["whole"]["better_stock"] in ("bags", "one_table")
    for name in EAGER:
        whole, apart = found["whole"]["arms"][name], found["embedding"]["arms"][name]
        assert whole["samples_per_s"] == pytest.approx(32 / whole["ms"]["value"] * 1e3)
        assert apart["gb_per_s"] == pytest.approx(found["bytes_touched"] / apart["ms"]["value"] / 1e6)
        assert apart["share_of_step"] > 0 and whole["peak_memory_bytes"] is None
    assert found["whole"]["arms"][found["whole"]["better_stock"]]["ratio"]["value"] == 1

    origin = {"device": "NVIDIA X", "versions": {"fusedops": "0.1.0", "git": None}, "command": "python b.py"}
    learnt = {"metrics": {"fused": {"auc": 0.75, "logloss": 0.5}}, "references": {"constant": {"auc": 0.5}}}
    (tmp_path / "x").mkdir()
    for name, result in (("tiny", found), ("auc", learnt | {"difference": -0.0001})):
        (tmp_path / "x" / f"recommender_{name}.json").write_text(json.dumps(origin | result))
    text = tables.table("x/recommender", tmp_path)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows if row[0] == "tiny"] == list(EAGER)
    assert rows[2][2] == f"{found['whole']['arms']['bags']['ms']['value']:.2f}" and rows[2][-1] == "-"
    assert ["fused", "0.7500", "0.5000"] in rows and ["constant", "0.5000", "-"] in rows
    assert "tiny: 26 tables of 50 rows x 8, 3 ids a bag, batch 32; NVIDIA X, fp32, fusedops 0.1.0" in text
    assert "Fused minus native: -0.00010 AUC." in text
