"""python -m fusedops.benchmark [OPERATOR ...]: measure the rows of these operators, or all of them."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fusedops.benchmark.comparison import default_device
from fusedops.benchmark.rows import select
from fusedops.benchmark.runner import estimate_seconds, failures, run, slug
from fusedops.benchmark.schema import Method
from fusedops.benchmark.tables import summary_table
from fusedops.benchmark.workloads import Settings


def _device(text: str) -> torch.device:
    """The device of an argument, if it is there."""
    name, _, index = text.partition(":")
    count = torch.cuda.device_count()
    if name == "cpu" and not index:
        return torch.device("cpu")
    if name == "cuda" and (not index or index.isdecimal()) and int(index or 0) < count:
        return torch.device(text)
    there = ", ".join(["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))])
    raise argparse.ArgumentTypeError(f"there is no device {text!r}; there are {there}")


def _can_write(path: Path) -> None:
    """Raise OSError unless a file can be written there; makes its folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def parser() -> argparse.ArgumentParser:
    """The command line."""
    usual = Method()
    arguments = argparse.ArgumentParser(prog="python -m fusedops.benchmark", description=__doc__)
    arguments.add_argument("operators", nargs="*", metavar="OPERATOR", help="only the rows of these operators")
    arguments.add_argument(
        "--rows", default="", metavar="IDS", help="only these rows: 12,13 or 4a; extra rows by their id"
    )
    arguments.add_argument("--rounds", type=int, help=f"samples of each contender (default {usual.rounds}; quick 3)")
    arguments.add_argument(
        "--idle", type=float, help=f"seconds of idle before a sample (default {usual.idle_s}; quick 0)"
    )
    arguments.add_argument(
        "--window", type=float, help=f"milliseconds a sample fills (default {usual.window_ms}; quick 1)"
    )
    arguments.add_argument(
        "--seed", type=int, default=usual.seed, help="seed of inputs, orders and bootstrap (default 0)"
    )
    arguments.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the report here after each row; {gpu} is its name"
    )
    arguments.add_argument(
        "--quick", action="store_true", help="small shapes: shows that it works; the CPU's only choice"
    )
    arguments.add_argument("--device", type=_device, help="default: the current GPU, or the CPU where there is none")
    arguments.add_argument("--all-peers", action="store_true", help="also the peers known to be far behind")
    arguments.add_argument("--max-autotune", action="store_true", help="also torch.compile in mode max-autotune (slow)")
    arguments.add_argument("--list", action="store_true", help="list the rows and leave")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 1 where a row failed."""
    arguments = parser()
    options = arguments.parse_args(argv)
    device = options.device or default_device()
    quick = options.quick
    try:
        rows = select(options.operators, [id_ for id_ in options.rows.split(",") if id_])
        usual = Method(rounds=3, idle_s=0.0, window_ms=1.0) if quick else Method()
        method = Method(
            rounds=usual.rounds if options.rounds is None else options.rounds,
            idle_s=usual.idle_s if options.idle is None else options.idle,
            window_ms=usual.window_ms if options.window is None else options.window,
            seed=options.seed,
        )
    except ValueError as error:
        arguments.error(str(error))
    if options.list:
        for row in rows:
            print(f"{row.id:>12}  {row.operator}  {row.work}, {row.direction}, {row.shape}")
        return 0
    if device.type == "cpu" and not quick:
        arguments.error("there is no GPU, and the rows are of a GPU's size; --quick runs small ones on the CPU")
    settings = Settings(
        device=device, compiled=not quick, max_autotune=options.max_autotune, all_peers=options.all_peers
    )
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")

    out = None if options.out is None else Path(str(options.out).replace("{gpu}", slug(device)))
    if out is not None:
        try:
            _can_write(out)
        except OSError as error:
            arguments.error(f"--out {out}: {error}")
    seconds = estimate_seconds(rows, method, settings, quick=quick)
    print(f"{len(rows)} rows on {device}; about {seconds // 60:.0f} min {seconds % 60:.0f} s", flush=True)
    report = run(rows, settings, method, quick=quick, out=out, say=lambda line: print(line, flush=True))
    print(f"\n{summary_table(report)}")
    if out is not None:
        print(f"\nwritten to {out}")
    failed = failures(report)
    for result in failed:
        print(f"row {result.id} failed: {result.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
