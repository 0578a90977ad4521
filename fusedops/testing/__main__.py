"""The table of checks of the named operators, or of all; or the record of their schemas."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fusedops import registry
from fusedops.testing import CHECKS, check_operator, schemas, table

SCHEMAS = Path("tests/fusedops/schemas.json")


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m fusedops.testing", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="names; all of them if none is given")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="only this check; may be repeated")
    parser.add_argument("--seed", type=int, help="of the random inputs; a failure names it")
    parser.add_argument(
        "--record-schemas",
        nargs="?",
        type=Path,
        const=SCHEMAS,
        metavar="FILE",
        help=f"write every operator's schema to a file ({SCHEMAS}) that later versions stay compatible with",
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.operators if name not in registry.OPERATORS]
    if unknown:
        parser.error(f"no operator {', '.join(unknown)}; there are {', '.join(registry.OPERATORS)}")
    if arguments.record_schemas is not None:
        try:
            schemas.record(arguments.record_schemas)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    failed = False
    for name in arguments.operators or registry.OPERATORS:
        try:
            report = check_operator(
                registry.operator(name), arguments.device, checks=arguments.check, seed=arguments.seed
            )
        except AssertionError as error:
            failed = True
            print(error, flush=True)
        else:
            print(table(f"fusedops::{name} on {arguments.device}", report), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
