"""docs/adding_an_operator.md as it stands: its files are added to a copy of the library, which then runs its checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_an_operator.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Where a block's indented lines belong: before the first of these in the file it is for.
ENDS_OF_LISTS = {"fusedops/registry.py": "    )\n}", "fusedops/slots/__init__.py": "    )\n}"}


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(PAGE) if found == language]


def insert(source: str, addition: str, end_of_list: str) -> str:
    """The import goes beside the library's others, indented lines to the end of the list."""
    lines = addition.splitlines(keepends=True)
    imports = "".join(line for line in lines if line.startswith("from "))
    entries = "".join(line for line in lines if line.startswith("    "))
    before, after = source.split("from fusedops.", 1)
    source = f"{before}{imports}from fusedops.{after}"
    before, separator, after = source.rpartition(end_of_list)
    assert separator, "the list was not found"
    return before + entries + separator + after


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a copy of fusedops and the page's four additions."""
    root = tmp_path_factory.mktemp("library")
    shutil.copytree(ROOT / "fusedops", root / "fusedops", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests" / "fusedops").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "fusedops" / "schemas.json", root / "tests" / "fusedops")
    for block in blocks("python"):
        header, text = block.split("\n", 1)
        if header.startswith("# fusedops/"):
            path = root / header.removeprefix("# ")
            path.write_text(insert(path.read_text(), text, ENDS_OF_LISTS[header[2:]]) if path.exists() else text)
    yield root


def run(library: Path, *arguments: str, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=library,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_files_are_those_named() -> None:
    """One block a place, and one that checks."""
    headers = [block.split("\n", 1)[0] for block in blocks("python")]
    assert headers == [
        "# fusedops/operators/relu_squared.py",
        "# fusedops/kernels/relu_squared.py",
        "# fusedops/registry.py",
        "# fusedops/slots/__init__.py",
        "import torch",
    ]


def test_checks_pass(library: Path) -> None:
    """The page's last Python block, on the CPU implementations."""
    output = run(library, "-c", blocks("python")[-1])
    assert output.count("0 failed") == 2


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands(library: Path, line: str) -> None:
    """The page's commands, those that check with a selection of the checks."""
    before, arguments = line.split("python ")
    environment = dict(setting.split("=") for setting in before.split())
    if "cuda" in arguments and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    checks = ["values", "gradients", "non_finite", "unwritten_memory", "second_finite_differences", "vmap"]
    selection = [] if "--record-schemas" in arguments else [f"--check={check}" for check in checks]
    output = run(library, *arguments.split(), *selection, **environment)
    if selection:
        assert output.count("6 passed, 0 failed") == 2
    else:
        assert '"relu_squared"' in (library / "tests" / "fusedops" / "schemas.json").read_text()
