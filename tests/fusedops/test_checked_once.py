"""Checks that are remembered: what passed is not checked again, what was refused is refused again."""

from __future__ import annotations

import pytest
import torch

from fusedops.operators.checked_once import checked_once, kinds


def test_what_passed_is_not_checked_again_and_what_was_refused_is() -> None:
    seen = []

    @checked_once
    def check(number: int) -> None:
        seen.append(number)
        if number < 0:
            raise ValueError(f"{number} is negative")

    for _ in range(3):
        check(1)
        with pytest.raises(ValueError, match="-1 is negative"):
            check(-1)
    assert seen == [1, -1, -1, -1]


def test_what_has_no_hash_is_checked_each_time() -> None:
    seen: list[list[int]] = []
    check = checked_once(seen.append)
    check([1])
    check([1])
    assert seen == [[1], [1]]


def test_kinds_tell_tensors_apart() -> None:
    table = torch.zeros(3, 2)
    others = [table.double(), table.t(), table.to("meta"), table[:2]]
    assert kinds([table]) == kinds([table.clone()])
    assert len({*kinds([table, *others])}) == 1 + len(others)
