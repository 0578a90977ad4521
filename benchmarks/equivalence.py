"""Measure equivalence on all GPUs at once: python benchmarks/equivalence.py [EXPERIMENT ...] [--pairs N] [-- OVERRIDE]

Trains the pairs that `python train.py experiment=EXPERIMENT equivalence=N OVERRIDE ...` trains, in the same way, but
each training is a job of its own: one queue over all experiments, longest jobs first, for --jobs-per-gpu processes on
each GPU. The result, benchmarks/results/<gpu>/equivalence_EXPERIMENT.json, is written after every training, and a call
with the same --out goes on with those that are missing. Processes that share a GPU slow each other down: no time here
says anything about the operators.

    --budget-seconds S   start no training that would not end in time, as judged by those that have ended, and stop
                         what is still running after S seconds
    --faults             train the planted faults of benchmarks/faults.py instead of the fused operators, and keep the
                         result as faults_EXPERIMENT.json; stock trainings there are not repeated
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from rich.console import Console  # noqa: E402

import train  # noqa: E402
from benchmarks.faults import faulty_arms  # noqa: E402
from benchmarks.training import EXPERIMENTS, RESULTS, folder_of, split_overrides  # noqa: E402
from engine import config, equivalence  # noqa: E402
from engine.arms import Arm, arms_of  # noqa: E402
from engine.comparison import choose_device, device_name  # noqa: E402
from engine.errors import ConfigError, explain  # noqa: E402
from engine.report import write_atomically  # noqa: E402
from engine.signals import StopSignal  # noqa: E402
from engine.task import Task  # noqa: E402

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Request:
    """An experiment to study, as a worker is told of it."""

    experiment: str
    overrides: tuple[str, ...]
    faults: bool

    @property
    def name(self) -> str:
        """The name of its result, without the extension."""
        return f"{'faults' if self.faults else 'equivalence'}_{self.experiment}"

    def prepare(self) -> tuple[config.Settings, Task, list[Arm]]:
        """Its configuration, its task and its arms, the stock one first. Raises ConfigError as train.py does."""
        overrides = [f"experiment={self.experiment}", "tracker=none", *self.overrides]
        with initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
            settings = config.resolve(compose("config", overrides), train.MODELS)
        task = train.make_task(settings)
        for group, decided in task.chosen.items():
            settings.resolved[group] |= decided
        arms, _ = arms_of(settings.values.ops, "native", task.slots, settings.values.compile)
        if self.faults:
            return settings, task, [arms[0], *faulty_arms(arms[0], task.slots)]
        if len(arms) == 1:
            raise ConfigError(f"ops={settings.values.ops.set}: no slot is swapped; allowed: ops=fused")
        return settings, task, arms

    def study(self, settings: config.Settings, task: Task, arms: list[Arm]) -> equivalence.Study:
        """What trains its pairs."""
        device = choose_device(settings.values.train.device)
        return train.make_study(settings, task, arms, device, ROOT, Console(quiet=True), StopSignal())


@dataclass(frozen=True)
class Job:
    """One training."""

    request: Request
    seed: int
    training: str
    cost: float
    """FLOPs, or steps where these are unknown."""

    def __str__(self) -> str:
        return f"{self.request.experiment}, seed {self.seed}, {self.training}"


@dataclass
class Result:
    """The result file of an experiment and the trainings that it has."""

    request: Request
    path: Path
    study: equivalence.Study
    task: Task
    margin: float
    outcomes: list[equivalence.Outcome]

    def add(self, outcome: equivalence.Outcome) -> None:
        """Keep a training, in the file too."""
        self.outcomes.append(outcome)
        write_atomically(self.path, json.dumps(self.summary(), indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        """The result of what there is."""
        return equivalence.result(self.study, self.task, self.outcomes, self.margin)


@dataclass
class Worker:
    """A process that does one job at a time, on one GPU."""

    gpu: str | None
    process: multiprocessing.process.BaseProcess
    connection: Connection
    job: Job | None = None
    started: float = 0.0
    warm: bool = False
    """Whether it has done a job."""


@dataclass
class Pace:
    """Estimates how long a job takes from those that have ended."""

    ended: list[tuple[Job, float, bool]] = field(default_factory=list)
    """With their seconds, and whether their process had done one before: the first imports and compiles too."""

    def estimate(self, job: Job) -> float:
        """Seconds: the slowest training of its kind, or of its experiment, or of any by its cost; 0 at first."""
        kinds = (
            lambda other, warm: warm and (other.request, other.training) == (job.request, job.training),
            lambda other, warm: warm and other.request == job.request,
            lambda other, warm: other.request == job.request,
            lambda other, warm: True,
        )
        for alike in kinds:
            seconds = [spent / other.cost * job.cost for other, spent, warm in self.ended if alike(other, warm)]
            if seconds:
                return max(seconds)
        return 0.0


def work(connection: Connection, threads: int) -> None:
    """A worker's life: jobs come and outcomes go; the text of an error is the last, as CUDA may be unusable then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    torch.set_num_threads(threads)
    studies: dict[Request, equivalence.Study] = {}
    while True:
        try:
            job = connection.recv()
        except EOFError:  # the parent is gone
            return
        try:
            if job.request not in studies:
                studies[job.request] = job.request.study(*job.request.prepare())
            connection.send(studies[job.request].train(job.seed, job.training))
        except (ConfigError, RuntimeError, OSError) as error:
            connection.send(f"{type(error).__name__}: {error}")
            return


