"""A run that was stopped and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import io
import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_model
from torch import nn

from engine import report, resume, timing
from engine.arms import operator_set
from engine.checkpoint import load_weights, read
from engine.comparison import Comparison
from engine.config import TrainConfig
from engine.errors import ConfigError, Interrupted, RunError
from engine.signals import StopSignal
from engine.task import Phase
from engine.tracking import NullTracker
from tests.engine.conftest import ToyTask

STEPS = 11
TRAIN = {"steps": STEPS, "log_every": 4, "eval_every": 3, "device": "cpu", "seed": 5}


class Killed(BaseException):
    """The process is gone: nothing is written any more."""


class UnevenTask(ToyTask):
    """Batches of unequal size, dropout, and two phases: Adam for 7 steps, then SGD with momentum for 4."""

    def __init__(self) -> None:
        super().__init__(STEPS, dropout=0.3)

    def batch(self, step: int, rank: int = 0) -> dict[str, torch.Tensor]:
        return self._samples(step, 3 + step * 7 % 5)

    def phases(self) -> list[Phase]:
        def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
            return [torch.optim.AdamW(model.parameters(), lr=0.05)]

        def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
            return [
                torch.optim.SGD(model.inner.parameters(), lr=0.02, momentum=0.9),
                torch.optim.SGD(model.outer.parameters(), lr=0.01, momentum=0.5),
            ]

        return [Phase("adam", 7, adam, lambda step: 0.9**step), Phase("sgd", 4, sgd, lambda step: 1 / (1 + step))]


class StreamedTask(UnevenTask):
    """The same from a stream that is read once, shuffled in a buffer; its state is all that tells where it stands."""

    def batches(self, start: int, state: dict | None = None) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
        assert (state is None) == (start == 0)
        generator = torch.Generator().manual_seed(99)
        buffer, read_so_far = [self._samples(index, 1) for index in range(8)], 8
        if state is not None:
            generator.set_state(state["generator"])
            buffer, read_so_far = [dict(sample) for sample in state["buffer"]], state["read"]
        while True:
            batch = []
            for _ in range(2 + read_so_far % 3):
                place = int(torch.randint(len(buffer), (), generator=generator))
                batch.append(buffer[place])
                buffer[place] = self._samples(read_so_far, 1)
                read_so_far += 1
            kept = {"generator": generator.get_state(), "buffer": list(buffer), "read": read_so_far}
            yield {key: torch.cat([sample[key] for sample in batch]) for key in ("x", "y")}, kept


TASKS = {"map-style": UnevenTask, "streamed": StreamedTask}


class Run:
    """Runs of one configuration in one directory, one after the other as separate processes would."""

    def __init__(
        self, directory: Path, task: type[ToyTask] = UnevenTask, compile_mode: str = "none", **train: object
    ) -> None:
        self.directory, self.task, self._train = directory, task, TrainConfig(**TRAIN | train)
        self._device = torch.device(self._train.device)
        self._compile = {"compile_mode": compile_mode, "backend": "aot_eager"}
        directory.mkdir()

    def start(self, resumed: bool = False, kill: bool = False, **at: int) -> Comparison:
        """Run; in an arm of `at`, a signal comes, or the process dies, during the step of that number."""
        task, stop = self.task(), StopSignal()
        task.stop = stop
        comparison = Comparison(
            task,
            [replace(operator_set(name, task.slots), **self._compile) for name in ("native", "fused")],
            self._train,
            self._device,
            self.directory,
            NullTracker(),
            Console(file=io.StringIO()),
            stop,
            configuration={"train": {"seed": self._train.seed}},
            resume=resumed,
        )
        train_arm, batches = comparison.train_arm, task.batches

        def watched(arm):
            last = at.get(arm.name, -1) * self._train.accumulation - 1

            def watched_batches(start, state=None):
                for index, taken in enumerate(batches(start, state), start):
                    if index == last and kill:
                        raise Killed
                    if index == last:
                        stop.received = signal.SIGTERM
                    yield taken

            task.batches = watched_batches
            train_arm(arm)

        comparison.train_arm = watched
        torch.seed()  # nothing may depend on what the process did before
        comparison.run()
        return comparison

    def stopped(self, resumed: bool = False, kill: bool = False, **at: int) -> None:
        """The same, of a run that ends there."""
        with pytest.raises(Killed if kill else Interrupted):
            self.start(resumed, kill, **at)

    def lines(self) -> list[dict[str, object]]:
        """metrics.jsonl without what depends on time."""
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]

    def results(self) -> dict[str, object]:
        """All that the arms left, as bytes or values: models, optimizers, generators, streams, losses, validation."""
        left = {}
        for arm in ("native", "fused"):
            left[f"{arm} model"] = (self.directory / arm / "model/model.safetensors").read_bytes()
            (path,) = (self.directory / arm).glob("checkpoint-*.safetensors")
            state = read(path)["state"]
            for name in ("seconds", "units", "elapsed"):
                state["training"].pop(name)
            state.pop("elapsed")
            left[f"{arm} state"] = flat(state)
        return left


def flat(value: object) -> object:
    """With lists of numbers for tensors."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *value.shape, value.flatten().tolist()]
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True)
def training_alone(monkeypatch):
    """Without what comes before and after it, which has tests of its own."""
    monkeypatch.setattr(Comparison, "operators_of", lambda self, arm: [])
    monkeypatch.setattr(Comparison, "release", lambda self: None)
    monkeypatch.setattr(timing, "time_steps", lambda *_: {})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("task", TASKS)
