"""The count model against its definition, written out with dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from models.transformer.count_model import witten_bell


def by_definition(train: bytes, validation: bytes, order: int) -> float:
    """The formula of `witten_bell`'s docstring, one token at a time."""
    followers: dict[bytes, Counter[int]] = defaultdict(Counter)
    padded = b"\0" * order + train
    for i in range(order + 1, len(padded)):
        for n in range(order + 1):
            followers[padded[i - n : i]][padded[i]] += 1

    def probability(context: bytes, token: int) -> float:
        lower = probability(context[1:], token) if context else 1 / 256
        counts = followers.get(context, Counter())
        total, types = sum(counts.values()), len(counts)
        return (counts[token] + types * lower) / (total + types) if total else lower

    padded = b"\0" * order + validation
    losses = [-math.log(probability(padded[i - order : i], padded[i])) for i in range(order + 1, len(padded))]
    return sum(losses) / len(losses)


def tokens(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("alphabet", [2, 5, 256])
def test_it_equals_its_definition(order: int, alphabet: int) -> None:
    generator = np.random.default_rng()
    symbols = generator.permutation(256)[:alphabet].astype(np.uint8)
    train, validation = (symbols[generator.integers(0, alphabet, n)].tobytes() for n in (701, 203))
    expected = by_definition(train, validation, order)
    assert witten_bell(tokens(train), tokens(validation), order) == pytest.approx(expected, rel=1e-12)


def test_it_equals_its_definition_on_text() -> None:
    train = b"\0" + b"def f(x):\n    return x + 1\n" * 3 + b"\0class C:\n    pass\n\0"
    validation = b"\0def g(y):\n    return y + f(y)\n\0"
    assert witten_bell(tokens(train), tokens(validation)) == pytest.approx(
        by_definition(train, validation, 3), rel=1e-12
    )


def test_a_case_by_hand() -> None:
    # Targets of training: b, a, b. Order 0: c = 3, t = 2, p(b) = (2 + 2/256) / 5, p(a) = (1 + 2/256) / 5.
    # Order 1: after a only b, twice: c = 2, t = 1.
    p = (2 + (2 + 2 / 256) / 5) / 3
    assert witten_bell(tokens(b"abab"), tokens(b"ab"), 1) == pytest.approx(-math.log(p), rel=1e-12)


def test_more_context_helps_where_the_text_has_structure() -> None:
    text = tokens(bytes(np.random.default_rng().integers(97, 123, 9, dtype=np.uint8)) * 40)
    losses = [witten_bell(text[:270], text[270:], order) for order in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.5 * losses[0]


@pytest.mark.parametrize("order", [-1, 4])
def test_an_order_that_does_not_fit_is_refused(order: int) -> None:
    with pytest.raises(ValueError, match=f"order={order}: must be from 0 to 3"):
        witten_bell(tokens(b"abc"), tokens(b"abc"), order)


@pytest.mark.parametrize(("train", "validation", "named"), [(b"a", b"abc", "train"), (b"abc", b"", "validation")])
def test_a_text_without_a_target_is_refused(train: bytes, validation: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} has [01] tokens; at least 2 are needed"):
        witten_bell(tokens(train), tokens(validation))
