"""What MovieLens tells of users and items, as columns of categorical features that its ratings point into."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.recommender.data.lines import Malformed, number, place
from models.recommender.data.movielens_files import Numbering, Ratings, Table, Tables
from models.recommender.data.source import Feature, Integers

UNKNOWN = 0
"""The id of what is not known of a user or an item; those of values begin at 1."""
GENRE = "genre:"
"""How columns of one genre each begin, whose field is 0 or 1."""
NO_GENRES = ("", "(no genres listed)")
YEAR = re.compile(r"\d{4}")
YEAR_OF_TITLE = re.compile(r"\((\d{4})\)\s*$")

Rows = dict[int, dict[str, str]]
"""Of each user or item that has ratings and a line: its fields by name."""


@dataclass(frozen=True)
class Column:
    """A categorical feature: a bag of ids for each owner, a user or an item, and which of these a rating is of.

    owners  [ratings]: users or items, by index.
    bounds  [owners + 1]: where each one's bag begins in ids; None where every bag is one id.
    """

    feature: Feature
    owners: Integers
    ids: Integers
    bounds: Integers | None = None

    def bags(self, ratings: Integers) -> tuple[Integers, Integers]:
        """The ids of these ratings' bags, one bag after the other, and the bags' lengths."""
        owners = self.owners[ratings]
        if self.bounds is None:
            return self.ids[owners], np.ones(len(owners), dtype=np.int64)
        lengths = self.bounds[owners + 1] - self.bounds[owners]
        shift = np.repeat(self.bounds[owners] - (np.cumsum(lengths) - lengths), lengths)
        return self.ids[shift + np.arange(len(shift))], lengths


def read_columns(
    ratings: Ratings, tables: Tables, malformed: Malformed
) -> tuple[list[Column], NDArray[np.float64] | None]:
    """The categorical features, and the users' ages, NaN where unknown; None where the files have no ages.

    user, item; gender and occupation of the user; year of release and genres of the item, as far as there are such.
    A zip code is left out: it is nearly another name of the user.
    """
    n_users, n_items = len(ratings.user_index), len(ratings.item_index)
    columns = [
        Column(Feature("user", n_users), ratings.users, np.arange(n_users)),
        Column(Feature("item", n_items), ratings.items, np.arange(n_items)),
    ]
    ages = None
    if tables.users is not None:
        names, rows = tables.users.names(), _rows(tables.users, "user", ratings.user_index, malformed)
        columns += [
            _single(name, ratings.users, [rows.get(i, {}).get(name, "") for i in range(n_users)])
            for name in ("gender", "occupation")
            if name in names
        ]
        if "age" in names:
            known = {i: float(row["age"]) for i, row in rows.items() if row["age"]}
            ages = np.array([known.get(i, math.nan) for i in range(n_users)])
    if tables.items is not None:
        names, rows = tables.items.names(), _rows(tables.items, "item", ratings.item_index, malformed)
        years = [_year(rows.get(i, {})) for i in range(n_items)]
        if any(years):
            columns.append(_single("year", ratings.items, years))
        if any(name == "genres" or name.startswith(GENRE) for name in names):
            genres = [_genres(rows.get(i, {}), tables.items.genre_separator) for i in range(n_items)]
            columns.append(_multiple("genres", ratings.items, genres))
    return columns, ages


def _rows(table: Table, key: str, index: Mapping[str, int], malformed: Malformed) -> Rows:
    """The lines of the users or items that have ratings; a field `age` is a number or empty."""
    table.require((key,))
    names, rows = table.names(), {}
    for line, fields in table.rows(malformed):
        row = dict(zip(names, fields, strict=True))
        try:
            if row.get("age"):
                number(row["age"], "age")
            for name in names:
                if name.startswith(GENRE) and row[name] not in ("0", "1"):
                    raise ValueError(f"field {name}: {row[name]!r} is neither 0 nor 1")
        except ValueError as error:
            malformed.add(place(table.path, line), error)
            continue
        owner = index.get(row[key])
        if owner is not None:
            rows[owner] = row
    return rows


def _single(name: str, owners: Integers, values: Sequence[str]) -> Column:
    """The column of one value an owner, by its text; an empty one is unknown."""
    numbering = Numbering(UNKNOWN + 1)
    ids = np.array([numbering[value] if value else UNKNOWN for value in values], dtype=np.int64)
    return Column(Feature(name, len(numbering) + 1), owners, ids)


def _multiple(name: str, owners: Integers, values: Sequence[Sequence[str]]) -> Column:
    """The column of any number of values an owner."""
    numbering = Numbering(UNKNOWN + 1)
    ids = np.array([numbering[value] for bag in values for value in bag], dtype=np.int64)
    bounds = np.concatenate(([0], np.cumsum([len(bag) for bag in values]))).astype(np.int64)
    return Column(Feature(name, len(numbering) + 1, multi_valued=True), owners, ids, bounds)


def _year(row: Mapping[str, str]) -> str:
    """The year of release: of its own column, of ml-100k's release date (01-Jan-1995), or of the title's end."""
    for field, pattern in (("year", YEAR), ("release", YEAR), ("title", YEAR_OF_TITLE)):
        found = pattern.search(row.get(field, ""))
        if found:
            return found.group(found.re.groups)
    return ""


def _genres(row: Mapping[str, str], separator: str) -> list[str]:
    if "genres" in row:
        return [genre for genre in row["genres"].split(separator) if genre not in NO_GENRES]
    return [name.removeprefix(GENRE) for name, value in row.items() if name.startswith(GENRE) and value == "1"]