def test_a_run_stopped_at_any_step_and_resumed_is_the_uninterrupted_one(tmp_path, task, accumulation, precision):
    settings = {"task": TASKS[task], "accumulation": accumulation, "precision": precision}
    whole = Run(tmp_path / "whole", **settings)
    expected = whole.start()
    assert len({line["step"] for line in whole.lines()}) == 6  # 3, 4, 6, 8, 9, 11
    for step in (1, 2, 3, 4, 6, 7, 8, 10, 11):  # 3 and 6 are evaluated after, 7 ends the first phase, 11 is the last
        run = Run(tmp_path / str(step), **settings)
        run.stopped(**{"native" if step % 2 else "fused": step})
        found = run.start(resumed=True)
        assert run.lines() == whole.lines()
        assert run.results() == whole.results()
        for arm, training in expected.trainings.items():
            assert found.trainings[arm].losses == training.losses
            assert found.trainings[arm].validation == training.validation


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("task", TASKS)
def test_on_a_gpu_batches_prepared_ahead_and_its_generator_go_on_too(tmp_path, task, precision):
    settings = {"task": TASKS[task], "accumulation": 2, "precision": precision, "device": "cuda"}
    whole, run = (Run(tmp_path / name, **settings) for name in ("whole", "run"))
    expected = whole.start()
    run.stopped(native=5)  # the signal comes while the fifth step's batches are prepared, a step ahead
    run.stopped(resumed=True, fused=9)
    found = run.start(resumed=True)
    assert run.lines() == whole.lines()
    for arm, training in expected.trainings.items():
        assert found.trainings[arm].losses == training.losses


