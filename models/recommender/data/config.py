"""Configuration of the data a recommender learns from: a synthetic click log, MovieLens, Criteo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MALFORMED = ("error", "skip")
SPLITS = ("random", "time")


def check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of allowed."""
    if value not in allowed:
        raise ValueError(f"{key}={value}: allowed: {', '.join(allowed)}")


def check_within(key: str, value: float, low: float, high: float) -> None:
    """Raise ValueError for a number that is not from low to high."""
    if not low <= value <= high:
        raise ValueError(f"{key}={value}: must be at least {low:g} and at most {high:g}")


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless this share of the samples can be held out."""
    if not 0.0 < fraction <= 0.5:
        raise ValueError(f"data.validation_fraction={fraction}: must be above 0 and at most 0.5")


@dataclass
class ClicksConfig:
    """A synthetic click log in Criteo's shape, drawn from a planted model whose own AUC and logloss are known."""

    name: str = "clicks"
    """The data's name; fixed."""
    seed: int = 0
    """Of the planted model and the validation set; `train.seed` is that of the training samples."""
    max_ids: int = 10_000
    """The most distinct ids of a feature; Criteo's features have 3 to ten million, which this cuts off."""
    skew: float = 1.6
    """Exponent, in [1.01, 3], of the power law of the ids: the k-th most frequent has a share of about k ** -skew."""
    validation_samples: int = 65_536
    """Size of the validation set."""

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, ("clicks",))
        check_within("data.seed", self.seed, 0, 2**31 - 1)
        check_within("data.max_ids", self.max_ids, 2, 2**40)
        check_within("data.skew", self.skew, 1.01, 3)
        check_within("data.validation_samples", self.validation_samples, 1000, 2**31 - 1)


@dataclass
class MovieLensConfig:
    """Ratings as MovieLens publishes them, or in recbole's atomic files; a click is a rating of `threshold` or more."""

    name: str = "movielens"
    """The data's name; fixed."""
    path: str | None = None
    """The folder of the files."""
    threshold: float = 4.0
    """The lowest rating whose label is 1."""
    split: str = "random"
    """random, or time: the latest ratings are held out."""
    validation_fraction: float = 0.2
    """Share of the ratings, in (0, 0.5], held out for validation."""
    split_seed: int = 0
    """Of the random split; `train.seed` is that of the order of the training samples."""
    malformed: str = "error"
    """What a line that cannot be read is: an error, or skip, which counts it."""

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, ("movielens",))
        if not self.path:
            raise ValueError("data.path: none is given; data=movielens needs the folder of its files")
        check_choice("data.split", self.split, SPLITS)
        check_fraction(self.validation_fraction)
        check_within("data.split_seed", self.split_seed, 0, 2**31 - 1)
        check_choice("data.malformed", self.malformed, MALFORMED)


@dataclass
class CriteoConfig:
    """Criteo's click log, streamed: tab-separated text, plain or gzip, or Parquet."""

    name: str = "criteo"
    """The data's name; fixed."""
    path: Any = None
    """A file, a folder, a glob, or a list of these."""
    validation_path: Any = None
    """The same for validation; null holds out a share of the rows of `path`."""
    validation_fraction: float = 0.1
    """Share of the rows, in (0, 0.5], that are held out; unused where validation files are given."""
    validation_samples: int = 100_000
    """The most rows to validate on, taken from the start of the files."""
    shuffle_buffer: int = 100_000
    """Rows that are shuffled with one another."""
    rows: int = 100_000
    """Rows of each table."""
    label: str = "label"
    """Parquet's column of the label; the others are I1 to I13 and C1 to C26."""
    malformed: str = "error"
    """What a row that cannot be read is: an error, or skip, which counts it."""

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, ("criteo",))
        if not self.path:
            raise ValueError("data.path: none is given; data=criteo needs a file, a folder, a glob or a list of these")
        check_fraction(self.validation_fraction)
        check_within("data.validation_samples", self.validation_samples, 1, 2**31 - 1)
        check_within("data.shuffle_buffer", self.shuffle_buffer, 1, 2**31 - 1)
        check_within("data.rows", self.rows, 1, 2**40)
        if not self.label:
            raise ValueError("data.label: must not be empty")
        check_choice("data.malformed", self.malformed, MALFORMED)
