from __future__ import annotations

import io
import json
import os

import pytest
from rich.console import Console

from engine import report
from engine.config import TrainConfig
from engine.tracking import NullTracker

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def concluded(toy_task, compare, tmp_path):
    """A comparison that ran and was reported: what the terminal showed, and summary.json."""
    comparison = compare(toy_task(steps=12))
    comparison.run()
    console = Console(file=io.StringIO(), width=200)
    report.conclude(console, comparison, "native", {"train": {"steps": 12}}, tmp_path, NullTracker())
    return console.file.getvalue(), json.loads((tmp_path / "summary.json").read_text())


def check_schema(summary):
    """summary.json as the design has it; keys may be added, never changed."""
    assert isinstance(summary["model"], str) and isinstance(summary["device"], str)
    assert {"fusedops", "torch", "triton", "python", "git"} <= set(summary["versions"])
    assert summary["baseline"] is None or summary["baseline"] in summary["arms"]
    for arm in summary["arms"].values():
        assert isinstance(arm["metrics"]["loss"], float)
        speed = arm["throughput"]
        assert 0 < speed["low"] <= speed["value"] <= speed["high"] and speed["step_ms"] > 0
        assert isinstance(speed["unit"], str)
        assert arm["peak_memory_bytes"] is None or arm["peak_memory_bytes"] > 0
        assert arm["operators"]
        for row in arm["operators"]:
            assert set(row) == {"slot", "implementation", "operator", "path", "calls_per_step"}
            assert isinstance(row["calls_per_step"], int) and row["calls_per_step"] > 0
    others = set(summary["arms"]) - {summary["baseline"]} if summary["baseline"] else set()
    assert set(summary["ratios"]) == others
    for ratios in summary["ratios"].values():
        assert ratios["throughput"]["low"] <= ratios["throughput"]["value"] <= ratios["throughput"]["high"]
        assert ratios["peak_memory"] is None or ratios["peak_memory"] > 0
        assert isinstance(ratios["loss_difference"], float)


def test_references_may_have_several_metrics_and_steps_bytes(toy_task, compare, tmp_path):
    task = toy_task(steps=12)
    task.references = lambda: {"zero": 0.5, "constant": {"loss": 0.25, "auc": 0.5}}
    task.bytes_per_step = lambda: 3_000_000
    comparison = compare(task)
    comparison.run()
    console = Console(file=io.StringIO(), width=200)
    report.conclude(console, comparison, "native", {}, tmp_path, NullTracker())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["references"] == {"zero": 0.5, "constant": {"loss": 0.25, "auc": 0.5}}
    for arm in summary["arms"].values():
        assert arm["gb_per_s"] == pytest.approx(3 / arm["throughput"]["step_ms"])
    table = report.tables(summary)[0]
    assert table.header[-2:] == ("GB/s", "peak memory")
    assert {len(row) for row in table.rows} == {len(table.header)}
    assert [row[:2] for row in table.rows[2:]] == [("reference: zero", "0.5000"), ("reference: constant", "0.2500")]


def test_the_summary_has_the_schema(concluded):
    _, summary = concluded
    check_schema(summary)
    assert list(summary["arms"]) == ["native", "fused"] and summary["references"] == {"zero": 0.5}
    native, fused = summary["arms"]["native"], summary["arms"]["fused"]
    assert native["peak_memory_bytes"] is None and native["throughput"]["unit"] == "samples/s"
    assert native["throughput"]["value"] == pytest.approx(6 / native["throughput"]["step_ms"] * 1e3, rel=0.05)
    difference = fused["metrics"]["loss"] - native["metrics"]["loss"]
    assert summary["ratios"]["fused"]["loss_difference"] == pytest.approx(difference)
    assert [row["path"] for row in fused["operators"]] == ["cpu", "cpu"]


def cells(line, border):
    return [cell.strip() for cell in line.strip().strip(border).split(border)]


def test_terminal_and_file_show_the_same(concluded, tmp_path):
    shown, summary = concluded
    text = (tmp_path / "comparison.md").read_text()
    in_file = [cells(line, "|") for line in text.splitlines() if line.startswith("|") and "---" not in line]
    on_terminal = [cells(line.replace("┃", "│"), "│") for line in shown.splitlines() if line.strip()[:1] in ("│", "┃")]
    assert in_file == on_terminal and len(in_file) == 3 + len(report.tables(summary)) + 1 + 4
    for note in report.notes(summary):
        assert note in text and note in shown.replace("\n", " ")


def test_on_a_cpu_it_says_what_fused_means(concluded):
    shown, _ = concluded
    assert "fused means the CPU implementations" in shown.replace("\n", " ")


def test_the_figures_are_images_and_nothing_half_written_stays(concluded, tmp_path):
    for name in ("loss.png", "throughput.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_without_a_baseline_there_are_no_ratios(toy_task, compare):
    comparison = compare(toy_task(steps=1), ("fused",))
    comparison.run()
    summary = report.summarize(comparison, None, {})
    check_schema(summary)
    assert summary["baseline"] is None and summary["ratios"] == {}
    assert "Relative to" not in report.markdown(summary)


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    report.write_atomically(path, "old")

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        report.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_versions_name_the_commit_or_nothing(monkeypatch):
    assert report.versions()["python"].startswith("3.")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("FUSEDOPS_COMMIT", raising=False)
    assert report.versions()["git"] is None


def test_a_commit_named_from_outside_goes_before_the_repository_around_the_sources(monkeypatch):
    monkeypatch.setenv("FUSEDOPS_COMMIT", "0123abc")
    assert report.versions()["git"] == "0123abc"


def test_an_early_stop_is_said_and_reported_by_its_best_evaluation(toy_task, compare, tmp_path):
    task, script = toy_task(steps=9), iter([3.0, 2.0, 2.5, 2.25, 3.0, 2.5, 2.0, 1.5, 1.0])
    task.evaluate = lambda model, batches: {"loss": next(script)}
    comparison = compare(task, train=TrainConfig(eval_every=2, early_stop=2, accumulation=3, device="cpu"))
    comparison.run()
    summary = report.summarize(comparison, "native", {})
    native, fused = summary["arms"]["native"], summary["arms"]["fused"]
    assert native["metrics"] == {"loss": 2.0} and native["training"]["reported_step"] == 4
    assert native["training"]["steps"] == 8 and "stopped at step 8 of 9" in native["training"]["stopped_early"]
    assert fused["training"]["reported_step"] == fused["training"]["steps"] == 9
    assert fused["training"]["stopped_early"] is None
    said = "\n".join(report.notes(summary))
    assert "native: stopped at step 8 of 9: in 2 evaluations the validation loss did not fall below" in said
    assert "native: metrics and saved model are those of step 4, its best." in said and "fused: " not in said
    assert native["tflops"] == pytest.approx(3 * 1000 / native["throughput"]["step_ms"] / 1e9)
