"""python -m fusedops.testing [OPERATOR ...]: the table of checks of the named operators, or of all."""

from __future__ import annotations

import argparse
import sys

from fusedops import registry
from fusedops.testing import CHECKS, check_operator, table


def main() -> int:
    """Run the checks that the command line asks for; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m fusedops.testing", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="names; all of them if none is given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="only this check; may be repeated")
    parser.add_argument("--seed", type=int, help="of the random inputs")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.operators if name not in registry.OPERATORS]
    if unknown:
        parser.error(f"no operator {', '.join(unknown)}; there are {', '.join(registry.OPERATORS)}")
    failed = False
    for name in arguments.operators or registry.OPERATORS:
        try:
            report = check_operator(
                registry.operator(name), arguments.device, checks=arguments.check, seed=arguments.seed
            )
        except AssertionError as error:
            failed = True
            print(error)
        else:
            print(table(f"fusedops::{name} on {arguments.device}", report))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
