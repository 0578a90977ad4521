"""Write the tables of README.md and docs/ from the results: python benchmarks/tables.py --write, or --check.

A table stands between two comments, and what is between them is generated:

    <!-- table: nvidia-h200/operators summary -->
    <!-- end -->

A name is one of
    operators                        the operators of the registry
    GPU/REPORT [KIND] [OPERATOR ..]  the report benchmarks/results/GPU/REPORT.json; KIND is summary, short or contenders
                                     (see fusedops.benchmark.tables), and operators leave only their rows
    GPU/training                     the experiments that benchmarks/training.py kept in benchmarks/results/GPU/
    GPU/equivalence                  what benchmarks/equivalence.py kept there
    GPU/faults                       the same of its --faults
    GPU/attribution                  what benchmarks/attribution.py kept there
    GPU/pinn                         what benchmarks/pinn.py kept there
    GPU/recommender                  what benchmarks/recommender.py kept there
    benchmark, training              short for the two of the GPU that the README shows
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder; a GPU host need not have the package installed

import fusedops  # noqa: E402
from engine import attribution, equivalence  # noqa: E402
from engine.report import metric_text  # noqa: E402
from fusedops.benchmark.schema import Report  # noqa: E402
from fusedops.benchmark.tables import TABLES  # noqa: E402
from fusedops.registry import OPERATORS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SHORT_NAMES = {"benchmark": "nvidia-h200/operators short", "training": "nvidia-h200/training"}
MARKER = re.compile(
    r"(?P<open>^<!-- table: (?P<name>[^\n]+?) -->\n)(?P<body>.*?)(?P<close>^<!-- end -->$)", re.S | re.M
)
OPENING = re.compile(r"^<!-- table:", re.M)


def documents(root: Path = ROOT) -> Iterator[Path]:
    """The pages that may hold tables."""
    yield from (path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists())


def render(text: str, results: Path = RESULTS) -> str:
    """The text of a page with each table made anew.

    Raises ValueError for a table that is opened and not ended, and for a name that is no table.
    """
    if len(OPENING.findall(text)) != len(MARKER.findall(text)):
        raise ValueError("a <!-- table: ... --> is not followed by its <!-- end -->")
    return MARKER.sub(lambda match: f"{match['open']}{table(match['name'], results)}\n{match['close']}", text)


def table(name: str, results: Path = RESULTS) -> str:
    """The table of a name; for results that nobody has committed yet, a line that says so.

    Raises ValueError for a name of none of the forms above.
    """
    if name == "operators":
        return operators_table()
    path, *rest = SHORT_NAMES.get(name, name).split()
    kind, operators = (rest[0], rest[1:]) if rest else ("summary", [])
    if path.count("/") != 1:
        raise ValueError(
            f"table {name!r}: allowed are operators, {', '.join(SHORT_NAMES)}, GPU/REPORT and "
            f"{', '.join(f'GPU/{kind}' for kind in FOLDER_TABLES)}"
        )
    if kind not in TABLES:
        raise ValueError(f"table {name!r}: {kind!r} is no table of a report; there are {', '.join(TABLES)}")
    gpu, what = path.split("/")
    if what in FOLDER_TABLES:
        return FOLDER_TABLES[what](results / gpu)
    report = results / gpu / f"{what}.json"
    if not report.exists():
        return _missing(path)
    read = Report.read(report)
    rows = [row for row in read.rows if not operators or row.operator in operators]
    return TABLES[kind](dataclasses.replace(read, rows=rows))


def _missing(path: str) -> str:
    return f"No result is there yet: {path}."


def _lines(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its header."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def operators_table() -> str:
    """The operators that are public functions of the package."""
    public = [operator for operator in OPERATORS.values() if operator.name in fusedops.__all__]
    rows = [[f"`fusedops.{operator.name}`", f"`{operator.stock}`", f"`{operator.schema}`"] for operator in public]
    return _lines([["operator", "stock PyTorch", "schema"], *rows])


def training_table(folder: Path) -> str:
    """One line an arm of each experiment: what it learnt, how fast, in how much memory, by which paths."""
    summaries = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/summary.json"))}
    if not summaries:
        return _missing(f"{folder.name}/training")
    header = ["experiment", "arm", "validation", "throughput [95 %]", "ms a step", "over baseline [95 %]"]
    rows = [[*header, "peak memory, MiB", "operators (path, calls a step)"]]
    captions = []
    for experiment, summary in summaries.items():
        rows += [[experiment, *_arm(summary, name)] for name in summary["arms"]]
        versions = summary["versions"]
        parts = [
            f"{experiment}: {summary['device']}",
            *(f"{name} {versions[name]}" for name in ("fusedops", "torch", "triton") if versions.get(name)),
            f"commit {(versions['git'] or 'unknown')[:12]}",
        ]
        captions.append(f"{', '.join(parts)}. `{summary['command']}`.")
    return "\n\n".join([_lines(rows), *captions])


def _arm(summary: dict[str, Any], name: str) -> list[str]:
    arm, ratio = summary["arms"][name], summary["ratios"].get(name, {}).get("throughput")
    speed, memory = arm["throughput"], arm["peak_memory_bytes"]
    return [
        name,
        ", ".join(f"{metric} {metric_text(value)}" for metric, value in arm["metrics"].items()),
        f"{speed['value']:,.0f} [{speed['low']:,.0f}, {speed['high']:,.0f}] {speed['unit']}",
        f"{speed['step_ms']:.2f}",
        "-" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        "-" if memory is None else f"{memory / 2**20:,.0f}",
        "; ".join(f"{row['operator']} ({row['path']}, {row['calls_per_step']:g})" for row in arm["operators"]),
    ]


def equivalence_table(folder: Path, prefix: str = "equivalence") -> str:
    """The differences of each study: interval, smallest difference resolved, verdict."""
    summaries = _read(folder, prefix)
    if not summaries:
        return _missing(f"{folder.name}/{prefix}")
    rows, captions = [["experiment", *equivalence.DIFFERENCE_HEADER]], []
    for experiment, summary in summaries.items():
        rows += [[experiment, *row] for row in equivalence.difference_rows(summary)]
        one = summary["trainings"][0]
        size = f"{one['steps']:,} steps, {one['units'] / 1e6:.2f}M {summary['unit']} a training"
        captions.append(f"{experiment}: {size}; {_conditions(summary, summary['commits'])}.")
    return "\n\n".join([_lines(rows), *captions])


def attribution_table(folder: Path) -> str:
    """What each slot brings in each experiment, by each clock."""
    summaries = _read(folder, "attribution")
    if not summaries:
        return _missing(f"{folder.name}/attribution")
    rows, captions = [["experiment", "clock", *attribution.PART_HEADER]], []
    for experiment, summary in summaries.items():
        for clock, found in summary["measures"].items():
            rows += [[experiment, clock, *row] for row in attribution.part_rows(summary, clock)]
            step, swapped = found["step_ms"]["value"], found["swapped_step_ms"]["value"]
            captions.append(
                f"{experiment}, {attribution.CLOCKS[clock]}: {step:.3f} ms a stock step, {swapped:.3f} ms all swapped, "
                f"{found['rounds']} rounds, widest interval {found['widest']:.1%} of the step."
            )
        commits = [summary["versions"]["git"] or "unknown"]
        captions.append(f"{experiment}: {_conditions(summary, commits)}. `{summary['command']}`.")
    return "\n\n".join([_lines(rows), *captions])


def pinn_table(folder: Path) -> str:
    """Of each problem and way to take the Laplacian: the step, and the time until an error was reached."""
    summaries = _read(folder, "pinn")
    if not summaries:
        return _missing(f"{folder.name}/pinn")
    targets = [value for value in next(iter(summaries.values()))["targets"]["relative_l2"] if value >= 1e-3]
    header = ["problem", "laplacian", "ms a step", "over native [95 %]", "peak memory, MiB"]
    rows = [[*header, *(f"to {value:g}: s (steps)" for value in targets), "relative L2 error"]]
    for problem, summary in summaries.items():
        for name, arm in summary["arms"].items():
            found = arm["training"]["reached"]["relative_l2"][: len(targets)]
            cells = _arm(summary, name)
            times = ["-" if at is None else f"{at['seconds']:.2f} ({at['step']})" for at in found]
            rows.append([problem, name, *cells[3:6], *times, f"{arm['metrics']['relative_l2']:.2e}"])
    captions = [
        f"{_conditions(summary, [summary['versions']['git'] or 'unknown'])}. `{summary['command']}`."
        for summary in summaries.values()
    ]
    return "\n\n".join([_lines(rows), *dict.fromkeys(captions)])


def recommender_table(folder: Path) -> str:
    """Of each kind of tables and arm: the training step, the embedding step in it, memory; then what was learnt."""
    summaries = _read(folder, "recommender")
    if not summaries:
        return _missing(f"{folder.name}/recommender")
    learnt = summaries.pop("auc", None)
    header = ["tables", "arm", "ms a step", "samples/s", "over the better stock [95 %]", "GPU busy, ms"]
    rows = [[*header, "embedding step, ms", "over the better stock", "GB/s", "peak memory beyond the tables, MiB"]]
    captions = []
    for name, summary in summaries.items():
        for arm, whole in summary["whole"]["arms"].items():
            ratio, apart, memory = whole["ratio"], summary["embedding"]["arms"][arm], whole["peak_memory_bytes"]
            rows.append(
                [
                    name,
                    arm,
                    f"{whole['ms']['value']:.2f}",
                    f"{whole['samples_per_s']:,.0f}",
                    f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
                    "-" if whole["gpu_busy_ms"] is None else f"{whole['gpu_busy_ms']:.2f}",
                    f"{apart['ms']['value']:.2f}",
                    f"{apart['ratio']['value']:.2f}",
                    f"{apart['gb_per_s']:,.0f}",
                    "-" if memory is None else f"{memory['beyond_tables'] / 2**20:,.0f}",
                ]
            )
        work, conditions = summary["workload"], _conditions_of_fp32(summary)
        captions.append(
            f"{name}: 26 tables of {work['rows']:,} rows x {work['width']}, {work['ids_per_bag']} ids a bag, batch "
            f"{work['batch']:,}; {conditions}. `{summary['command']}`."
        )
    parts = [_lines(rows), *captions]
    if learnt is not None:
        metrics = ("auc", "logloss")
        lines = [["trained", *metrics]]
        for name, found in (learnt["metrics"] | learnt["references"]).items():
            lines.append([name, *(f"{found[metric]:.4f}" if metric in found else "-" for metric in metrics)])
        conditions = _conditions_of_fp32(learnt)
        parts += [
            _lines(lines),
            f"Fused minus native: {learnt['difference']:+.5f} AUC. {conditions}. `{learnt['command']}`.",
        ]
    return "\n\n".join(parts)


def _read(folder: Path, prefix: str) -> dict[str, Any]:
    """The results of a kind in a folder, by experiment."""
    return {
        path.stem.removeprefix(f"{prefix}_"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob(f"{prefix}_*.json"))
    }


def _conditions(summary: dict[str, Any], commits: list[str]) -> str:
    versions = summary["versions"]
    found = (f"{name} {versions[name]}" for name in ("fusedops", "torch", "triton") if versions.get(name))
    return ", ".join([summary["device"], summary["precision"], *found, *(f"commit {c[:12]}" for c in commits)])


def _conditions_of_fp32(summary: dict[str, Any]) -> str:
    return _conditions(summary | {"precision": "fp32"}, [summary["versions"]["git"] or "unknown"])


FOLDER_TABLES: dict[str, Callable[[Path], str]] = {
    "training": training_table,
    "equivalence": equivalence_table,
    "faults": lambda folder: equivalence_table(folder, "faults"),
    "attribution": attribution_table,
    "pinn": pinn_table,
    "recommender": recommender_table,
}


def main() -> int:
    """Write or check the pages. Returns 1 where --check finds one that differs."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = arguments.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the tables into the pages")
    action.add_argument("--check", action="store_true", help="only say which pages differ")
    options = arguments.parse_args()
    stale = [path for path in documents() if render(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'written' if options.write else 'differs from benchmarks/results/'}")
        if options.write:
            path.write_text(render(path.read_text()))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
