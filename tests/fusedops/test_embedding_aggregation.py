"""embedding_aggregation beside torch.nn.functional.embedding_bag, exact arithmetic and its own contract."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops import embedding_aggregation
from tests.fusedops.embedding import INT64_MAX, INT64_MIN, random_bags, random_tables


def by_bags(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    mode: str,
    weights: Tensor | None = None,
) -> Tensor:
    """[B, F, D]: an F.embedding_bag a feature, of ids modulo rows by Python's own integers."""
    batch = (len(offsets) - 1) // len(feature_tables)
    pooled = []
    for feature, table in enumerate(feature_tables):
        own = offsets[feature * batch : (feature + 1) * batch + 1]
        part = slice(int(own[0]), int(own[-1]))
        rows = torch.tensor([i % len(tables[table]) for i in ids[part].tolist()], dtype=torch.int64, device=ids.device)
        bags = F.embedding_bag(
            rows,
            tables[table],
            own.long() - own[0],
            mode=mode,
            include_last_offset=True,
            per_sample_weights=None if weights is None else weights[part],
        )
        pooled.append(bags)
    return torch.stack(pooled, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients beside stock PyTorch


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_as_embedding_bags(device: torch.device, mode: str) -> None:
    """Random bags of raw ids, tables shared by features: outputs and the gradients of every table."""
    features = [0, 1, 1, 2]
    tables = random_tables([7, 1000, 63], 13, device, torch.float64)
    ids, offsets = random_bags(4, 5, 6, device)
    ours = embedding_aggregation(tables, ids, offsets, feature_tables=features, pooling=mode)
    stock = by_bags(tables, ids, offsets, features, mode)
    torch.testing.assert_close(ours, stock)
    grad = torch.randn_like(ours)
    of_ours, of_stock = (torch.autograd.grad(out, tables, grad) for out in (ours, stock))
    for a, b in zip(of_ours, of_stock, strict=True):
        assert a.is_sparse and a.is_coalesced()
        torch.testing.assert_close(a.to_dense(), b)


def test_weights_as_of_embedding_bags(device: torch.device) -> None:
    tables = random_tables([11, 5], 40, device, torch.float64)
    ids, offsets = random_bags(2, 7, 5, device)
    weights = torch.randn(len(ids), device=device, dtype=torch.float64, requires_grad=True)
    ours = embedding_aggregation(tables, ids, offsets, weights=weights, sparse=False)
    stock = by_bags(tables, ids, offsets, [0, 1], "sum", weights)
    torch.testing.assert_close(ours, stock)
    grad = torch.randn_like(ours)
    of_ours, of_stock = (torch.autograd.grad(out, (*tables, weights), grad) for out in (ours, stock))
    for a, b in zip(of_ours, of_stock, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("has_dense", [True, False])
@pytest.mark.parametrize("most", [2, 9])  # short bags, and those whose vectors are kept for the gradient
def test_dot_as_in_dlrm(device: torch.device, has_dense: bool, most: int) -> None:
    """Dense, then the products below the diagonal row by row, as facebookresearch/dlrm's interact_features has them."""
    tables = random_tables([9, 30, 5], 12, device, torch.float64)
    ids, offsets = random_bags(3, 4, most, device)
    dense = torch.randn(4, 12, device=device, dtype=torch.float64, requires_grad=True) if has_dense else None
    ours = embedding_aggregation(tables, ids, offsets, dense, cross="dot", sparse=False)
    vectors = by_bags(tables, ids, offsets, [0, 1, 2], "sum")
    if dense is not None:
        vectors = torch.cat([dense[:, None], vectors], 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    flat = [products[:, i, j] for i in range(vectors.shape[1]) for j in range(i)]
    stock = torch.cat([*([] if dense is None else [dense]), torch.stack(flat, 1)], 1)
    torch.testing.assert_close(ours, stock)
    leaves = (*tables, *([] if dense is None else [dense]))
    grad = torch.randn_like(ours)
    of_ours, of_stock = (torch.autograd.grad(out, leaves, grad) for out in (ours, stock))
    for a, b in zip(of_ours, of_stock, strict=True):
        torch.testing.assert_close(a, b)


def test_fm_is_the_sum_of_all_pairs(device: torch.device) -> None:
    tables = random_tables([9, 30, 5], 7, device, torch.float64)
    ids, offsets = random_bags(3, 4, 3, device)
    dense = torch.randn(4, 7, device=device, dtype=torch.float64)
    ours = embedding_aggregation(tables, ids, offsets, dense, cross="fm")
    vectors = torch.cat([dense[:, None], by_bags(tables, ids, offsets, [0, 1, 2], "sum")], 1)
    pairs = [vectors[:, i] * vectors[:, j] for i in range(4) for j in range(i)]
    torch.testing.assert_close(ours, torch.stack(pairs).sum(0))


@pytest.mark.parametrize("cross", ["dot", "fm"])
def test_vectors_too_wide_for_one_kernel(device: torch.device, cross: str) -> None:
    """They go through memory, to the stock cross: the same results."""
    tables = random_tables([3, 4], 6000, device, torch.float32)
    ids, offsets = random_bags(2, 2, 2, device)
    dense = torch.randn(2, 6000, device=device, requires_grad=True)
    leaves = (*tables, dense)
    wide = embedding_aggregation(tables, ids, offsets, dense, cross=cross, sparse=False)
    exact = embedding_aggregation([t.double() for t in tables], ids, offsets, dense.double(), cross=cross, sparse=False)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=1e-3)
    grad = torch.randn_like(wide)
    of_wide, of_exact = torch.autograd.grad(wide, leaves, grad), torch.autograd.grad(exact, leaves, grad.double())
    for a, b in zip(of_wide, of_exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cross", ["none", "dot", "fm"])
def test_half_tables_are_summed_in_float32(device: torch.device, dtype: torch.dtype, cross: str) -> None:
    """An ulp of the result is off at most, of long bags too, where sums in the half type would be off by more."""
    table = (torch.rand(500, 16, device=device) / 16).to(dtype)
    ids, offsets = torch.randint(500, (2, 300), device=device).flatten(), torch.tensor([0, 300, 600], device=device)
    ours = embedding_aggregation([table, table], ids, offsets, cross=cross)
    exact = embedding_aggregation([table.double()] * 2, ids, offsets, cross=cross)
    ulp = 2 * torch.finfo(dtype).eps  # the interpreter truncates to bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=ulp, atol=0.0)


@pytest.mark.parametrize("sparse", [True, False])
def test_finite_differences(device: torch.device, sparse: bool) -> None:
    """gradcheck in float64, of the values of sparse gradients too."""
    ids, offsets = random_bags(2, 2, 3, device)
    tables = random_tables([3, 2], 2, device, torch.float64)
    dense, weights = (torch.randn(n, dtype=torch.float64, device=device) for n in ((2, 2), (len(ids),)))

    def function(*leaves: Tensor) -> Tensor:
        # What comes after makes a dense gradient of a sparse one; the values are what is checked.
        given = [leaf + 0 if sparse else leaf for leaf in leaves]
        return embedding_aggregation(
            given[:2], ids, offsets, given[2], weights=given[3], pooling="mean", cross="dot", sparse=False
        )

    leaves = (*tables, dense.requires_grad_(), weights.requires_grad_())
    torch.autograd.gradcheck(function, leaves)
    out = embedding_aggregation(
        tables, ids, offsets, dense, weights=weights, pooling="mean", cross="dot", sparse=sparse
    )  # fmt: skip
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(function(*leaves), leaves, grad)
    for a, b in zip(torch.autograd.grad(out, leaves, grad), expected, strict=True):
        torch.testing.assert_close(a.to_dense(), b)


# ---------------------------------------------------------------------------------------------------------------------
# Empty bags, padding, bounds


@pytest.mark.parametrize("cross", ["none", "dot", "fm"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("lengths", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0), ()], ids=str)
def test_empty_bags(device: torch.device, lengths: tuple[int, ...], pooling: str, cross: str) -> None:
    """First, in the middle, last, all, and no samples: zeros, no NaN, and no gradient from them."""
    offsets = torch.tensor([0, *lengths, *lengths], device=device).cumsum(0)
    ids = torch.randint(0, 99, (int(offsets[-1]),), device=device)
    tables = random_tables([5, 3], 4, device, torch.float32)
    vectors = embedding_aggregation(tables, ids, offsets, pooling=pooling)
    for sample, length in enumerate(lengths):
        assert (vectors[sample] == 0).all() == (length == 0)
    out = embedding_aggregation(tables, ids, offsets, pooling=pooling, cross=cross)
    out.sum().backward()
    for feature, table in enumerate(tables):
        own = ids[feature * sum(lengths) :][: sum(lengths)] % len(table)
        assert table.grad.is_coalesced()
        assert table.grad._indices()[0].tolist() == sorted(set(own.tolist()))
        assert table.grad._values().isfinite().all()


def test_padding_is_never_read(device: torch.device) -> None:
    """A padding row of NaN reaches neither results nor gradients, and a mean does not count it."""
    table = torch.randn(6, 5, device=device, dtype=torch.float64)
    table[2] = torch.nan
    table.requires_grad_()
    ids, offsets = torch.tensor([2, 1, 2, 4, 2, 2, 0], device=device), torch.tensor([0, 3, 4, 6, 7], device=device)
    weights = torch.randn(7, device=device, dtype=torch.float64, requires_grad=True)
    for pooling in ("sum", "mean"):
        out = embedding_aggregation([table], ids, offsets, padding_index=2, hash="none", pooling=pooling)
        zero = torch.zeros(5, device=device, dtype=torch.float64)
        torch.testing.assert_close(out[:, 0], torch.stack([table[1], table[4], zero, table[0]]))
    out = embedding_aggregation([table], ids, offsets, padding_index=2, hash="none", weights=weights, pooling="mean")
    of_table, of_weights = torch.autograd.grad(out.sum(), (table, weights))
    assert of_table._indices()[0].tolist() == [0, 1, 4]
    assert of_weights[[0, 2, 4, 5]].eq(0).all() and of_weights.isfinite().all()


def test_padding_is_compared_before_hashing(device: torch.device) -> None:
    table = torch.randn(3, 2, device=device)
    out = embedding_aggregation([table], torch.tensor([-7, 2], device=device), torch.tensor([0, 1, 2], device=device),
                                padding_index=-7)  # fmt: skip
    assert torch.equal(out[:, 0], torch.stack([torch.zeros(2, device=device), table[2]]))


@pytest.mark.parametrize("wrong", [-1, 5, 6, INT64_MAX, INT64_MIN])
def test_out_of_range_zero(device: torch.device, wrong: int) -> None:
    """Counts for nothing, at the boundary too: above all it is not the next table's row."""
    tables = random_tables([5, 4], 3, device, torch.float32)
    ids = torch.tensor([wrong, 4, 0, 3], device=device)
    offsets = torch.tensor([0, 1, 2, 3, 4], device=device)
    out = embedding_aggregation(tables, ids, offsets, hash="none", out_of_range="zero", pooling="mean")
    assert out[0, 0].eq(0).all() and torch.equal(out[1, 0], tables[0][4])
    out.sum().backward()
    assert tables[0].grad._indices()[0].tolist() == [4]
    assert tables[1].grad._indices()[0].tolist() == [0, 3]


@pytest.mark.parametrize("wrong", [-1, 5, INT64_MAX])
def test_out_of_range_error(wrong: int) -> None:
    tables = random_tables([5, 40], 3, torch.device("cpu"), torch.float32)
    ids, offsets = torch.tensor([1, wrong, 3, 4]), torch.tensor([0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match=rf"ids has {wrong} at position 1, of feature 0; .* allowed: 0 to 4"):
        embedding_aggregation(tables, ids, offsets, hash="none")
    # What pads may be any number.
    embedding_aggregation(tables, ids, offsets, hash="none", padding_index=wrong)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 2, 4, 6], "offsets falls from 3 to 2 at position 2"),
        ([1, 2, 3, 4, 6], "offsets begins with 1"),
        ([0, 2, 3, 4, 7], "offsets ends with 7; it must end with 6"),
        ([0, 2, 3, 4, 5], "offsets ends with 5; it must end with 6"),
        ([0, 2, 4, 6], r"offsets has 4 elements; with 2 features it must have 2 \* B \+ 1"),
        ([], "offsets has 0 elements"),
    ],
)
def test_offsets_that_are_none(offsets: list[int], message: str) -> None:
    """Each an error before anything runs, as a ValueError that names it."""
    tables = random_tables([5, 4], 3, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=message):
        embedding_aggregation(tables, torch.arange(6), torch.tensor(offsets, dtype=torch.int64))