def test_a_compiled_arm_goes_on_as_it_would_have_and_its_checkpoint_is_a_plain_ones(tmp_path):
    whole, run = (Run(tmp_path / name, compile_mode="default") for name in ("whole", "run"))
    compiled = whole.start()
    run.stopped(native=4)
    run.stopped(resumed=True, fused=8)
    run.start(resumed=True)
    assert run.lines() == whole.lines() and run.results() == whole.results()

    plain = Run(tmp_path / "plain").start()
    for arm in plain.arms:
        names = read(tmp_path / "plain" / arm.name / f"checkpoint-{STEPS}.safetensors")["state"]["model"].keys()
        state = read(tmp_path / "whole" / arm.name / f"checkpoint-{STEPS}.safetensors")["state"]
        assert state["model"].keys() == names == plain.build(arm).state_dict().keys()
        for comparison in (plain, compiled):
            model = comparison.build(comparison.arms[0])
            load_weights(model, state["model"], "the compiled arm's checkpoint")
            assert all(torch.equal(tensor, state["model"][name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("task", TASKS)
def test_several_stops_and_a_kill_in_either_arm(tmp_path, task):
    whole, run = (Run(tmp_path / name, TASKS[task], accumulation=2, checkpoint_every=2) for name in ("whole", "run"))
    whole.start()
    run.stopped(native=1)
    run.stopped(resumed=True, native=2)
    run.stopped(resumed=True, native=5, kill=True)
    assert [path.name for path in (run.directory / "native").iterdir()] == ["checkpoint-4.safetensors"]
    run.stopped(resumed=True, fused=1, kill=True)  # before any checkpoint of it
    run.stopped(resumed=True, fused=9, kill=True)
    with open(run.directory / "metrics.jsonl", "a") as file:
        file.write('{"arm": "fused", "st')  # what a killed process had begun to write
    run.start(resumed=True)
    assert run.lines() == whole.lines() and run.results() == whole.results()


def test_an_arm_that_had_finished_is_not_trained_again(tmp_path):
    run = Run(tmp_path / "run", ToyTask)
    run.stopped(fused=2)
    before = (run.directory / "native/model/model.safetensors").stat().st_mtime_ns
    trained = []

    class Watched(ToyTask):
        def loss(self, model, batch):
            if model.training:
                trained.append(model.ops["activation"])
            return super().loss(model, batch)

    run.task = Watched
    comparison = run.start(resumed=True)
    native, fused = (trained.count(arm.functions["activation"]) for arm in comparison.arms)
    assert (native, fused) == (0, 3)  # the steps that were left
    assert (run.directory / "native/model/model.safetensors").stat().st_mtime_ns == before
    assert len(comparison.trainings["native"].losses) == 5


def test_a_finished_run_resumed_is_only_timed_again(tmp_path):
    run = Run(tmp_path / "run")
    first = run.start()
    lines, results = run.lines(), run.results()
    again = run.start(resumed=True)
    assert run.lines() == lines and run.results() == results
    assert again.trainings == first.trainings


def test_a_model_that_was_not_yet_saved_is(tmp_path):
    run = Run(tmp_path / "run")
    run.start()
    results, model = run.results(), run.directory / "fused/model/model.safetensors"
    model.unlink()
    model.parent.rmdir()
    run.start(resumed=True)
    assert run.results() == results


@pytest.mark.parametrize("evaluation", [1, 3, 4])
def test_a_signal_during_an_evaluation_keeps_the_step_before_it(tmp_path, evaluation):
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    whole.start()

    class Interrupting(UnevenTask):
        evaluations = 0

        def validation(self):
            self.evaluations += 1
            for batch in super().validation():
                yield batch
                if self.evaluations == evaluation:
                    self.stop.received = signal.SIGINT

    run.task = Interrupting
    run.stopped()
    (kept,) = (run.directory / "native").iterdir()
    assert kept.name == f"checkpoint-{[3, 6, 9, STEPS][evaluation - 1]}.safetensors"
    run.task = UnevenTask
    run.start(resumed=True)
    assert run.lines() == whole.lines() and run.results() == whole.results()


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path):
    class Poisoned(ToyTask):
        def __init__(self) -> None:
            super().__init__(9, poisoned=6)

    run = Run(tmp_path / "run", Poisoned, checkpoint_every=2, log_every=100)
    with pytest.raises(RunError, match=r"(?s)step 7: the training loss is nan.*checkpoint-6\.safetensors"):
        run.start()
    (kept,) = (run.directory / "native").iterdir()
    state = read(kept)["state"]
    assert len(state["training"]["losses"]) == 6 and all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.parametrize("arm", ["native", "fused"])
def test_a_damaged_checkpoint_of_any_arm_ends_the_run_before_anything_is_trained(tmp_path, arm):
    run = Run(tmp_path / "run")
    run.start()
    path, before = run.directory / arm / f"checkpoint-{STEPS}.safetensors", run.lines()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"{arm}/checkpoint-{STEPS}.safetensors"):
        run.start(resumed=True)
    assert run.lines() == before


def test_lines_that_are_missing_are_said(tmp_path):
    run = Run(tmp_path / "run")
    run.stopped(native=8)
    path = run.directory / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match=r"metrics.jsonl: has 2 lines of native, of 4 written before its checkpoint"):
        run.start(resumed=True)


def test_a_stream_that_ends_names_the_step(tmp_path):
    class Short(StreamedTask):
        def batches(self, start, state=None):
            return itertools.islice(super().batches(start, state), 7 - start)

    with pytest.raises(RunError, match="step 4: the training data ended"):
        Run(tmp_path / "run", Short, accumulation=2).start()


# ---------------------------------------------------------------------------------------------------------------------
# Early stop


class Restless(UnevenTask):
    """Steps so large that the validation loss is soon higher than it was, and grow."""

    def phases(self) -> list[Phase]:
        return [
            Phase("sgd", STEPS, lambda model: [torch.optim.SGD(model.parameters(), lr=0.05)], lambda step: 1.5**step)
        ]


