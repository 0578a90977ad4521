"""Triton kernels of embedding_aggregation: bags of one feature a program, or, with a cross, all bags of a sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.embedding_tables import (
    ADDRESS,
    ASSERTING,
    FIELDS,
    HASHES,
    RECIPROCAL,
    ROWS,
    STRIDE,
    TYPES,
    bag_range,
    block_of_width,
    describe,
    places_of,
    pooled,
    pooled_by_tiles,
    to_computing,
    with_unit_stride,
)
from fusedops.kernels.launching import ceil_div, launch, next_power_of_2
from fusedops.operators.embedding_aggregation import empty_outputs
from fusedops.operators.embedding_backward import fused_cross
from fusedops.operators.embedding_bags import batch_size, check_values
from fusedops.operators.embedding_cross import crossed
from fusedops.operators.embedding_pooling import computing_dtype

CROSSES = {"none": 0, "dot": 1, "fm": 2}
DOT, FM = (tl.constexpr(CROSSES[name]) for name in ("dot", "fm"))

LANES = 32
"""Bags that a program pools at most."""
SHORT_ELEMENTS, SHORT_ELEMENTS_A_WARP = 2048, 2048
"""Elements of a table that a program reads at once, and of those that a warp does, of bags of an id."""
LONG = 2
"""Ids a bag, of all bags, above which several of them are looked up at once."""
LONG_IDS, LONG_ELEMENTS, LONG_ELEMENTS_A_WARP = 8, 4096, 4096
"""Ids of a bag that are looked up at once, and elements then. A warp wants 32 ids: of fewer every lane loads and hashes
all, which Triton takes to be cheaper than an exchange between lanes."""
CROSS_COLUMNS = 32
"""Columns of a sample's vectors that are in registers at once, and elements of a tile that a warp has."""
CROSS_ELEMENTS_A_WARP = 2048


