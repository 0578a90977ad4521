"""Write the tables of README.md and docs/ from the results: python benchmarks/tables.py --write, or --check.

A table stands between two comments, and what is between them is generated:

    <!-- table: nvidia-h200/operators summary -->
    <!-- end -->

A name is one of
    operators                        the operators of the registry
    GPU/REPORT [KIND] [OPERATOR ..]  the report benchmarks/results/GPU/REPORT.json; KIND is summary, short or contenders
                                     (see fusedops.benchmark.tables), and operators leave only their rows
    GPU/training                     the experiments that benchmarks/training.py kept in benchmarks/results/GPU/
    benchmark, training              short for the two of the GPU that the README shows
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder; a GPU host need not have the package installed

import fusedops  # noqa: E402
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
            f"table {name!r}: allowed are operators, {', '.join(SHORT_NAMES)}, GPU/REPORT and GPU/training"
        )
    if kind not in TABLES:
        raise ValueError(f"table {name!r}: {kind!r} is no table of a report; there are {', '.join(TABLES)}")
    gpu, what = path.split("/")
    if what == "training":
        return training_table(results / gpu)
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
        ", ".join(f"{metric} {value:.4f}" for metric, value in arm["metrics"].items()),
        f"{speed['value']:,.0f} [{speed['low']:,.0f}, {speed['high']:,.0f}] {speed['unit']}",
        f"{speed['step_ms']:.2f}",
        "-" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        "-" if memory is None else f"{memory / 2**20:,.0f}",
        "; ".join(f"{row['operator']} ({row['path']}, {row['calls_per_step']:g})" for row in arm["operators"]),
    ]


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