def gpus() -> list[str | None]:
    """The names of the visible GPUs as CUDA_VISIBLE_DEVICES has them; one None where there is none."""
    if not torch.cuda.is_available():
        return [None]
    named = os.environ.get(VISIBLE)
    return list(named.split(",")) if named else [str(i) for i in range(torch.cuda.device_count())]


@contextlib.contextmanager
def visible(gpu: str | None) -> Iterator[None]:
    """Inside, a process that starts sees this GPU alone, whatever it imports before it uses CUDA."""
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(VISIBLE)
        if before is not None:
            os.environ[VISIBLE] = before


def start_worker(gpu: str | None, threads: int) -> Worker:
    """A process that waits for jobs and sees one GPU."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, threads), daemon=True)
    with visible(gpu):
        process.start()
    theirs.close()
    return Worker(gpu, process, ours)


def open_result(request: Request, out: Path) -> Result:
    """The result as it stands in the folder. Raises ConfigError for one that this request cannot continue."""
    settings, task, arms = request.prepare()
    study = request.study(settings, task, arms)
    folder = out / folder_of(device_name(study.device))
    outcomes = list(read(folder / f"{request.name}.json"))
    equivalence.check_conditions(folder / f"{request.name}.json", outcomes, study.conditions)
    if request.faults:
        stocks = {study.stock, equivalence.redrawn(study.stock)}
        known = {(outcome.seed, outcome.training) for outcome in outcomes}
        outcomes += [
            outcome
            for outcome in read(folder / f"equivalence_{request.experiment}.json")
            if outcome.conditions == study.conditions
            and outcome.training in stocks
            and (outcome.seed, outcome.training) not in known
        ]
    folder.mkdir(parents=True, exist_ok=True)
    margin = settings.values.equivalence_margin
    return Result(request, folder / f"{request.name}.json", study, task, margin, outcomes)


def read(path: Path) -> Iterator[equivalence.Outcome]:
    """The trainings of a result file, none where there is no file."""
    if path.exists():
        for training in json.loads(path.read_text(encoding="utf-8"))["trainings"]:
            yield equivalence.Outcome(**training)


def missing(result: Result, pairs: int) -> list[Job]:
    """The trainings that a result lacks for so many pairs."""
    done = {(outcome.seed, outcome.training) for outcome in result.outcomes}
    first = result.study.resolved["train"]["seed"]
    steps = sum(phase.steps for phase in result.task.phases())
    cost = float(steps * (result.task.flops_per_step() or 1))
    return [
        Job(result.request, seed, name, cost)
        for seed in range(first, first + pairs)
        for name in result.study.trainings
        if (seed, name) not in done
    ]


def do(jobs: list[Job], results: dict[Request, Result], jobs_per_gpu: int, budget: float) -> int:
    """Do the jobs within a budget of seconds. Returns how many failed."""
    begun, failed, total = time.monotonic(), 0, len(jobs)
    pending, pace = sorted(jobs, key=lambda job: -job.cost), Pace()
    places = [gpu for _ in range(jobs_per_gpu) for gpu in gpus()][:total]
    threads = max(1, (os.cpu_count() or 1) // len(places))
    workers = [start_worker(gpu, threads) for gpu in places]
    try:
        while True:
            left = budget - (time.monotonic() - begun)
            for worker in workers:
                fitting = [job for job in pending if pace.estimate(job) <= left] if worker.job is None else []
                if fitting:
                    worker.job, worker.started = fitting[0], time.monotonic()
                    pending.remove(worker.job)
                    with contextlib.suppress(OSError):  # of a process that died: there is an end to receive then
                        worker.connection.send(worker.job)
            busy = {worker.connection: worker for worker in workers if worker.job is not None}
            ready = wait(busy, timeout=None if math.isinf(left) else max(0.0, left)) if busy else []
            if not ready:
                for worker in busy.values():
                    print(f"{worker.job}: stopped, it did not end in time", flush=True)
                if pending:
                    print(f"{len(pending)} trainings were not started; the same command goes on with them", flush=True)
                return failed
            for worker in (busy[connection] for connection in ready):
                job, worker.job = worker.job, None
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    answer = "its process ended"
                if isinstance(answer, str):
                    failed += 1
                    print(f"{job}: failed: {answer}", file=sys.stderr, flush=True)
                    workers[workers.index(worker)] = start_worker(worker.gpu, threads)
                    continue
                seconds = time.monotonic() - worker.started
                pace.ended.append((job, seconds, worker.warm))
                worker.warm = True
                results[job.request].add(answer)
                loss, done = answer.metrics["loss"], f"{len(pace.ended)} of {total}"
                print(f"{job}: validation loss {loss:.4f}, {seconds:.1f} s, {done}", flush=True)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def main() -> int:
    """Run what is missing. Returns 1 where a training failed, 2 for a configuration error."""
    arguments = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="after --: overrides of the configuration, for all experiments"
    )
    arguments.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"default: {' '.join(EXPERIMENTS)}")
    arguments.add_argument("--pairs", type=int, default=5, help="of each experiment; default: 5")
    arguments.add_argument("--jobs-per-gpu", type=int, default=1, help="processes on each GPU; default: 1")
    arguments.add_argument("--budget-seconds", type=float, default=math.inf, help="default: none")
    arguments.add_argument("--faults", action="store_true", help="planted faults instead of the fused operators")
    arguments.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    own, overrides = split_overrides(sys.argv[1:])
    options = arguments.parse_args(own)
    for name, value in (("--pairs", options.pairs), ("--jobs-per-gpu", options.jobs_per_gpu)):
        if value < 1:
            arguments.error(f"{name} {value}: must be at least 1")
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # and end the workers
    requests = [Request(name, tuple(overrides), options.faults) for name in options.experiments or EXPERIMENTS]
    try:
        results = {request: open_result(request, options.out) for request in requests}
    except train.CONFIGURATION_ERRORS as error:
        print(explain(error, overrides), file=sys.stderr)
        return 2
    jobs = [job for result in results.values() for job in missing(result, options.pairs)]
    failed = do(jobs, results, options.jobs_per_gpu, options.budget_seconds) if jobs else 0
    for result in results.values():
        summary = result.summary()
        equivalence.write(result.path.parent, summary, result.request.name)
        print(f"\n{result.path}")
        for line in equivalence.difference_rows(summary):
            print("  " + "  ".join(line))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