WRONG = {
    "offsets": {"offsets": torch.arange(4)},
    "dense": {"dense": torch.zeros(3, 3)},
    "weights": {"weights": torch.zeros(5)},
    "feature_tables": {"feature_tables": [0, 2]},
    "pooling": {"pooling": "max"},
    "cross": {"cross": "dots"},
    "hash": {"hash": "md5"},
    "out_of_range": {"out_of_range": "wrap"},
    r"tables\[1\]": {"tables": [torch.zeros(5, 3), torch.zeros(5, 4)]},
    "tables": {"tables": []},
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_the_shape_rules_too(name: str) -> None:
    """What shapes and options tell is refused alike in eager mode and on fake tensors."""
    given = {"tables": [torch.zeros(5, 3), torch.zeros(4, 3)], "ids": torch.arange(4), "offsets": torch.arange(5)}
    given |= WRONG[name]

    def call() -> None:
        embedding_aggregation(given.pop("tables"), given.pop("ids"), given.pop("offsets"), **given)

    mode = FakeTensorMode()
    fake = {
        key: mode.from_tensor(value)
        if isinstance(value, Tensor)
        else [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in value]
        if isinstance(value, list)
        else value
        for key, value in given.items()
    }
    with pytest.raises(ValueError, match=rf"embedding_aggregation: {name}\b|embedding_aggregation: {name}"):
        call()
    given = fake
    with mode, pytest.raises(ValueError, match=f"embedding_aggregation: {name}"):
        call()


def test_dtypes_that_differ() -> None:
    table, ids, offsets = torch.zeros(5, 3), torch.arange(4), torch.arange(5)
    for given, message in (
        (([table, table.double()], ids, offsets), r"tables\[1\] is torch.float64"),
        (([table], ids.double(), offsets), "ids is torch.float64"),
        (([table], ids, offsets, torch.zeros(4, 3).half()), "dense is torch.float16"),
    ):
        with pytest.raises(TypeError, match=message):
            embedding_aggregation(*given)


# ---------------------------------------------------------------------------------------------------------------------
# Compilers and large tables


def test_compile_leaves_sparse_gradients_out_of_the_graph() -> None:
    """Same results around a graph break; the whole graph, with dense gradients, is among the generic checks."""
    torch._dynamo.reset()
    tables = random_tables([9, 5], 3, torch.device("cpu"), torch.float64)
    ids, offsets = random_bags(2, 4, 3, torch.device("cpu"))
    dense = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def model(dense: Tensor) -> Tensor:
        return embedding_aggregation(tables, ids, offsets, dense.sin(), cross="dot").cos()

    expected = model(dense)
    expected.sum().backward()
    gradients = [t.grad for t in (*tables, dense)]
    for t in (*tables, dense):
        t.grad = None
    out = torch.compile(model, backend="aot_eager")(dense)
    out.sum().backward()
    torch.testing.assert_close(out, expected)
    for t, g in zip((*tables, dense), gradients, strict=True):
        assert t.grad.is_sparse == g.is_sparse
        torch.testing.assert_close(t.grad.to_dense(), g.to_dense())


@pytest.mark.gpu
def test_table_past_2_31_elements() -> None:
    """Rows whose offsets in elements pass 2^31, in look-up and gradient."""
    rows, width = 2**25 + 5, 64
    table = torch.zeros(rows, width, device="cuda", dtype=torch.float16)
    last = torch.randn(5, width, device="cuda").half()
    table[-5:] = last
    table.requires_grad_()
    ids = torch.arange(rows - 5, rows, device="cuda").flip(0)
    out = embedding_aggregation([table], ids, torch.arange(6, device="cuda"))
    assert torch.equal(out[:, 0], last.flip(0))
    grad = torch.randn_like(out)
    out.backward(grad)
    assert table.grad._indices()[0].tolist() == list(range(rows - 5, rows))
    assert torch.equal(table.grad._values(), grad[:, 0].flip(0))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["falls", "ends past the ids", "id = rows"])
