"""Marks decide which tests run where: `gpu` needs CUDA, `interpreter` a process started with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata

# Inductor compiles in this process: a pool of workers has little to do here and may keep Python from ending.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where operators run: the CPU implementations, the kernels in the interpreter, the kernels on a GPU."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def large_tiles() -> Iterator[None]:
    """In the interpreter a program takes its time whatever its tile: few programs of large tiles."""
    if not INTERPRETING:
        yield
        return
    from fusedops.kernels import laplacian3d

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laplacian3d, "THREADS", 256)
        yield


def interpreter_refused() -> bool:
    """Whether NumPy refuses what Triton's interpreter does: Triton 3.6's makes numbers of arrays of one element."""

    def version(package: str) -> tuple[int, ...]:
        return tuple(int(part) for part in metadata.version(package).split(".")[:2])

    return INTERPRETING and version("triton") < (3, 7) and version("numpy") >= (2, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run in this process, saying why."""
    without_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    wrong_process = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 before the process starts")
    too_old = pytest.mark.skip(reason="the interpreter of Triton before 3.7 does not run with NumPy 2.4 or newer")
    refused = interpreter_refused()
    for item in items:
        if item.get_closest_marker("gpu") and (INTERPRETING or not torch.cuda.is_available()):
            item.add_marker(without_gpu)
        if item.get_closest_marker("interpreter") and not INTERPRETING:
            item.add_marker(wrong_process)
        elif item.get_closest_marker("interpreter") and refused:
            item.add_marker(too_old)