@triton.jit
def pool_kernel(
    described,
    ids,
    offsets,
    weights,
    dense,
    out,
    batch,
    features,
    ids_count,
    padding,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BAGS: tl.constexpr,
    IDS: tl.constexpr,
    DTYPE: tl.constexpr,
    HASH: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    ERROR: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Vectors [B, n, D], those of BAGS samples and one feature, or the dense ones behind the features' programs."""
    blocks = tl.cdiv(batch, BAGS)
    feature = tl.program_id(0) // blocks
    sample = (tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS)
    exists = sample < batch
    columns = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (columns[None, :] < D)
    target = out + (sample.to(tl.int64)[:, None] * (features + HAS_DENSE)) * D + columns[None, :]
    if ALIGNED:
        target = tl.multiple_of(target, [16, 16])
    if feature < features:
        fields = described + feature * FIELDS
        bag = feature.to(tl.int64) * batch + sample
        start, end = bag_range(offsets, bag, exists, tl.cast(features, tl.int64) * batch, ids_count, True)
        table = tl.load(fields + ADDRESS).to(tl.pointer_type(DTYPE))
        rows = tl.load(fields + ROWS)
        reciprocal = tl.load(fields + RECIPROCAL)
        stride = tl.load(fields + STRIDE)
        if IDS == 1:
            vectors = pooled(
                ids, weights, table, rows, reciprocal, stride, start, end, padding, columns, DTYPE, D, HASH,
                HAS_PADDING, ERROR, HAS_WEIGHTS, MEAN, ALIGNED,
            )  # fmt: skip
        else:
            vectors = pooled_by_tiles(
                ids, weights, table, rows, reciprocal, stride, start, end, padding, columns, DTYPE, D, IDS, HASH,
                HAS_PADDING, ERROR, HAS_WEIGHTS, MEAN, ALIGNED,
            )  # fmt: skip
        tl.store(target + (feature + HAS_DENSE) * D, vectors.to(out.dtype.element_ty), mask=mask)
    elif HAS_DENSE:
        given = tl.load(dense + sample.to(tl.int64)[:, None] * D + columns[None, :], mask=mask)
        tl.store(target, given.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sample_bags(
    described, offsets, sample, batch, features, ids_count,
    BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, HAS_DENSE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Of each vector of a sample, [BLOCK_N]: where its bag begins and ends, its table, and what belongs to that."""
    feature = tl.arange(0, BLOCK_N) - HAS_DENSE
    exists = (feature >= 0) & (feature < features)
    fields = described + feature * FIELDS
    bag = feature.to(tl.int64) * batch + sample
    start, end = bag_range(offsets, bag, exists, tl.cast(features, tl.int64) * batch, ids_count, CHECK)
    table = tl.load(fields + ADDRESS, mask=exists, other=0).to(tl.pointer_type(DTYPE))
    rows = tl.load(fields + ROWS, mask=exists, other=1)
    reciprocal = tl.load(fields + RECIPROCAL, mask=exists, other=0)
    return start, end, table, rows, reciprocal, tl.load(fields + STRIDE, mask=exists, other=0)


@triton.jit
def sample_vectors(
    ids, weights, dense, start, end, table, rows, reciprocal, stride, sample, padding, columns,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, HASH: tl.constexpr, HAS_PADDING: tl.constexpr,
    ERROR: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_DENSE: tl.constexpr, MEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """These columns of all vectors of a sample, [BLOCK_N, columns]: the dense one, those of its bags, zeros."""
    vectors = pooled(
        ids, weights, table[:, None], rows, reciprocal, stride, start, end, padding, columns, DTYPE, D, HASH,
        HAS_PADDING, ERROR, HAS_WEIGHTS, MEAN, ALIGNED,
    )  # fmt: skip
    if HAS_DENSE:
        first = to_computing(tl.load(dense + sample * D + columns, mask=columns < D, other=0.0))
        vectors = tl.where((tl.arange(0, BLOCK_N) == 0)[:, None], first[None, :], vectors)
    return vectors


@triton.jit
def cross_kernel(
    described,
    ids,
    offsets,
    weights,
    dense,
    out,
    kept,
    batch,
    features,
    ids_count,
    padding,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    CROSS: tl.constexpr,
    HASH: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    ERROR: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    MEAN: tl.constexpr,
    KEEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One sample: its vectors, BLOCK_K columns at a time, and their cross while they are in registers."""
    sample = tl.program_id(0).to(tl.int64)
    start, end, table, rows, reciprocal, stride = sample_bags(
        described, offsets, sample, batch, features, ids_count, BLOCK_N, DTYPE, HAS_DENSE, True
    )
    n = features + HAS_DENSE
    i = tl.arange(0, BLOCK_N)[:, None]
    base = out + sample * (D if CROSS == FM else D * HAS_DENSE + n * (n - 1) // 2)
    products = tl.zeros((BLOCK_N, BLOCK_N), tl.float64 if tl.float64 == DTYPE else tl.float32)
    for k in range(0, BLOCK_D, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        vectors = sample_vectors(
            ids, weights, dense, start, end, table, rows, reciprocal, stride, sample, padding, columns, D, BLOCK_N,
            DTYPE, HASH, HAS_PADDING, ERROR, HAS_WEIGHTS, HAS_DENSE, MEAN, ALIGNED,
        )  # fmt: skip
        if KEEP:
            target = kept + (sample * n + i) * D + columns[None, :]
            tl.store(target, vectors, mask=(i < n) & (columns[None, :] < D))
        if CROSS == FM:
            # Not half of (sum v)^2 - sum v^2: contracted to multiply-adds, that leaves a rounding error of a single
            # vector.
            term = 0.5 * tl.sum(vectors * (tl.sum(vectors, 0)[None, :] - vectors), 0)
            tl.store(base + columns, term.to(out.dtype.element_ty), mask=columns < D)
        else:
            products = tl.dot(vectors, tl.trans(vectors), products, input_precision=PRECISION, out_dtype=products.dtype)
            if HAS_DENSE:
                first = tl.load(dense + sample * D + columns, mask=columns < D)
                tl.store(base + columns, first, mask=columns < D)
    if CROSS == DOT:
        j = tl.arange(0, BLOCK_N)[None, :]
        target = base + D * HAS_DENSE + i * (i - 1) // 2 + j
        tl.store(target, products.to(out.dtype.element_ty), mask=(j < i) & (i < n))


def precision(dtype: torch.dtype) -> str:
    """How products are taken: three of TF32 make one that is right to fp32."""
    return "ieee" if dtype == torch.float64 else "tf32x3"


class Gather(NamedTuple):
    """What every kernel that looks up begins with; `tables` are those its addresses point to, which it keeps alive."""

    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    tables: list[Tensor]


def gather(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    out_of_range: str,
) -> Gather:
    tables, places = with_unit_stride(tables)
    dense, weights = (None if t is None else t.contiguous() for t in (dense, weights))
    table_rows = [table.shape[0] for table in tables]
    width, itemsize, features = tables[0].shape[1], tables[0].itemsize, len(feature_tables)
    described = describe(places, table_rows, feature_tables, ids.device)
    tensors = (described, ids.contiguous(), offsets.contiguous(), weights, dense)
    numbers = (batch_size(offsets, features), features, ids.numel(), padding_index or 0)
    constants = {
        "D": width,
        "BLOCK_D": block_of_width(width),
        "DTYPE": TYPES[tables[0].dtype],
        "HASH": HASHES[hash],
        "HAS_PADDING": padding_index is not None,
        "ERROR": out_of_range == "error",
        "HAS_WEIGHTS": weights is not None,
        "HAS_DENSE": int(dense is not None),
        "MEAN": pooling == "mean",
        "ALIGNED": (
            width * itemsize % 16 == 0
            and places.aligned(itemsize)
            and (dense is None or places_of([dense]).aligned(itemsize))
        ),
    }
    return Gather(tensors, numbers, constants, tables)


def launch_pool(out: Tensor, given: Gather) -> None:
    """Vectors [B, n, D] into `out`, which is contiguous."""
    constants = given.constants
    batch, features, ids_count, _ = given.numbers
    if ids_count > LONG * batch * features:
        at_once, elements, a_warp = LONG_IDS, LONG_ELEMENTS, LONG_ELEMENTS_A_WARP
    else:
        at_once, elements, a_warp = 1, SHORT_ELEMENTS, SHORT_ELEMENTS_A_WARP
    bags = max(1, min(LANES, elements // (constants["BLOCK_D"] * at_once)))
    programs = ceil_div(batch, bags) * (features + constants["HAS_DENSE"])
    warps = max(1, min(8, constants["BLOCK_D"] * bags * at_once // a_warp))
    if programs:
        launch(
            pool_kernel,
            programs,
            (*given.tensors, out),
            given.numbers,
            warps,
            BAGS=bags,
            IDS=at_once,
            **constants,
            **ASSERTING,
        )


def vectors_block(features: int, has_dense: bool) -> int:
    """The power of two that a sample's vectors are taken as."""
    return max(16, next_power_of_2(features + has_dense))


def cross_layout(block_n: int, block_d: int) -> tuple[int, int]:
    """Columns that a program with all vectors of a sample takes at once, and its warps."""
    block_k = min(block_d, CROSS_COLUMNS)
    return block_k, max(1, min(8, block_n * max(block_n, block_k) // CROSS_ELEMENTS_A_WARP))


def embedding_aggregation(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    out_of_range: str,
    cross: str,
    sparse: bool,
    save_vectors: bool,
) -> tuple[Tensor, Tensor]:
    if ids.device.type == "cpu":  # in the interpreter, where assertions on a device do nothing
        rows = [table.shape[0] for table in tables]
        check_values("embedding_aggregation", ids, offsets, rows, feature_tables, padding_index, hash, out_of_range)
    out, kept = empty_outputs(tables, offsets, dense, feature_tables, cross, save_vectors)
    given = gather(tables, ids, offsets, dense, weights, feature_tables, pooling, padding_index, hash, out_of_range)
    batch, width, has_dense = given.numbers[0], given.constants["D"], dense is not None
    if cross == "none":
        launch_pool(out, given)
        if save_vectors:
            kept.copy_(out)
    elif not fused_cross(len(feature_tables) + has_dense, width):
        shape = (batch, len(feature_tables) + has_dense, width)
        vectors = kept if save_vectors else out.new_empty(shape, dtype=computing_dtype(out.dtype))
        launch_pool(vectors, given)
        out.copy_(crossed(vectors, has_dense, cross))
    elif batch:
        block_n = vectors_block(len(feature_tables), has_dense)
        block_k, warps = cross_layout(block_n, given.constants["BLOCK_D"])
        launch(
            cross_kernel,
            batch,
            (*given.tensors, out, kept),
            given.numbers,
            warps,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            CROSS=CROSSES[cross],
            KEEP=save_vectors,
            PRECISION=precision(out.dtype),
            **given.constants,
            **ASSERTING,
        )
    return out, kept