def test_device_side_assertions(kind: str) -> None:
    """A process of its own, since an assertion on a GPU ends its CUDA context."""
    offsets = {"falls": [0, 2, 1, 3], "ends past the ids": [0, 1, 2, 9]}.get(kind, [0, 1, 2, 3])
    source = f"""
import torch, fusedops
table = torch.zeros(3, 4, device="cuda")
ids = torch.tensor([0, 3, 1], device="cuda")
fusedops.embedding_aggregation([table], ids, torch.tensor({offsets}, device="cuda"), hash="none", padding_index={
        -1 if kind == "id = rows" else 3
    })
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert "device-side assert" in result.stderr


@pytest.mark.gpu
def test_graph_capture() -> None:
    """Look-up and cross in a CUDA graph: replays follow what tables, ids and dense hold; so does a dense gradient."""
    tables = [torch.randn(50, 16, device="cuda", requires_grad=True) for _ in range(3)]
    ids, offsets = torch.randint(0, 2**40, (12,), device="cuda"), torch.arange(13, device="cuda")
    dense = torch.randn(4, 16, device="cuda")

    def step() -> tuple[Tensor, ...]:
        out = embedding_aggregation(tables, ids, offsets, dense, cross="dot", sparse=False)
        return out, *torch.autograd.grad(out.square().sum(), tables)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    ids.copy_(torch.randint(0, 2**40, (12,), device="cuda"))
    dense.normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_bags_layout_is_feature_major() -> None:
    """Bag f * B + b belongs to sample b: as of torchrec's KeyedJaggedTensor with keys [f0, f1]."""
    lengths = {"f0": [1, 2, 0], "f1": [0, 1, 3]}
    values = {"f0": [0, 1, 2], "f1": [3, 4, 5, 6]}
    offsets = torch.tensor([0, *lengths["f0"], *lengths["f1"]]).cumsum(0)
    table = torch.eye(7, dtype=torch.float64)
    out = embedding_aggregation([table], torch.tensor(values["f0"] + values["f1"]), offsets, feature_tables=[0, 0])
    for feature, key in enumerate(lengths):
        ends = torch.tensor([0, *lengths[key]]).cumsum(0).tolist()
        for sample, (begin, end) in enumerate(pairwise(ends)):
            assert out[sample, feature].nonzero().flatten().tolist() == values[key][begin:end]
