"""The files of MovieLens as GroupLens publishes them, and recbole's atomic files: ratings, users, items as texts.

ml-100k                           u.data (tabs), u.user and u.item (bars; a column a genre)
ml-1m, ml-10m                     ratings.dat, users.dat, movies.dat (double colons)
ml-20m, ml-25m, ml-32m, latest    ratings.csv, movies.csv
recbole                           NAME.inter, NAME.user, NAME.item (tabs; a header of name:type)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.recommender.data.lines import Malformed, fields_of, number, place
from models.recommender.data.source import Integers

GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
"""Of ml-100k, in the order of u.item's columns."""
ALIASES = {
    **{"userId": "user", "user_id": "user", "movieId": "item", "item_id": "item"},
    **{"class": "genres", "genre": "genres", "release_year": "year", "movie_title": "title"},
}
"""Names in headers, and what they are called here."""


@dataclass(frozen=True)
class Table:
    """A file of rows.

    fields           what the columns are called; None takes the names of the header.
    genre_separator  what stands between the genres of an item.
    """

    path: Path
    separator: str
    fields: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    quoted: bool = False
    genre_separator: str = "|"

    def require(self, names: Iterable[str]) -> None:
        """Raise ValueError, naming the file, unless it has these columns."""
        missing = [name for name in names if name not in self.names()]
        if missing:
            raise ValueError(f"{self.path}: there is no field {missing[0]}; there are {', '.join(self.names())}")

    def names(self) -> tuple[str, ...]:
        """The columns' names. Raises ValueError, naming the file, for a header that is not text or not there."""
        if self.fields is not None:
            return self.fields
        header = next(fields_of(self.path, self.separator, Malformed(skip=False), encoding="utf-8-sig"), None)
        if header is None:
            raise ValueError(f"{self.path}: the file is empty")
        plain = [name.partition(":")[0] for name in header[1]]
        return tuple(ALIASES.get(name, name) for name in plain)

    def rows(self, malformed: Malformed) -> Iterator[tuple[int, list[str]]]:
        """Each line's number and its fields, as many as there are names; other lines are malformed."""
        names = self.names()
        lines = fields_of(
            self.path,
            self.separator,
            malformed,
            encoding=self.encoding,
            quoted=self.quoted,
            skipped=int(self.fields is None),
        )
        for line, row in lines:
            if len(row) == len(names):
                yield line, row
            else:
                malformed.add(
                    place(self.path, line),
                    f"{len(row)} field{'' if len(row) == 1 else 's'}; must be {len(names)}: {', '.join(names)}",
                )


@dataclass(frozen=True)
class Tables:
    """The files of one data set; users and items are None where it has none."""

    ratings: Table
    users: Table | None
    items: Table | None


def find_tables(path: str) -> Tables:
    """The files of a folder, or those beside a file of ratings.

    Raises FileNotFoundError where there are none, ValueError where there are several data sets, naming data.path.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"data.path={path}: there is no such file or folder")
    folder = root if root.is_dir() else root.parent
    candidates = [root] if root.is_file() else sorted(folder.iterdir())
    found = [file for file in candidates if file.name in _PUBLISHED or file.suffix == ".inter"]
    if not found:
        raise FileNotFoundError(f"data.path={path}: no ratings there; known are {', '.join(_PUBLISHED)}, NAME.inter")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"data.path={path}: several files of ratings: {names}; name one of them")
    file = found[0]
    return _atomic(file) if file.suffix == ".inter" else _PUBLISHED[file.name](folder)


def _if_there(table: Table) -> Table | None:
    return table if table.path.is_file() else None


def _ml_100k(folder: Path) -> Tables:
    item = ("item", "title", "release", "video_release", "url", *(f"genre:{name}" for name in GENRES))
    return Tables(
        Table(folder / "u.data", "\t", ("user", "item", "rating", "timestamp")),
        _if_there(Table(folder / "u.user", "|", ("user", "age", "gender", "occupation", "zip"))),
        _if_there(Table(folder / "u.item", "|", item, encoding="latin-1")),
    )


def _ml_1m(folder: Path) -> Tables:
    return Tables(
        Table(folder / "ratings.dat", "::", ("user", "item", "rating", "timestamp")),
        _if_there(Table(folder / "users.dat", "::", ("user", "gender", "age", "occupation", "zip"))),
        _if_there(Table(folder / "movies.dat", "::", ("item", "title", "genres"), encoding="latin-1")),
    )


def _csv(folder: Path) -> Tables:
    return Tables(
        Table(folder / "ratings.csv", ",", quoted=True), None, _if_there(Table(folder / "movies.csv", ",", quoted=True))
    )


def _atomic(file: Path) -> Tables:
    def beside(extension: str) -> Table:
        return Table(file.with_suffix(extension), "\t", genre_separator=" ")

    return Tables(beside(".inter"), _if_there(beside(".user")), _if_there(beside(".item")))


_PUBLISHED = {"u.data": _ml_100k, "ratings.dat": _ml_1m, "ratings.csv": _csv}


class Numbering(dict[str, int]):
    """Texts by the order in which they were first met, from `first` on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, text: str) -> int:
        self[text] = index = self._first + len(self)
        return index


@dataclass(frozen=True)
class Ratings:
    """Ratings in the order of their file, [ratings] each; users and items by index. Times may be missing."""

    users: Integers
    items: Integers
    values: NDArray[np.float64]
    times: NDArray[np.float64] | None
    user_index: Numbering
    item_index: Numbering


def read_ratings(table: Table, malformed: Malformed) -> Ratings:
    """All ratings of a file. Raises ValueError naming the file where it has none, or lacks a column."""
    table.require(("user", "item", "rating"))
    names = table.names()
    user_at, item_at, rating_at = (names.index(name) for name in ("user", "item", "rating"))
    time_at = names.index("timestamp") if "timestamp" in names else None
    user_index, item_index = Numbering(), Numbering()
    users, items, values, times = array("q"), array("q"), array("d"), array("d")
    for line, row in table.rows(malformed):
        try:
            value = number(row[rating_at], "rating")
            time = 0.0 if time_at is None else number(row[time_at], "timestamp")
            user, item = _filled(row[user_at], "user"), _filled(row[item_at], "item")
        except ValueError as error:
            malformed.add(place(table.path, line), error)
            continue
        users.append(user_index[user])
        items.append(item_index[item])
        values.append(value)
        times.append(time)
    if not values:
        raise ValueError(f"{table.path}: there are no ratings in it")
    return Ratings(
        np.array(users, dtype=np.int64),
        np.array(items, dtype=np.int64),
        np.array(values, dtype=np.float64),
        None if time_at is None else np.array(times, dtype=np.float64),
        user_index,
        item_index,
    )


def _filled(text: str, field: str) -> str:
    if not text:
        raise ValueError(f"field {field}: is empty")
    return text
