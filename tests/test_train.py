"""train.py as a user meets it: its errors, its runs, its files."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import train
from engine import report, timing
from engine.arms import operator_set
from engine.comparison import Comparison
from engine.config import TrainConfig
from engine.loop import matmul_precision
from engine.signals import StopSignal
from engine.tracking import NullTracker
from models.transformer import ModelConfig, StdlibConfig, Task

ROOT = Path(train.__file__).parent
SMALL = [
    "train.device=cpu",
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=12",
    "model.d_ff=20",
    "model.context=16",
    "data.validation_fraction=0.0005",
    "train.steps=5",
    "train.warmup_steps=2",
    "train.batch_size=3",
    "train.sample_tokens=0",
]
FILES = {"config.yaml", "metrics.jsonl", "summary.json", "comparison.md", "loss.png", "throughput.png"}


def run_main(monkeypatch, *overrides: str) -> int:
    """train.py in this process, its timing pass cut short."""
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    return train.main()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["ops.atention=native"], ["ops.atention=native", "did you mean attention?", "mlp"]),
        (["ops.attention=flesh"], ["ops.attention=flesh", "native, fused, unfused"]),
        (["ops.laplacian=fused"], ["ops.laplacian=fused", "attention, mlp"]),
        (["ops.laplacien=fused"], ["ops.laplacien=fused", "did you mean laplacian?", "attention, mlp, activation"]),
        (["ops.activation=native"], ["ops.activation=native", "attention, mlp"]),
        (["ops.mlp=native", "model.preset=tiny_swiglu"], ["ops.mlp=native", "attention, activation"]),
        (["train.steps=abc"], ["train.steps=abc", "expected int"]),
        (["train.learning_rate=fast"], ["train.learning_rate=fast", "expected float"]),
        (["train.steps=null"], ["train.steps=null", "expected int"]),
        (["model=transformr"], ["model=transformr", "did you mean transformer?"]),
        (["modle=transformer"], ["modle=transformer", "did you mean model?"]),
        (["data=clicks"], ["data=clicks", "stdlib"]),
        (["data.name=clicks"], ["data=clicks", "model=transformer", "stdlib"]),
        (["model.preset=tinny"], ["model.preset=tinny", "did you mean tiny?", "gpt_d512"]),
        (["model.mlp=relu"], ["model.mlp=relu", "gelu", "swiglu"]),
        (["model.n_layer=two"], ["model.n_layer=two", "expected int or null"]),
        (["model.d_model=97"], ["model.d_model=97", "multiple of n_head=4"]),
        (["ops=fuzed"], ["ops=fuzed", "did you mean fused?", "native"]),
        (["experiment=transformer_d51"], ["experiment=transformer_d51", "transformer_d512", "transformer_d768"]),
        (["train.stepps=3"], ["train.stepps=3", "did you mean steps?"]),
        (["+train.stepps=3"], ["train.stepps=3", "did you mean steps?"]),
        (["+flavour=sour"], ["flavour=sour", "model, data, problem, ops, train, compile, tracker, profile, baseline"]),
        (["train.steps=0"], ["train.steps=0", "at least 1"]),
        (["train.min_lr_ratio=1.5"], ["train.min_lr_ratio=1.5", "at least 0 and at most 1"]),
        (["train.learning_rate=nan"], ["train.learning_rate=nan", "at least 0"]),
        (["train.precision=fp8"], ["train.precision=fp8", "fp32, bf16, fp16"]),
        (["train.timing_rounds=3"], ["train.timing_rounds=3", "at least 9"]),
        (["train.early_stop=3"], ["train.early_stop=3", "train.eval_every"]),
        (["train.accumulation=0"], ["train.accumulation=0", "at least 1"]),
        (["baseline=nativ"], ["baseline=nativ", "did you mean native?", "none"]),
        (["tracker=wand"], ["tracker=wand", "did you mean wandb?", "none"]),
        (["tracker.mode=onlin"], ["tracker.mode=onlin", "offline, online"]),
        (["train.steps"], ["train.steps", "key=value"]),
        (["train.steps=[1"], ["train.steps=[1", "key=value"]),
        (["train.steps=1,2"], ["train.steps=1,2", "--multirun"]),
        (["train.steps=6", "train.steps=abc"], ["train.steps=abc", "expected int"]),
        (["train.steps=abc", "train.steps=6"], ["train.steps=abc", "expected int"]),
        (["train.learning_rate=inf"], ["train.learning_rate=inf", "finite"]),
        (["model.init_std=nan"], ["model.init_std=nan", "above 0"]),
        (["model.init_std=inf"], ["model.init_std=inf", "finite"]),
        (["model=null"], ["model=null", "transformer"]),
        (["ops=null"], ["ops=null", "fused, native"]),
        (["data=3"], ["data=3", "stdlib"]),
        (["~model"], ["model", "a run needs one"]),
        (["~data"], ["data", "model=transformer needs one", "stdlib"]),
        (["compile=fast"], ["compile=fast", "default, max_autotune, none, reduce_overhead"]),
        (["compile.mode=fast"], ["compile.mode=fast", "none, default, max_autotune, reduce_overhead"]),
        (["compile.arms=eager"], ["compile.arms=eager", "compiled, both"]),
        (["compile.backend=cudagraphs"], ["compile.backend=cudagraphs", "inductor, aot_eager"]),
        (["profile=perhaps"], ["profile=perhaps", "expected bool"]),
        (["train.steps=${foo}"], ["foo", "train.steps"]),
        (["=3"], ["=3", "key=value"]),
        ([f"train.batch_size={10**26}"], ["train.batch_size=1000", "at least 1 and at most 2147483647"]),
        ([f"model.d_model={10**15}"], ["model.d_model=1000", "at least 1 and at most 16777216"]),
        (["resume={a: b"], ["resume={a: b", "key=value"]),
        (["data.validation_fraction=1e-9"], ["data.validation_fraction=1e-09", "no validation text"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_a_configuration_error_names_what_exists(monkeypatch, capfd, tmp_path, overrides, named):
    assert run_main(monkeypatch, *overrides, f"hydra.run.dir={tmp_path}") == 2
    error = capfd.readouterr().err
    assert all(text in error for text in named), error
    assert len(error.splitlines()) <= 15 and "Traceback" not in error
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused(monkeypatch, capfd, tmp_path):
    assert run_main(monkeypatch, "train.device=cuda", f"hydra.run.dir={tmp_path}") == 2
    assert "train.device=cuda" in capfd.readouterr().err


def test_the_exit_code_reaches_the_shell():
    command = [sys.executable, "train.py", "ops.atention=native"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and len(result.stderr.splitlines()) <= 15
    assert "ops.atention=native" in result.stderr and "attention" in result.stderr


def test_a_run_directory_that_cannot_be_made_is_named(monkeypatch, capfd, tmp_path):
    (tmp_path / "file").touch()
    assert run_main(monkeypatch, "tracker=none", f"hydra.run.dir={tmp_path}/file/run") == 1
    error = capfd.readouterr().err
    assert f"{tmp_path}/file/run" in error and len(error.splitlines()) == 1


def test_a_full_disk_ends_the_run_with_a_line(monkeypatch, capfd, tmp_path):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "summary.json")

    monkeypatch.setattr(report, "write_config", full)
    assert run_main(monkeypatch, *SMALL, "tracker=none", f"hydra.run.dir={tmp_path}") == 1
    error = capfd.readouterr().err.splitlines()
    assert error[-1].startswith("the run stopped: ") and "No space left" in error[-1] and len(error) <= 2


def test_what_needs_too_much_memory_ends_with_a_line(monkeypatch, capfd, tmp_path):
    """More than an address space holds, which is refused at once however much memory a system promises."""
    overrides = [f"model.vocab_size={2**24}", f"model.d_model={2**24}"]
    assert run_main(monkeypatch, *SMALL, *overrides, "ops=native", "tracker=none", f"hydra.run.dir={tmp_path}") == 1
    error = capfd.readouterr().err.splitlines()
    assert "the run stopped: out of memory: " in error[-1] and len(error) <= 2


def test_an_error_that_is_none_of_memory_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(train, "make_task", broken)
    with pytest.raises(RuntimeError, match="planted"):
        run_main(monkeypatch, *SMALL, "tracker=none", f"hydra.run.dir={tmp_path}")


def test_ctrl_c_before_the_first_step_leaves_no_traceback(monkeypatch, capfd, tmp_path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_task", interrupted)
    assert run_main(monkeypatch, *SMALL, "tracker=none", f"hydra.run.dir={tmp_path}") == 128 + signal.SIGINT
    assert capfd.readouterr().err == "the run was stopped by SIGINT\n"


def test_a_run_directory_used_again_has_nothing_of_the_run_before(monkeypatch, tmp_path):
    for name in report.RESULTS:
        (tmp_path / name).write_text("old")
    settings = ["train.learning_rate=1e30", "train.grad_clip=0", "train.steps=30", "ops=native", "tracker=none"]
    assert run_main(monkeypatch, *SMALL, *settings, f"hydra.run.dir={tmp_path}") == 1
    left = {name for name in report.RESULTS if (tmp_path / name).exists()}
    assert left <= {"metrics.jsonl"}  # of this run, which ended before the rest
    assert not left or "old" not in (tmp_path / "metrics.jsonl").read_text()


def implementations(summary, arm):
    return {row["slot"]: (row["implementation"], row["path"]) for row in summary["arms"][arm]["operators"]}


@pytest.mark.parametrize(
    ("overrides", "arms"),
    [
        (["ops=native"], {"native": {"attention": ("native", "stock"), "mlp": ("native", "stock")}}),
        (
            ["ops=fused"],
            {
                "native": {"attention": ("native", "stock"), "mlp": ("native", "stock")},
                "fused": {"attention": ("fused", "cpu"), "mlp": ("fused", "cpu")},
            },
        ),
        (
            ["ops=fused", "ops.attention=native", "baseline=none", "model.dropout=0.1"],
            {"fused,attention=native": {"attention": ("native", "stock"), "mlp": ("fused", "cpu")}},
        ),
        (
            ["ops=fused", "ops.mlp=native", "ops.attention=unfused", "baseline=none", "train.precision=bf16"],
            {"fused,attention=unfused,mlp=native": {"attention": ("unfused", "stock"), "mlp": ("native", "stock")}},
        ),
        (
            ["ops=fused", "ops.activation=native", "model.preset=tiny_swiglu", "model.n_kv_head=1", "baseline=none"],
            {"fused,activation=native": {"attention": ("fused", "cpu"), "activation": ("native", "stock")}},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_was_asked_for_runs_and_the_operator_table_shows_it(monkeypatch, capfd, tmp_path, overrides, arms):
    monkeypatch.setattr(Task, "references", lambda self: {})
    assert run_main(monkeypatch, *SMALL, *overrides, "tracker=none", f"hydra.run.dir={tmp_path}") == 0
    assert {path.name for path in tmp_path.iterdir()} >= FILES
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {arm: implementations(summary, arm) for arm in summary["arms"]} == arms
    assert summary["baseline"] == (None if "baseline=none" in overrides else "native")
    shown = capfd.readouterr()
    assert shown.err == "" and "fused means the CPU implementations" in shown.out.replace("\n", " ")


def test_a_loss_that_is_not_finite_ends_the_run_naming_the_step(monkeypatch, capfd, tmp_path):
    settings = ["train.learning_rate=1e30", "train.grad_clip=0", "train.steps=30", "ops=native", "tracker=none"]
    assert run_main(monkeypatch, *SMALL, *settings, f"hydra.run.dir={tmp_path}") == 1
    error = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"the run stopped: step \d+: the (training loss|norm of the gradient) is (nan|inf)", error[-1])
    assert len(error) <= 15
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("preset", ["tiny", "tiny_swiglu"])
def test_on_a_gpu_our_kernels_run_and_memory_is_measured(monkeypatch, tmp_path, preset, precision):
    monkeypatch.setattr(Task, "references", lambda self: {})
    settings = [f"model.preset={preset}", f"train.precision={precision}", "train.steps=8", "train.warmup_steps=2"]
    overrides = [*settings, "data.validation_fraction=0.0005", "tracker=none", f"hydra.run.dir={tmp_path}"]
    assert run_main(monkeypatch, *overrides) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for row in summary["arms"]["fused"]["operators"]:
        assert row["path"] in ("triton", "gluon", "cublas", "cublas+triton"), row
    assert {row["path"] for row in summary["arms"]["native"]["operators"]} == {"stock"}
    assert all(arm["peak_memory_bytes"] > 2**20 for arm in summary["arms"].values())
    assert 0.2 < summary["ratios"]["fused"]["peak_memory"] < 2
    assert abs(summary["ratios"]["fused"]["loss_difference"]) < 0.1


def test_several_jobs_of_one_command_get_a_directory_each(monkeypatch, tmp_path):
    monkeypatch.setattr(Task, "references", lambda self: {})
    arguments = ["ops=native,fused", "baseline=none", "tracker=none", f"hydra.sweep.dir={tmp_path}"]
    assert run_main(monkeypatch, "-m", *SMALL, *arguments) == 0
    summaries = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/summary.json"))]
    assert [list(summary["arms"]) for summary in summaries] == [["native"], ["fused"]]


def command_without_network() -> list[str]:
    """A command prefix that takes the network away, where the system allows it."""
    for prefix in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return []


def bare_environment(tmp_path: Path) -> dict[str, str]:
    """No account, an empty home, and proxies that lead nowhere."""
    kept = {
        k: v for k, v in os.environ.items() if k.startswith(("PATH", "PYTHONPATH", "LD_", "TORCH", "TRITON", "OMP"))
    }
    dead = "http://127.0.0.1:9"
    home = tmp_path / "home"
    home.mkdir()
    return kept | {"HOME": str(home), "http_proxy": dead, "https_proxy": dead, "HTTPS_PROXY": dead, "HTTP_PROXY": dead}


def test_without_network_terminal_home_or_account_nothing_hangs_or_prompts(tmp_path):
    command = [*command_without_network(), sys.executable, "train.py", *SMALL, f"hydra.run.dir={tmp_path}/run"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=bare_environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        start_new_session=True,  # no controlling terminal to prompt on
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} >= FILES
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["references"] and summary["ratios"]["fused"]["loss_difference"] == pytest.approx(0, abs=1e-3)
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))) == 2
    assert "tracking ends" not in result.stdout


def test_sigterm_ends_the_step_keeps_the_files_and_closes_the_tracker(tmp_path):
    run = tmp_path / "run"
    settings = ["train.steps=100000", "train.log_every=5", "ops=native", f"hydra.run.dir={run}"]
    command = [sys.executable, "train.py", *SMALL, *settings]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert error.splitlines()[-1] == "the run was stopped by SIGTERM"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and (run / "config.yaml").exists() and not (run / "summary.json").exists()
    assert len(list(run.glob("wandb/offline-run-*/run-*.wandb"))) == 1


# ---------------------------------------------------------------------------------------------------------------------
# The arms compute the same


def losses_of_arms(
    tmp_path: Path,
    model: ModelConfig,
    steps: int,
    batch_size: int,
    device: str,
    learning_rate: float = 1e-3,
    warmup_steps: int = 1,
) -> dict[str, torch.Tensor]:
    """The training losses of a stock and a fused arm, step for step."""
    settings = TrainConfig(steps=steps, batch_size=batch_size, device=device, learning_rate=learning_rate)
    task = Task(
        model,
        StdlibConfig(validation_fraction=0.0001),
        steps=steps,
        batch_size=batch_size,
        eval_batch_size=64,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=warmup_steps,
        min_lr_ratio=settings.min_lr_ratio,
        seed=settings.seed,
    )
    arms = [operator_set(name, task.slots) for name in ("native", "fused")]
    console, stop = Console(quiet=True), StopSignal()
    comparison = Comparison(task, arms, settings, torch.device(device), tmp_path, NullTracker(), console, stop)
    with matmul_precision(tf32=False):
        for arm in arms:
            comparison.train_arm(arm)
    return {arm: torch.tensor(training.losses, dtype=torch.float64) for arm, training in comparison.trainings.items()}


@pytest.mark.parametrize("preset", ["tiny", "tiny_swiglu"])
def test_the_arms_losses_agree_at_every_step(tmp_path, preset):
    model = ModelConfig(preset=preset, n_layer=2, context=48, dropout=0.0)
    losses = losses_of_arms(tmp_path, model, steps=12, batch_size=3, device="cpu")
    torch.testing.assert_close(losses["fused"], losses["native"], rtol=1e-5, atol=0)


@pytest.mark.interpreter
@pytest.mark.parametrize("preset", ["tiny", "tiny_swiglu"])
def test_the_arms_losses_agree_with_the_kernels_themselves(tmp_path, preset):
    model = ModelConfig(preset=preset, n_layer=1, n_head=2, n_kv_head=1, d_model=20, d_ff=36, context=17, dropout=0.0)
    losses = losses_of_arms(tmp_path, model, steps=3, batch_size=2, device="cpu")
    torch.testing.assert_close(losses["fused"], losses["native"], rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "learning_rate", "warmup_steps"),
    [
        ("tiny", 1e-3, 1),
        ("tiny_swiglu", 1e-3, 1),
        (
            "small",
            6e-4,
            100,
        ),  # as the experiments train such models: at once at 1e-3 they are chaotic, and so are losses
    ],
)
def test_the_arms_losses_agree_on_a_gpu_in_fp32(tmp_path, preset, learning_rate, warmup_steps):
    model = ModelConfig(preset=preset, dropout=0.0)
    losses = losses_of_arms(tmp_path, model, 50, 8, "cuda", learning_rate=learning_rate, warmup_steps=warmup_steps)
    torch.testing.assert_close(losses["fused"], losses["native"], rtol=1e-4, atol=0)
