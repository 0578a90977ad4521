"""Lines of text files in fields, and what becomes of lines that cannot be read."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path


class Malformed:
    """Lines that cannot be read: an error at the first of them, or a count.

    skip: whether they are counted (data.malformed=skip).
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.count = 0
        self.first: str | None = None
        """Which line was skipped first, and why."""

    def add(self, place: str, reason: object) -> None:
        """A line, named by its place, that cannot be read; raises ValueError naming it unless lines are skipped."""
        told = f"{place}: {reason}"
        if not self._skip:
            raise ValueError(f"{told}\ndata.malformed=skip leaves such lines out and counts them")
        self.count += 1
        self.first = self.first or told

    def describe(self) -> str:
        """How many were skipped, and the first of them."""
        return f"{self.count:,} malformed line{'' if self.count == 1 else 's'} skipped, the first: {self.first}"


def fields_of(
    path: Path, separator: str, malformed: Malformed, *, encoding: str = "utf-8", quoted: bool = False, skipped: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """The fields of each line that is not empty, with its number from 1.

    quoted   whether fields that contain the separator stand in double quotes, as in CSV.
    skipped  lines of the header, which are not given.
    Raises OSError for a file that cannot be read.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number <= skipped or not line.strip():
                continue
            try:
                text = line.decode(encoding).rstrip("\r\n")
                row = next(csv.reader([text], strict=True)) if quoted and '"' in text else text.split(separator)
            except (UnicodeDecodeError, csv.Error) as error:
                malformed.add(place(path, number), f"cannot be read: {error}")
                continue
            yield number, row


def place(path: Path, line: int) -> str:
    """A line, as messages name it."""
    return f"{path}, line {line:,}"


def number(text: str, field: str) -> float:
    """A finite number. Raises ValueError naming the field."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"field {field}: {text!r} is not a finite number")
    return value