def test_an_early_stop_is_the_same_after_a_resumption(tmp_path):
    settings = {"task": Restless, "eval_every": 1, "early_stop": 3}
    whole = Run(tmp_path / "whole", **settings)
    training = whole.start().trainings["native"]
    stopped, best = len(training.losses), training.reported[0]
    assert training.stopped_early is not None and best == stopped - 3 < STEPS - 3
    for step in (best, best + 1, stopped - 1):
        run = Run(tmp_path / str(step), **settings)
        run.stopped(native=step)
        assert run.start(resumed=True).trainings["native"].stopped_early == training.stopped_early
        assert run.lines() == whole.lines() and run.results() == whole.results()


def test_the_model_of_an_early_stop_is_that_of_the_best_evaluation(tmp_path):
    run = Run(tmp_path / "run", Restless, eval_every=1, early_stop=3)
    comparison = run.start()
    for arm in comparison.arms:
        model, training = comparison.build(arm), comparison.trainings[arm.name]
        load_model(model, str(run.directory / arm.name / "model/model.safetensors"))
        model.eval()
        with torch.no_grad():
            metrics = comparison.task.evaluate(model, comparison.task.validation())
        assert metrics == training.reported[1] == min((m for _, m in training.validation), key=lambda m: m["loss"])
        last = read(run.directory / arm.name / f"checkpoint-{len(training.losses)}.safetensors")["state"]["model"]
        assert not torch.equal(last["inner.weight"], model.inner.weight)


class Closing(ToyTask):
    """AdamW in float32, then L-BFGS in float64 until it gets no further, on one batch."""

    def __init__(self) -> None:
        super().__init__(40)

    def batch(self, step, rank=0):
        batch = self._samples(0, 6)
        return {**batch, "y": batch["y"] * 1e-3}

    def loss(self, model, batch):
        dtype = model.inner.weight.dtype
        return super().loss(model, {name: value.to(dtype) for name, value in batch.items()})

    def phases(self):
        def adam(model):
            return [torch.optim.AdamW(model.parameters(), lr=0.05)]

        def lbfgs(model):
            return [torch.optim.LBFGS(model.parameters(), 1, 1, 20, line_search_fn="strong_wolfe", history_size=3)]

        return [
            Phase("adam", 3, adam, lambda step: 1.0),
            Phase("lbfgs", 37, lbfgs, lambda step: 1.0, closure=True, dtype=torch.float64),
        ]


def test_a_phase_of_lbfgs_goes_on_as_it_would_have(tmp_path):
    settings = {"task": Closing, "log_every": 1, "eval_every": 0}
    whole = Run(tmp_path / "whole", **settings)
    training = whole.start().trainings["native"]
    assert training.stopped_early is not None and 8 < len(training.losses) < 40
    for step in (2, 3, 4, 7, len(training.losses)):
        run = Run(tmp_path / str(step), **settings)
        run.stopped(native=step)
        run.start(resumed=True)
        assert run.lines() == whole.lines() and run.results() == whole.results()


# ---------------------------------------------------------------------------------------------------------------------
# What a resumed run may change


def test_what_may_change_is_no_part_of_what_a_checkpoint_depends_on():
    resolved = {"train": {"steps": 3, "checkpoint_every": 0, "timing_rounds": 9}, "tracker": {"mode": "offline"}}
    assert resume.settled({**resolved, "resume": "there", "profile": False}) == {"train": {"steps": 3}}


def test_of_a_study_the_pairs_and_the_margin_may_change_and_a_plain_run_becomes_none(tmp_path):
    study = {"train": {"steps": 3}, "equivalence": 2, "equivalence_margin": 0.01}
    report.write_config(tmp_path, study)
    resume.check(tmp_path, study | {"equivalence": 5, "equivalence_margin": 0.1})
    with pytest.raises(ConfigError, match=r"may be changed: .*equivalence_margin\ntrain.steps: 3 in the run, 4 now"):
        resume.check(tmp_path, study | {"equivalence": 5, "train": {"steps": 4}})
    with pytest.raises(ConfigError, match="equivalence: 2 in the run, 0 now"):
        resume.check(tmp_path, study | {"equivalence": 0})
    report.write_config(tmp_path, study | {"equivalence": 0})
    with pytest.raises(ConfigError, match="equivalence: 0 in the run, 2 now"):
        resume.check(tmp_path, study)
