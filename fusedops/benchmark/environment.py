"""What a result depends on besides the code that is measured: versions, commit, GPU, settings."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fusedops

COMMIT_VARIABLE = "FUSEDOPS_COMMIT"
"""Environment variable that names the commit where the sources are a copy without their repository."""


def versions() -> dict[str, str | None]:
    """The versions a result depends on; git is this project's commit."""
    triton = metadata.version("triton") if importlib.util.find_spec("triton") is not None else None
    return {
        "fusedops": fusedops.__version__,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "git": commit(),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """What a result depends on besides the code: GPU, versions, commit, date, command, precision settings."""
    on_gpu, found = device.type == "cuda", versions()
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_arguments()]),
        "commit": found.pop("git"),
        "versions": {
            **found,
            "cuda": torch.version.cuda if on_gpu else None,
            "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        },
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32" if on_gpu else None,
        "platform": platform.platform(),
    }


def _arguments() -> list[str]:
    """This process's arguments after the interpreter, without where the report goes: a path of this machine."""
    script, *rest = sys.argv
    rest = [
        word for before, word in zip(["", *rest], rest, strict=False) if "--out" not in (before, word.split("=")[0])
    ]
    if Path(script).name == "__main__.py":
        return ["-m", "fusedops.benchmark", *rest]
    return [os.path.relpath(script), *rest]


def commit() -> str | None:
    """The commit of the sources, with "-dirty" where tracked files differ from it; None where nothing tells.

    The environment variable FUSEDOPS_COMMIT goes before what a repository says: a copy of the sources may lie in one of
    another commit.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    if os.environ.get(COMMIT_VARIABLE):
        return os.environ[COMMIT_VARIABLE]
    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
