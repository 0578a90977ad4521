"""Data sets of the Hugging Face Hub, or of a directory laid out like one, as documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.transformer.data.documents import Rows, library
from models.transformer.data.network import offline, require_network
from models.transformer.data.tokens import first_line

ALTERNATIVES = "data=stdlib, and data=files data.path=... for files on this machine, need none"


def hub_part(name: str, config: str | None, split: str, field: str, streaming: bool, key: str) -> Rows:
    """The rows of one split, as `datasets.load_dataset(name, config, split=split)` gives them.

    name       a data set on the Hub, or a directory on this machine.
    streaming  whether rows are fetched as they are read, or downloaded (into Hugging Face's cache) before.
    key        the configuration key of the split, for messages.
    Raises ConnectionError where the Hub is needed and cannot be reached, naming what needs no network, and ValueError
    for a data set, configuration or split that does not exist, naming it.
    """
    asked, called = f"data.name={name}", f"{name} ({split})"
    directory = Path(name).expanduser()
    if not directory.is_dir():
        require_network(asked, ALTERNATIVES)
    path = str(directory) if directory.is_dir() else name
    datasets = library()

    def load() -> Any:
        try:
            return datasets.load_dataset(path, config, split=split, streaming=streaming)
        except ConnectionError as error:
            where = f"it is not in the cache ({offline()} is set)" if offline() else first_line(error)
            raise ConnectionError(f"{asked}: {where}\n{ALTERNATIVES}") from error
        except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
            details = f"{asked} data.config={config} {key}={split}"
            raise ValueError(f"{details}: {first_line(error)}") from error

    dataset = load()
    if not streaming:
        # What was downloaded is read as a stream is.
        rows = dataset.to_iterable_dataset()
        return Rows(called, called, field, lambda: rows)
    return Rows(called, called, field, load)
