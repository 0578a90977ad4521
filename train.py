"""Train a model on stock PyTorch and on fused operators, and compare: python train.py model=transformer ops=fused"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from engine import config, report
from engine.arms import arms_of
from engine.comparison import Comparison, choose_device
from engine.errors import CONFIGURATION_ERRORS, ConfigError, Interrupted, RunError, explain, is_out_of_memory
from engine.progress import make_console
from engine.signals import StopSignal
from engine.task import Task
from engine.tracking import make_tracker
from models import transformer

CONFIGS = Path(__file__).resolve().parent / "configs"
MODELS: dict[str, config.ModelPackage] = {"transformer": transformer}

config.register(MODELS)


def make_task(settings: config.Settings) -> Task:
    """The task of a configuration. Raises ConfigError where its parts do not fit together, or data cannot be read."""
    train = settings.values.train
    try:
        return settings.package.Task(
            model=settings.values.model,
            data=settings.values.data,
            steps=train.steps,
            batch_size=train.batch_size,
            eval_batch_size=train.eval_batch_size,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            warmup_steps=train.warmup_steps,
            min_lr_ratio=train.min_lr_ratio,
            seed=train.seed,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def run(composed: DictConfig) -> None:
    """One comparison, in the run directory that Hydra made."""
    settings = config.resolve(composed, MODELS)
    values = settings.values
    device = choose_device(values.train.device)
    task = make_task(settings)
    arms, baseline = arms_of(values.ops, values.baseline, task.slots)
    directory, console = Path(HydraConfig.get().runtime.output_dir), make_console()
    report.clear(directory)
    report.write_config(directory, settings.resolved)
    tracker = make_tracker(values.tracker, directory, settings.resolved)
    exit_code = 1
    with StopSignal() as stop:
        try:
            comparison = Comparison(task, arms, values.train, device, directory, tracker, console, stop)
            report.introduce(console, comparison, directory)
            comparison.run()
            report.conclude(console, comparison, baseline, settings.resolved, directory, tracker)
            exit_code = 0
        finally:
            tracker.close(exit_code)
        stop.check()


def main() -> int:
    """Run the command line. The exit code: 1 for a run that failed, 2 for a configuration error, 128 + a signal's.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback of an error of the configuration or of the system.
    """
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then passes exceptions on, and they are explained here
    try:
        config.check_groups(sys.argv[1:], CONFIGS)
        run()
    except CONFIGURATION_ERRORS as error:
        if full_error == "1":
            raise
        print(explain(error, sys.argv[1:]), file=sys.stderr)
        return 2
    except RunError as error:
        print(f"the run stopped: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if full_error == "1" or not is_out_of_memory(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        print(f"the run stopped: out of memory: {reason}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a run directory that cannot be made
        if full_error == "1":
            raise
        print(f"the run stopped: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"the run was {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the run began to wait for its steps' ends
        print("the run was stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return 0


if __name__ == "__main__":
    sys.exit(main())
