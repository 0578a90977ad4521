"""Train a model on stock PyTorch and on fused operators, and compare: python train.py model=transformer ops=fused"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from engine import attribution, checkpoint, config, equivalence, profiling, report, resume
from engine.arms import Arm, arms_of, check_kind_of_run
from engine.comparison import Comparison, choose_device
from engine.errors import CONFIGURATION_ERRORS, ConfigError, Interrupted, RunError, failure
from engine.multirun import Jobs
from engine.progress import make_console
from engine.signals import StopSignal
from engine.task import Task
from engine.tracking import NullTracker, make_tracker
from models import pinn, recommender, transformer

if TYPE_CHECKING:
    import torch  # otherwise not before engine, which sets what torch reads when it is imported

CONFIGS = Path(__file__).resolve().parent / "configs"
MODELS: dict[str, config.ModelPackage] = {"transformer": transformer, "recommender": recommender, "pinn": pinn}

config.register(MODELS)
jobs = Jobs()
"""Of a command with -m."""


def make_task(settings: config.Settings, seed: int | None = None) -> Task:
    """The task of a configuration, with its seed or another.

    Raises ConfigError where its parts do not fit together, or data cannot be read.
    """
    train = settings.values.train
    source, _ = config.source_of(settings.package)
    try:
        return settings.package.Task(
            model=settings.values.model,
            **{source: getattr(settings.values, source)},
            steps=train.steps,
            batch_size=train.batch_size,
            eval_batch_size=train.eval_batch_size,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            warmup_steps=train.warmup_steps,
            min_lr_ratio=train.min_lr_ratio,
            seed=train.seed if seed is None else seed,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def make_study(
    settings: config.Settings,
    task: Task,
    arms: Sequence[Arm],
    device: torch.device,
    directory: Path,
    console: Console,
    stop: StopSignal,
) -> equivalence.Study:
    """The study of `equivalence`: pairs of trainings of the arms, the first of which is the stock one."""

    def pair(seed: int) -> Comparison:
        train = dataclasses.replace(settings.values.train, seed=seed)
        its_task = task if seed == settings.values.train.seed else make_task(settings, seed)
        return Comparison(its_task, arms, train, device, directory, NullTracker(), console, stop)

    return equivalence.Study(pair, [arm.name for arm in arms], device, settings.resolved, console, stop)


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def run(composed: DictConfig) -> None:
    """What Hydra calls: once, or with -m once a job, of which one that fails leaves the others be."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is RunMode.MULTIRUN:
        overrides, directory = list(hydra_config.overrides.task), Path(hydra_config.runtime.output_dir)
        jobs.run(lambda: compare(composed), directory, overrides)
    else:
        compare(composed)


def compare(composed: DictConfig) -> None:
    """One comparison, in the run directory that Hydra made."""
    settings = config.resolve(composed, MODELS)
    values = settings.values
    device = choose_device(values.train.device)
    task = make_task(settings)
    for group, decided in task.chosen.items():
        settings.resolved[group] |= decided
    arms, baseline = arms_of(values.ops, values.baseline, task.slots, values.compile)
    check_kind_of_run(values, arms, baseline)
    if values.equivalence and not task.loss_in_nats:
        raise ConfigError(
            f"equivalence={values.equivalence} with model={task.name}: its margin is of losses in nats, which this "
            "one's is not; allowed: equivalence=0, whose comparison has the arms' metrics"
        )
    directory, console = Path(HydraConfig.get().runtime.output_dir), make_console()
    resolved = settings.resolved | {resume.KEY: None}
    if values.equivalence:
        equivalence.check(directory, settings.resolved, device)
    if values.resume is not None:
        resume.check(directory, resolved)
    else:
        report.clear(directory)
        checkpoint.clear(directory)
        report.write_config(directory, resolved)
    tracker = make_tracker(values.tracker, directory, resolved)
    exit_code = 1
    with StopSignal() as stop:
        try:
            comparison = Comparison(
                task,
                arms,
                values.train,
                device,
                directory,
                tracker,
                console,
                stop,
                configuration=resume.settled(resolved),
                resume=values.resume is not None,
            )
            report.introduce(console, comparison, directory)
            if values.equivalence:
                study = make_study(settings, task, arms, device, directory, console, stop)
                seeds = range(values.train.seed, values.train.seed + values.equivalence)
                equivalence.run(study, seeds, values.equivalence_margin, directory, tracker)
            elif values.ablate:
                attribution.run(comparison, settings.resolved, directory, console, tracker, stop)
            else:
                comparison.run()
                report.conclude(console, comparison, baseline, resolved, directory, tracker)
                if values.profile:
                    profiling.run(comparison, directory, console)
            exit_code = 0
        except Interrupted:
            console.print(f"to go on: python train.py resume={directory}")
            raise
        finally:
            tracker.close(exit_code)
        stop.check()


def main() -> int:
    """Run the command line. The exit code: 1 for a run that failed, 2 for a configuration error, 128 + a signal's.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback of an error of the configuration or of the system.
    """
    jobs.done.clear()
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then passes exceptions on, and they are explained here
    try:
        sys.argv[1:] = resume.arguments(sys.argv[1:])
        config.check_groups(sys.argv[1:], CONFIGS)
        run()
    except (*CONFIGURATION_ERRORS, RuntimeError, MemoryError, OSError) as error:
        told = failure(error, sys.argv[1:])
        if told is None or (full_error == "1" and not isinstance(error, RunError)):
            raise
        print(told.message, file=sys.stderr)
        return told.exit_code
    except Interrupted as error:
        if jobs.done:  # of several jobs, those that ended before
            jobs.conclude()
        print(f"the run was {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the run began to wait for its steps' ends
        print("the run was stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return jobs.conclude() if jobs.done else 0


if __name__ == "__main__":
    sys.exit(main())
