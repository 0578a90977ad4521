"""The schema behind configs/: dataclasses that refuse a wrong key or type, range checks, and what they resolve to.

The schema of a model's own keys is generated from its package, that of the operators from the slots of fusedops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf

from engine.errors import ConfigError, unknown
from fusedops.slots import SLOTS


class ModelPackage(Protocol):
    """What a package of models/ exports; one whose data is a problem to solve exports PROBLEMS, and no DATA.

    PROBLEMS are the problems by name, as DATA are the sources of data: each a dataclass of keys, its name among them.
    """

    @property
    def Task(self) -> Callable[..., Any]:
        """The engine's task (`engine.task.Task`), of keyword arguments model, data and the numbers of training."""

    @property
    def ModelConfig(self) -> type:
        """A dataclass of name, preset and keys that depart from it; `architecture()` has the preset filled in."""

    @property
    def PRESETS(self) -> Mapping[str, Any]:
        """The presets, by name."""

    @property
    def DATA(self) -> Mapping[str, type]:
        """The sources of data it can be trained on, by name, each a dataclass of keys.

        The key `source` has the name; where there is none, `name` does.
        """


LARGEST_INTEGER = 2**31 - 1
"""What keys that are whole numbers may be at most: products of some still fit into 64 bits."""


def _number(default: float, low: float, high: float | None = None) -> Any:
    largest = LARGEST_INTEGER if isinstance(default, int) else math.inf
    return field(default=default, metadata={"low": low, "high": largest if high is None else high})


def _choice(default: str, *others: str) -> Any:
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass
class TrainConfig:
    """How a model is trained and timed."""

    steps: int = _number(500, 1)
    """Training steps of each arm."""
    batch_size: int = _number(16, 1)
    """Sequences, samples or points a batch."""
    accumulation: int = _number(1, 1)
    """Batches a step: their gradients add up, each weighted by what it counts, to that of one batch made of them."""
    eval_batch_size: int = _number(64, 1)
    """The same in a batch of the validation set."""
    learning_rate: float = _number(1e-3, 0)
    """The peak of the schedule."""
    weight_decay: float = _number(0.1, 0)
    """Decoupled weight decay of the matrices."""
    warmup_steps: int = _number(50, 0)
    """Steps over which the learning rate rises from zero to its peak."""
    min_lr_ratio: float = _number(0.1, 0, 1)
    """Where the cosine schedule ends, as a share of the peak."""
    grad_clip: float = _number(1.0, 0)
    """The largest norm of the gradient; 0 clips nothing."""
    precision: str = _choice("fp32", "bf16", "fp16")
    """The dtype of autocast: fp32 is none, fp16 scales the loss."""
    tf32: bool = False
    """Whether fp32 products on a GPU may round their inputs to TF32."""
    seed: int = _number(0, 0)
    """Of the weights, the batches and dropout, the same for every arm."""
    device: str = _choice("auto", "cpu", "cuda")
    """auto is the GPU where there is one."""
    eval_every: int = _number(0, 0)
    """Steps between evaluations over the whole validation set; 0 is at the end only."""
    log_every: int = _number(20, 1)
    """Steps between lines of metrics.jsonl; losses stay on the device in between."""
    checkpoint_every: int = _number(0, 0)
    """Steps between checkpoints; 0 is at the end only. A signal that stops the run has one written in any case."""
    early_stop: int = _number(0, 0)
    """Evaluations in a row without a lower validation loss that end an arm's training; 0 lets it go on.

    Above 0 (and with eval_every above 0) an arm's metrics and its saved model are those of its best evaluation.
    """
    early_stop_delta: float = _number(0.0, 0)
    """By how much a validation loss must be below the best before it to count as lower."""
    sample_tokens: int = _number(200, 0, 100_000)
    """Tokens of text that a trained language model writes to be looked at; 0 writes none."""
    timing_rounds: int = _number(9, 9, 1000)
    """Rounds of the interleaved timing pass, in each of which every arm is timed once."""


@dataclass
class TrackerConfig:
    """Where runs are recorded besides the run directory."""

    name: str = _choice("wandb", "none")
    """wandb, or none."""
    mode: str = _choice("offline", "online")
    """offline needs neither a network nor an account; `wandb sync` uploads later."""
    project: str = "fusedops"
    """The W&B project."""


@dataclass
class CompileConfig:
    """Whether, and how, the arms' models run under torch.compile."""

    mode: str = _choice("none", "default", "max_autotune", "reduce_overhead")
    """none is eager; the others are torch.compile's modes, of which the last two replay CUDA graphs on a GPU."""
    arms: str = _choice("compiled", "both")
    """compiled: every arm is, the baseline too; both: the eager arms come first, and their baseline is that of all."""
    backend: str = _choice("inductor", "aot_eager")
    """What compiles: aot_eager generates no code and is there for tests and for finding faults."""


OpsConfig: Any = make_dataclass(
    "OpsConfig",
    [("set", str, MISSING), *((slot, str | None, None) for slot in SLOTS)],
    namespace={"__doc__": "The operator set, and for a slot that departs from it the name of its implementation."},
)


