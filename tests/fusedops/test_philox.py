"""Philox in stock PyTorch against published vectors, Triton's own, and the statistics that dropout needs."""

from __future__ import annotations

import math

import pytest
import torch

from fusedops.operators import philox
from fusedops.registration import INTERPRETING

# Counter, key, result: Random123's known answers for Philox-4x32-10 (zeros, ones, the digits of pi).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def seed(value: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert philox.philox(words(counter), words(key)) == words(result)


def test_known_answers_together() -> None:
    """The three as one batch: words broadcast."""
    counter, key, result = (
        tuple(torch.stack(parts) for parts in zip(*(words(row[i]) for row in KNOWN), strict=True)) for i in range(3)
    )
    for ours, known in zip(philox.philox(counter, key), result, strict=True):
        assert torch.equal(ours, known)


def test_mask_is_the_documented_function() -> None:
    """Half i % 8 of the words of group i // 8, low half first, against the threshold."""
    p, elements, value = 0.3, 101, 0x1234_5678_9ABC_DEF0
    mask = philox.keep_mask(seed(value), (elements,), p)
    zero = torch.tensor(0)
    for i in range(elements):
        drawn = philox.philox(
            (torch.tensor(i // 8), zero, zero, zero), (torch.tensor(value & 0xFFFFFFFF), torch.tensor(value >> 32))
        )
        half = int(drawn[i % 8 // 2]) >> (16 * (i % 2)) & 0xFFFF
        assert bool(mask[i]) == (half >= round(p * 65536))


def test_prefixes_and_shapes_agree() -> None:
    """An element's bits depend on its index alone: not on the size or the shape of what is around it."""
    whole = philox.keep_mask(seed(99), (1_200_007,), 0.5)  # more groups than are drawn at a time
    assert torch.equal(philox.keep_mask(seed(99), (3, 7, 11), 0.5).flatten(), whole[: 3 * 7 * 11])
    late = philox._kept(seed(99), 150_000, 150_001, philox.threshold(0.5))
    assert torch.equal(late.flatten()[:7], whole[1_200_000:])
    assert philox.keep_mask(seed(1), (0, 3), 0.5).shape == (0, 3)
    assert philox.keep_mask(seed(1), (), 0.5).shape == ()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_share_dropped(p: float) -> None:
    """Within four standard deviations of p; neighbours, halves and seeds are not correlated."""
    n = 1 << 20
    value = int(torch.randint(0, 2**62, ()))
    dropped = (~philox.keep_mask(seed(value), (n,), p)).double()
    other = (~philox.keep_mask(seed(value + 1), (n,), p)).double()
    deviation = math.sqrt(p * (1 - p) / n)
    assert abs(dropped.mean() - p) < 4 * deviation + 2**-17, f"seed {value}"
    for place in range(8):
        assert abs(dropped[place::8].mean() - p) < 5 * deviation * math.sqrt(8) + 2**-17, f"seed {value}"
    for a, b in ((dropped[1:], dropped[:-1]), (dropped[8:], dropped[:-8]), (dropped, other)):
        assert abs(((a - p) * (b - p)).mean()) < 5 * p * (1 - p) / math.sqrt(n), f"seed {value}"


def test_threshold_and_scale() -> None:
    for p in (0.0, 1e-9, 1e-4, 0.1, 1 / 3, 0.5, 0.9999, 1 - 1e-9, 1.0):
        error = abs(philox.threshold(p) / 65536 - p)
        assert error <= 2**-17 if 2**-17 <= p <= 1 - 2**-17 or p in (0, 1) else error < 2**-16
        assert 0 < philox.threshold(p) < 65536 or p in (0, 1)
    assert philox.scale(0.2) == 1 / (1 - 0.2)
    assert philox.scale(1.0) == 0.0
    assert philox.keep_mask(seed(3), (1000,), 0.0).all()
    assert not philox.keep_mask(seed(3), (1000,), 1.0).any()


@pytest.mark.interpreter
def test_triton_draws_the_same_words() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def draw(seed_pointer, group_pointer, output_pointer, BLOCK: tl.constexpr):
        place = tl.arange(0, BLOCK)
        drawn = tl.randint4x(tl.load(seed_pointer), tl.load(group_pointer + place))
        for i in tl.static_range(4):
            tl.store(output_pointer + 4 * place + i, drawn[i].to(tl.int64))

    assert INTERPRETING
    value = int(torch.randint(0, 2**62, ()))
    groups = torch.cat([torch.randint(0, 2**61, (14,)), torch.tensor([0, 2**32 + 5])])
    output = torch.empty(16, 4, dtype=torch.int64)
    draw[(1,)](seed(value), groups, output, 16)
    zero = torch.zeros((), dtype=torch.int64)
    ours = philox.philox(
        (groups & 0xFFFFFFFF, groups >> 32, zero, zero), (torch.tensor(value & 0xFFFFFFFF), torch.tensor(value >> 32))
    )
    assert torch.equal(torch.stack(ours, 1), output), f"seed {value}"


@pytest.mark.gpu
def test_gpu_and_cpu_draw_the_same_mask() -> None:
    for value in (0, 2**62 - 1, 0x1234_5678_9ABC_DEF0):
        for shape in ((1_000_003,), (3, 5, 7), (0,)):
            cpu, gpu = (philox.keep_mask(seed(value, device), shape, 0.1) for device in ("cpu", "cuda"))
            assert torch.equal(cpu, gpu.cpu())
