"""What `import fusedops` needs and does: torch alone, and nothing but the registration; which package knows which."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    "triton",
    "numpy",
    "transformers",
    "datasets",
    "hydra",
    "omegaconf",
    "wandb",
    "rich",
    "matplotlib",
    "safetensors",
    "pytest",
)


def run_python(source: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_torch_is_all_it_needs() -> None:
    """Every operator works on a CPU where nothing else can be imported, fusedops.testing too."""
    run_python(f"""
        import sys
        sys.modules |= dict.fromkeys({OPTIONAL!r})  # None: as if it were not installed
        import torch, fusedops
        from fusedops import registry, testing

        x = torch.randn(5, 7, requires_grad=True)
        fusedops.silu(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(torch.nn.functional.silu(x).sum(), x)[0])
        for operator in registry.OPERATORS.values():
            testing.check_operator(operator, checks=["values", "gradients"])
    """)


def test_import_does_nothing_else() -> None:
    """It imports no kernel and no compiler, touches no GPU, changes no default and nothing in the environment.

    (torch.utils.flop_counter, which formulas are registered with, imports Triton where it finds it.)
    """
    run_python("""
        import os, sys, warnings
        import torch

        def state():
            backends = torch.backends
            return (
                dict(os.environ),
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
                backends.cudnn.benchmark,
                torch.get_num_threads(),
                torch.get_rng_state().tolist(),
                torch.nn.functional.silu,
                torch.nn.functional.scaled_dot_product_attention,
                list(warnings.filters),
            )

        before = state()
        import fusedops
        from fusedops import registry, slots
        assert state() == before
        assert not torch.cuda.is_initialized()
        assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
        assert not [name for name in sys.modules if name.startswith("fusedops.kernels.")]
    """)


def test_launching_without_triton_says_what_is_missing() -> None:
    """A kernel is loaded at its first launch, and the error then is Python's own about the module."""
    run_python("""
        import sys
        sys.modules["triton"] = None
        from fusedops import registry

        try:
            registry.operator("silu").kernel.load()
        except ImportError as error:
            assert "triton" in str(error), error
        else:
            raise SystemExit("loaded")
    """)


def imported(package: str) -> set[str]:
    """The top-level names of all imports in a package, at module level or inside functions."""
    names: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.level == 0, f"{path}: a relative import"
                names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("package", "unknown"),
    [
        ("fusedops", {"engine", "models", "train", "infer", "benchmarks", "hydra", "omegaconf", "wandb"}),
        ("engine", {"models", "train", "infer"}),
        ("models", {"train", "infer", "hydra", "omegaconf", "wandb"}),
    ],
)
def test_arrows_point_one_way(package: str, unknown: set[str]) -> None:
    """train.py -> engine, models -> fusedops; Hydra and W&B stay out of the library and of the models."""
    assert not imported(package) & unknown


def test_kernels_know_no_registration() -> None:
    """A kernel file is Triton code and its launcher on plain tensors."""
    for path in (ROOT / "fusedops" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                assert node.module not in ("fusedops.registry", "fusedops.slots"), path
                assert node.module != "fusedops.registration" or names == {"INTERPRETING"}, path
