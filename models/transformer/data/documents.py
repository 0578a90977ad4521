"""Where documents come from: files of text, rows of JSON Lines and Parquet, data sets of the Hugging Face Hub.

Each file or data set is a part. A reader goes through parts in an order and can say where it stands, such that another
one goes on from there.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import json
import logging
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from models.parquet import opened, tables
from models.transformer.data.tokens import Document, first_line

TEXT, JSON_LINES, PARQUET = "text", "jsonl", "parquet"
EXTENSIONS: dict[str, tuple[str, ...]] = {
    TEXT: (".txt", ".text", ".md", ".rst", ".py", ".tex"),
    JSON_LINES: (".jsonl", ".ndjson", ".json"),
    PARQUET: (".parquet",),
}
"""The kinds of file, and the extensions by which they are told."""
ROWS_AT_ONCE = 64
"""Of Parquet: texts may be long."""

State = dict[str, Any]


class Part(Protocol):
    """Documents that are read one after the other."""

    @property
    def identity(self) -> str:
        """Its name, and what tells whether it is still what it was: a file's size."""

    def read(self, state: State | None) -> Generator[Document, None, None]:
        """The documents, or those after a state."""

    def state(self) -> State:
        """Where the latest `read` stands."""


@dataclass
class TextFile:
    """A file of UTF-8 text, which is one document and is read whole."""

    path: Path
    _done: bool = False

    @property
    def identity(self) -> str:
        return identity_of(self.path)

    def read(self, state: State | None) -> Generator[Document, None, None]:
        """Raises OSError for a file that cannot be read and ValueError for one that is not UTF-8, naming it."""
        self._done = state is not None and state["done"]
        if not self._done:
            content = self.path.read_bytes()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.path}: not UTF-8 text: byte {content[error.start]:#04x} at {error.start:,}"
                ) from error
            self._done = True
            yield Document(str(self.path), text)

    def state(self) -> State:
        return {"done": self._done}


class Rows:
    """The rows of a data set of `datasets`, each a document in one field.

    name      what messages call it.
    identity  as of a part.
    field     the column that has the text.
    load      opens it from its beginning.
    explain   says better than `datasets` what is wrong, where it can.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        field: str,
        load: Callable[[], Any],
        explain: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.identity = identity
        self._name, self._field, self._load, self._explain = name, field, load, explain
        self._dataset: Any = None
        self._row = 0

    def read(self, state: State | None) -> Generator[Document, None, None]:
        """Raises ValueError, naming file and row, for a row without text in the field, and for what cannot be read."""
        self._dataset, self._row = self._load(), 0
        if state is not None:
            self._row = state["row"]
            self._dataset.load_state_dict(state["dataset"])
        with contextlib.closing(self._rows()) as rows:
            for row in rows:
                self._row += 1
                yield Document(f"{self._name}, row {self._row}", self._text(row))

    def _rows(self) -> Generator[dict[str, Any], None, None]:
        rows = iter(self._dataset)
        try:
            yield from rows
        except (ValueError, OSError, library().exceptions.DatasetGenerationError) as error:
            raise ValueError(self._explain() or f"{self._name}: cannot be read: {first_line(error)}") from error
        finally:
            if isinstance(rows, Generator):
                # Threads of pyarrow that still read ahead would end the interpreter badly; they belong to objects of
                # Arrow's, some of which are part of reference cycles.
                rows.close()
                del rows
                gc.collect()

    def _text(self, row: dict[str, Any]) -> str:
        text = row.get(self._field)
        if isinstance(text, str):
            return text
        place = f"{self._name}, row {self._row}"
        if self._field not in row:
            raise ValueError(f"{place}: there is no field {self._field!r} (data.field); there are {', '.join(row)}")
        found = "missing" if text is None else f"of type {type(text).__name__}"
        raise ValueError(f"{place}: the field {self._field!r} (data.field) is {found}; it must be text")

    def state(self) -> State:
        return {"row": self._row, "dataset": self._dataset.state_dict()}


@dataclass
class ParquetRows:
    """The rows of a file of Parquet, each a document in one field, the only column that is read."""

    path: Path
    field: str
    _row: int = 0

    @property
    def identity(self) -> str:
        return identity_of(self.path)

    def read(self, state: State | None) -> Generator[Document, None, None]:
        """Raises ValueError, naming file and row, for a row without text in the field, and for what cannot be read."""
        self._row = 0 if state is None else state["row"]
        with opened(self.path) as file:
            self._check(file)
            for table in tables(file, [self.field], ROWS_AT_ONCE, self._row):
                for value in table.column(self.field):
                    self._row += 1
                    place = f"{self.path}, row {self._row}"
                    yield Document(place, self._text(value, place))

    def _check(self, file: Any) -> None:
        """Raise ValueError unless the file has rows, and text in the column."""
        from pyarrow import types

        names = file.schema_arrow.names
        if self.field not in names:
            raise ValueError(
                f"{self.path}: cannot be read: there is no field {self.field!r} (data.field); "
                f"there are {', '.join(names)}"
            )
        kind = file.schema_arrow.field(self.field).type
        text = kind.value_type if types.is_dictionary(kind) else kind
        if str(text) not in ("string", "large_string", "string_view"):
            raise ValueError(
                f"{self.path}: cannot be read: the field {self.field!r} (data.field) is of type {kind}; it must be text"
            )
        if not file.metadata.num_rows:
            raise ValueError(f"{self.path}: cannot be read: the file has no rows")

    def _text(self, value: Any, place: str) -> str:
        try:
            text: str | None = value.as_py()
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x} at {error.start:,}"
            raise ValueError(f"{place}: not UTF-8 text: {byte}") from error
        if text is None:
            raise ValueError(f"{place}: the field {self.field!r} (data.field) is missing; it must be text")
        return text

    def state(self) -> State:
        return {"row": self._row}


class Reader:
    """Goes through parts, from the beginning or from the state of another reader of the same parts."""

    def __init__(self, parts: Sequence[Part], state: State | None = None) -> None:
        self._parts, self._index, self._inner = parts, 0, None
        if state is not None:
            self._index, self._inner = state["part"], state["inner"]
        self._started = False

    def __iter__(self) -> Generator[Document, None, None]:
        while self._index < len(self._parts):
            part = self._parts[self._index]
            with contextlib.closing(part.read(self._inner)) as documents:
                self._started = False
                for document in documents:
                    self._started = True
                    yield document
            self._index, self._inner, self._started = self._index + 1, None, False

    def state(self) -> State:
        """Where it stands: after the document that was given last."""
        return {"part": self._index, "inner": self._parts[self._index].state() if self._started else self._inner}


def library() -> Any:
    """The package `datasets`, which plain text does without. Raises ValueError where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "JSON Lines and data sets of the Hub are read by the package datasets, which is not installed "
            f"({error}); data=stdlib and files of plain text need none"
        ) from error
    # It would tell the Hub of each data set that is loaded, files on this machine too, and wait where there is none.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets


# ---------------------------------------------------------------------------------------------------------------------
# Files


def find_files(paths: object, kind: str | None, key: str) -> list[tuple[Path, str]]:
    """The files of `data.path`, each with its kind, in the order of their paths; one of several names counts once.

    paths  a file, a folder (all files below it whose extension is known), a glob, or a list of these.
    kind   the kind of every file, whatever its extension; None goes by the extension.
    key    the configuration key, for messages.
    Raises FileNotFoundError where there is nothing, ValueError for an extension that is not known, naming it.
    """
    found: dict[Path, tuple[Path, str]] = {}  # by what the path leads to, through links and loops of them
    for path in [paths] if isinstance(paths, str) else list(paths) if isinstance(paths, Iterable) else [paths]:
        if not isinstance(path, str) or not path:
            raise ValueError(f"{key}={path}: must be a path, or a list of paths")
        for file in sorted(_expand(path, kind, key)):
            found.setdefault(file.resolve(), (file, kind or _kind_of(file, key)))
    return sorted(found.values())


def _expand(path: str, kind: str | None, key: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        known = [extension for extensions in EXTENSIONS.values() for extension in extensions]
        files = [
            file
            for file in place.rglob("*")
            if file.is_file()
            and not any(name.startswith(".") for name in file.relative_to(place).parts)
            and (kind is not None or file.suffix.lower() in known)
        ]
        if not files:
            raise FileNotFoundError(f"{key}={path}: the folder has no file ending in {', '.join(known)}")
        return files
    files = [Path(name) for name in glob.glob(str(place), recursive=True) if Path(name).is_file()]
    if not files:
        raise FileNotFoundError(f"{key}={path}: there is no such file or folder, and as a pattern it matches no file")
    return files


def _kind_of(file: Path, key: str) -> str:
    for kind, extensions in EXTENSIONS.items():
        if file.suffix.lower() in extensions:
            return kind
    kinds = "; ".join(f"{kind}: {' '.join(extensions)}" for kind, extensions in EXTENSIONS.items())
    extension = f"the extension {file.suffix!r} is not known" if file.suffix else "it has no extension"
    raise ValueError(f"{key}: {file}: {extension}\nknown are {kinds}; data.format says what every file is")


def file_parts(files: Sequence[tuple[Path, str]], field: str) -> list[Part]:
    """A part a file. Raises ValueError naming a file that is empty."""
    parts: list[Part] = []
    for file, kind in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{file}: the file is empty")
        if kind == TEXT:
            parts.append(TextFile(file))
        elif kind == PARQUET:
            parts.append(ParquetRows(file, field))
        else:
            parts.append(_json_rows(file, field))
    return parts


def _json_rows(file: Path, field: str) -> Rows:
    datasets = library()

    def load() -> Any:
        # What it would log is in the error that it raises.
        logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
        # A streamed file is read where it lies; the folder gets nothing but locks.
        with tempfile.TemporaryDirectory(prefix="fusedops-data-") as folder:
            try:
                return datasets.load_dataset(
                    "json",
                    data_files=glob.escape(str(file.resolve())),
                    split="train",
                    streaming=True,
                    cache_dir=folder,
                )
            except (ValueError, OSError) as error:
                raise ValueError(f"{file}: cannot be read: {first_line(error)}") from error

    return Rows(str(file), identity_of(file), field, load, lambda: malformed_line(file))


def identity_of(file: Path) -> str:
    """A file's name and size."""
    return f"{file.name}: {file.stat().st_size} bytes"


def malformed_line(file: Path) -> str | None:
    """Which line of a JSON Lines file is no JSON object and why, or None where all are."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                return f"{file}, line {number}: not UTF-8 text: byte {line[error.start]:#04x} at {error.start}"
            except json.JSONDecodeError as error:
                return f"{file}, line {number}: not JSON: {error.msg} (column {error.colno})"
            if not isinstance(row, dict):
                return f"{file}, line {number}: must be a JSON object, and is {type(row).__name__}"
    return None


def documents(parts: Sequence[Part]) -> Iterator[Document]:
    """All documents of the parts, once."""
    return iter(Reader(parts))
