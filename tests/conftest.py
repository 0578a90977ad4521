"""Marks decide which tests run where: `gpu` needs CUDA, `interpreter` a process started with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run in this process, saying why."""
    without_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    wrong_process = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 before the process starts")
    for item in items:
        if item.get_closest_marker("gpu") and (INTERPRETING or not torch.cuda.is_available()):
            item.add_marker(without_gpu)
        if item.get_closest_marker("interpreter") and not INTERPRETING:
            item.add_marker(wrong_process)
