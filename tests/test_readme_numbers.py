"""The tables of the README and the documentation are those of the result files."""

from __future__ import annotations

import json

import pytest

from benchmarks import tables, training

PAGES = list(tables.documents())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    text = path.read_text()
    assert tables.render(text) == text, f"{path.name} differs: run python benchmarks/tables.py --write"


SUMMARY = {
    "model": "transformer",
    "device": "NVIDIA H200",
    "versions": {"fusedops": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3", "git": "fedcba9876543"},
    "arms": {
        name: {
            "metrics": {"loss": loss},
            "throughput": {
                "value": speed,
                "low": speed - 1e3,
                "high": speed + 1e3,
                "unit": "tokens/s",
                "step_ms": 18.25,
            },
            "peak_memory_bytes": 3 * 2**30,
            "operators": [
                {"slot": "mlp", "implementation": name, "operator": "gelu", "path": "stock", "calls_per_step": 8}
            ],
        }
        for name, loss, speed in (("native", 1.2345, 908_000.0), ("fused", 1.2346, 1_001_000.0))
    },
    "baseline": "native",
    "ratios": {
        "fused": {"throughput": {"value": 1.1, "low": 1.09, "high": 1.12}, "peak_memory": 1.0, "loss_difference": 1e-4}
    },
}


@pytest.fixture
def results(tmp_path):
    """Results with one experiment, kept from a run directory as benchmarks/training.py does."""
    run = tmp_path / "run"
    run.mkdir()
    for name in training.KEPT:
        (run / name).write_text("x")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    training.keep(run, tmp_path / "results", "transformer_d512", "python train.py experiment=transformer_d512")
    return tmp_path / "results"


def test_training_results_are_kept_and_shown(results):
    kept = results / "nvidia-h200" / "transformer_d512"
    assert {path.name for path in kept.iterdir()} == set(training.KEPT)
    text = tables.render("Before\n<!-- table: nvidia-h200/training -->\nold\n<!-- end -->\nafter\n", results)
    line = "| fused | loss 1.2346 | 1,001,000 [1,000,000, 1,002,000] tokens/s | 18.25 | 1.100 [1.090, 1.120] | 3,072 |"
    assert f"| transformer_d512 {line}" in text
    assert "commit fedcba987654. `python train.py experiment=transformer_d512`." in text
    assert text.startswith("Before\n<!-- table:") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert tables.render(text, results) == text


def test_every_public_operator_is_in_the_table_of_operators():
    text = tables.table("operators")
    for name in ("silu", "silu_mul", "smooth_relu", "linear_gelu_dropout", "flash_attention"):
        assert f"`fusedops.{name}`" in text


def test_results_that_are_not_there_yet_say_so(tmp_path):
    page = "<!-- table: some-gpu/operators short silu -->\n<!-- end -->\n"
    assert "No result is there yet" in tables.render(page, tmp_path)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: a/b -->\nno end\n", "not followed by"),
        ("<!-- table: a/b -->\n<!-- table: a/c -->\n<!-- end -->\n", "not followed by"),
        ("<!-- table: a/b widest -->\n<!-- end -->\n", "no table of a report"),
        ("<!-- table: benchmarks -->\n<!-- end -->\n", "allowed are operators, benchmark, training"),
    ],
)
def test_a_marker_that_is_wrong_is_refused(page, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tables.render(page, tmp_path)