@dataclass
class Config:
    """Everything a run depends on."""

    model: Any = MISSING
    data: Any = MISSING
    problem: Any = MISSING
    ops: Any = field(default_factory=OpsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profile: bool = False
    """Whether each arm leaves a trace of some training steps and the table of its operators."""
    baseline: str = _choice("native", "none")
    """The arm the others are compared with: the stock operators, or none."""
    resume: str | None = None
    """A run directory: the run that was stopped there goes on, with its own configuration."""
    equivalence: int = _number(0, 0, 1000)
    """Pairs of fused and stock trainings of which only the final validation losses are compared; 0 is a plain run."""
    equivalence_margin: float = _number(0.01, 0)
    """A difference in validation loss, in nats, below which arms count as equivalent."""
    ablate: bool = False
    """Whether to time each slot swapped alone and left out, instead of training: which operator brings what."""


@dataclass(frozen=True)
class Settings:
    """A configuration that was checked."""

    package: ModelPackage
    values: Config
    resolved: dict[str, Any]
    """Plain values, those of the preset filled in, as config.yaml keeps them."""


def register(models: Mapping[str, ModelPackage]) -> None:
    """Put the schemas of these models, and everything else, where configs/ finds them."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, package in models.items():
        store.store(group="schema/model", name=name, node=package.ModelConfig)
        for source, keys in package.DATA.items():
            store.store(group="schema/data", name=source, node=keys)
        for problem, keys in getattr(package, "PROBLEMS", {}).items():
            store.store(group="problem", name=problem, node=keys(problem))
    if not OmegaConf.has_resolver("stamp"):
        OmegaConf.register_new_resolver("stamp", _stamp, use_cache=True)


def source_of(package: ModelPackage) -> tuple[str, Mapping[str, type]]:
    """The group that says what a model learns from, data or problem, and its options."""
    problems = getattr(package, "PROBLEMS", None)
    return ("data", package.DATA) if problems is None else ("problem", problems)


def _check_source(config: DictConfig, package: ModelPackage) -> None:
    """Raise ConfigError unless the model's own group is chosen, and the other is not; that one becomes null."""
    group, options = source_of(package)
    other, name = "problem" if group == "data" else "data", config.model.name
    if OmegaConf.is_missing(config, group) or config[group] is None:
        raise ConfigError(f"{group}: none is chosen, and model={name} needs one\nthere are: {', '.join(options)}")
    if not OmegaConf.is_missing(config, other) and config[other] is not None:
        raise ConfigError(f"{other}={config[other].name}: model={name} has no {other}, it has a {group}")
    config[other] = None
    keys = config[group]
    chosen = keys.source if "source" in keys else keys.name
    if chosen not in options:
        raise unknown(f"{group}={chosen}", f"{group} for model={name}", chosen, options)


def _stamp() -> str:
    """Date and time to the microsecond: two runs that start in one second get two directories."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def resolve(config: DictConfig, models: Mapping[str, ModelPackage]) -> Settings:
    """Check a composed configuration and look its names up.

    Raises ConfigError naming the key, what it was, and what exists or is allowed.
    """
    if OmegaConf.is_missing(config, "model"):
        raise ConfigError("model: none is chosen, and a run needs one")
    check_keys(config)
    name, preset = config.model.name, config.model.preset
    if name not in models:
        raise unknown(f"model.name={name}", "model", name, models)
    package = models[name]
    if preset not in package.PRESETS:
        raise unknown(f"model.preset={preset}", "preset of this model", preset, package.PRESETS)
    _check_source(config, package)
    try:
        values: Config = OmegaConf.to_object(config)  # type: ignore[assignment]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_ranges(values)
    check_ranges(values.train, "train.")
    check_ranges(values.compile, "compile.")
    check_ranges(values.tracker, "tracker.")
    if values.train.early_stop and not values.train.eval_every:
        raise ConfigError(
            f"train.early_stop={values.train.early_stop}: counts evaluations; needs train.eval_every of at least 1"
        )
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    resolved["model"] |= values.model.architecture()
    return Settings(package, values, resolved)


def check_groups(overrides: Iterable[str], configs: Path) -> None:
    """Raise ConfigError for an override that has no key, or group=value whose value is no name (null, 3).

    Hydra's errors for these name nothing.

    configs: the folder of the groups, each a folder of options.
    """
    stored = ConfigStore.instance().repo
    groups = {path.name for path in configs.iterdir() if path.is_dir()} | {"problem"}
    for override in overrides:
        group = override.partition("=")[0].lstrip("+")
        if not group:
            raise ConfigError(f"{override}: not of the form key=value")
        if group in groups and "=" in override:
            value = OverridesParser.create().parse_overrides([override])[0].value()
            if value is None or isinstance(value, int | float | dict):
                files = (configs / group).glob("*.yaml")
                options = sorted({path.stem for path in files} | {Path(n).stem for n in stored.get(group, {})})
                raise unknown(override, f"option of {group}", override.partition("=")[2], options)


def check_keys(config: DictConfig, prefix: str = "") -> None:
    """Raise ConfigError for a key that the schema lacks: Hydra lets +key=value add any."""
    schema: Any = OmegaConf.get_type(config)
    known = [f.name for f in dataclasses.fields(schema)]
    for key in config:
        name, value = f"{prefix}{key!s}", None if OmegaConf.is_missing(config, key) else config[key]
        if key not in known:
            raise unknown(f"{name}={value}", f"key of {prefix[:-1]}" if prefix else "key", str(key), known)
        if isinstance(value, DictConfig):
            check_keys(value, f"{name}.")


def check_ranges(values: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first field outside what its declaration allows."""
    for f in dataclasses.fields(values):
        value, asked = getattr(values, f.name), f"{prefix}{f.name}={getattr(values, f.name)}"
        if "choices" in f.metadata and value not in f.metadata["choices"]:
            raise unknown(asked, prefix + f.name, value, f.metadata["choices"])
        if "low" in f.metadata and not (f.metadata["low"] <= value <= f.metadata["high"] and math.isfinite(value)):
            high = f.metadata["high"]
            allowed = f"at least {f.metadata['low']} and " + (f"at most {high}" if high != math.inf else "finite")
            raise ConfigError(f"{asked}: must be {allowed}")
