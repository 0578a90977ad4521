"""Triton kernels of embedding_aggregation_backward.

The ids are sorted by row, so that a row's gradient is the sum of a run of bags' gradients. Short runs are summed by one
kernel, several of them a program. A run of more than CHUNK ids is cut where the sorted ids are cut into chunks: one
kernel sums the parts that lie in each chunk, another one the parts. Each sum is taken in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.embedding_aggregation import (
    CROSSES,
    FM,
    Gather,
    cross_layout,
    gather,
    launch_pool,
    precision,
    sample_bags,
    sample_vectors,
    vectors_block,
)
from fusedops.kernels.embedding_tables import (
    ADDRESS,
    FIELDS,
    RECIPROCAL,
    ROWS,
    STRIDE,
    bag_range,
    block_of_width,
    load_rows,
    look_up,
    to_computing,
)
from fusedops.kernels.launching import ceil_div, launch
from fusedops.operators.embedding_backward import empty_outputs, fused_cross, vector_width
from fusedops.operators.embedding_bags import batch_size
from fusedops.operators.embedding_cross import crossed_gradient
from fusedops.operators.embedding_pooling import computing_dtype

CHUNK = 64
TILE = 16  # ids of a long run that are read at once
SEARCHES = 64  # chunks that a program finds the runs of
RUN_ELEMENTS = 1024  # elements that a program of short runs sums
RUN_ELEMENTS_A_WARP = 2048
MOST_RUNS = 32


# ---------------------------------------------------------------------------------------------------------------------
# The cross


@triton.jit
def cross_backward_kernel(
    grad,
    described,
    ids,
    offsets,
    weights,
    dense,
    kept,
    out,
    grad_dense,
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
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One sample: the gradients of its pooled vectors, [F, D], and of the dense one. Vectors: kept, or looked up."""
    sample = tl.program_id(0).to(tl.int64)
    n = features + HAS_DENSE
    i = tl.arange(0, BLOCK_N)[:, None]
    feature = i - HAS_DENSE
    computing: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    if not KEPT:
        start, end, table, rows, reciprocal, stride = sample_bags(
            described, offsets, sample, batch, features, ids_count, BLOCK_N, DTYPE, HAS_DENSE, False
        )
    if CROSS == FM:
        base = grad + sample * D
    else:
        base = grad + sample * (D * HAS_DENSE + n * (n - 1) // 2)
        j = tl.arange(0, BLOCK_N)[None, :]
        high = tl.maximum(i, j)
        low = tl.minimum(i, j)
        pair = base + D * HAS_DENSE + high * (high - 1) // 2 + low
        factors = to_computing(tl.load(pair, mask=(low < high) & (high < n), other=0.0))
    for k in range(0, BLOCK_D, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        inside = columns[None, :] < D
        if KEPT:
            source = kept + (sample * n + i) * D + columns[None, :]
            vectors = to_computing(tl.load(source, mask=(i < n) & inside, other=0.0))
        else:
            vectors = sample_vectors(
                ids, weights, dense, start, end, table, rows, reciprocal, stride, sample, padding, columns, D, BLOCK_N,
                DTYPE, HASH, HAS_PADDING, ERROR, HAS_WEIGHTS, HAS_DENSE, MEAN, ALIGNED,
            )  # fmt: skip
        if CROSS == FM:
            term = to_computing(tl.load(base + columns, mask=columns < D, other=0.0))
            gradient = term[None, :] * (tl.sum(vectors, 0)[None, :] - vectors)
        else:
            gradient = tl.dot(factors, vectors, input_precision=PRECISION, out_dtype=computing)
            if HAS_DENSE:
                direct = to_computing(tl.load(base + columns, mask=columns < D, other=0.0))
                gradient += tl.where(i == 0, direct[None, :], 0.0)
        target = out + (sample * features + feature) * D + columns[None, :]
        tl.store(target, gradient.to(out.dtype.element_ty), mask=inside & (feature >= 0) & (feature < features))
        if HAS_DENSE:
            first = grad_dense + sample * D + columns[None, :] + tl.zeros((BLOCK_N, 1), tl.int64)
            tl.store(first, gradient.to(grad_dense.dtype.element_ty), mask=inside & (feature == -1))


# ---------------------------------------------------------------------------------------------------------------------
# Sums of runs


@triton.jit
def weighted_gradients(
    source, place, mask, order, bags, counts, weights, batch, vectors, skip, columns, D: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, MEAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """What the sorted ids at these places give to their rows: the gradients of their bags, [places, BLOCK_D]."""
    bag = tl.load(bags + place, mask=mask, other=0)
    vector = (bag % batch) * vectors + bag // batch + skip
    value = load_rows(source, vector * D, mask, columns, D, ALIGNED)
    if MEAN:
        value = value / tl.load(counts + bag, mask=mask, other=1).to(value.dtype)[:, None]
    if HAS_WEIGHTS:
        position = tl.load(order + place, mask=mask, other=0)
        value = value * to_computing(tl.load(weights + position, mask=mask, other=0.0))[:, None]
    return value


@triton.jit
def run_kernel(
    segments, order, bags, counts, weights, source, out, runs, batch, vectors, skip,
    D: tl.constexpr, BLOCK_D: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, MEAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The sums of RUNS runs, but for those of more than CHUNK ids."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    exists = run < runs
    columns = tl.arange(0, BLOCK_D)
    start = tl.load(segments + run, mask=exists, other=0)
    length = tl.load(segments + run + 1, mask=exists, other=0) - start
    short = exists & (length <= CHUNK)
    length = tl.where(short, length, 0)
    total = tl.zeros((RUNS, BLOCK_D), DTYPE)
    for i in range(0, tl.max(length, 0)):
        total += weighted_gradients(
            source, start + i, i < length, order, bags, counts, weights, batch, vectors, skip, columns, D, HAS_WEIGHTS,
            MEAN, ALIGNED,
        )  # fmt: skip
    target = out + run[:, None] * D + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=short[:, None] & (columns[None, :] < D))


@triton.jit
def chunk_run_kernel(segments, chunk_runs, chunks, runs, CHUNK: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The run that the first id of each chunk belongs to; behind the last run `runs`, the one that there is not."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = chunk < chunks
    begin = chunk.to(tl.int64) * CHUNK
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + runs + 1
    for _ in range(STEPS):  # the last of segments[: runs + 1] that is not behind the chunk's begin
        middle = (low + high) // 2
        below = tl.load(segments + middle, mask=mask & (middle <= runs), other=2**62) <= begin
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    tl.store(chunk_runs + chunk, low, mask=mask)


@triton.jit
def long_run_at(segments, chunk_runs, chunk, chunks, runs, CHUNK: tl.constexpr):
    """Place, begin and end of the long run that the first id of a chunk belongs to; empty where there is none."""
    run = tl.load(chunk_runs + chunk, mask=chunk < chunks, other=runs)
    start = tl.load(segments + run, mask=run < runs, other=0)
    end = tl.load(segments + run + 1, mask=run < runs, other=0)
    is_long = end - start > CHUNK
    return run, tl.where(is_long, start, 0), tl.where(is_long, end, 0)


@triton.jit
def part_kernel(
    segments, order, bags, counts, weights, source, chunk_runs, parts, chunks, runs, batch, vectors, skip,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, MEAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The sums of the parts of long runs in a chunk: of the one at its begin, and of one that begins further in."""
    chunk = tl.program_id(0).to(tl.int64) // 2
    later = tl.program_id(0) % 2
    begin = chunk * CHUNK
    _, start, end = long_run_at(segments, chunk_runs, chunk + later, chunks, runs, CHUNK)
    if later:  # the run of the next chunk's first id
        end = tl.where(start > begin, end, 0)
    start = tl.maximum(start, begin)
    end = tl.minimum(end, begin + CHUNK)
    if start < end:
        columns = tl.arange(0, BLOCK_D)
        total = tl.zeros((TILE, BLOCK_D), DTYPE)
        for i in range(0, tl.cdiv(end - start, TILE)):
            place = start + i * TILE + tl.arange(0, TILE)
            total += weighted_gradients(
                source, place, place < end, order, bags, counts, weights, batch, vectors, skip, columns, D, HAS_WEIGHTS,
                MEAN, ALIGNED,
            )  # fmt: skip
        tl.store(parts + (2 * chunk + later) * D + columns, tl.sum(total, 0), mask=columns < D)


@triton.jit
def long_run_kernel(
    segments, chunk_runs, parts, out, chunks, runs,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum of the parts of the long run that begins in a chunk, if one does."""
    chunk = tl.program_id(0).to(tl.int64)
    begin = chunk * CHUNK
    run, start, end = long_run_at(segments, chunk_runs, chunk, chunks, runs, CHUNK)
    inside = 0
    if (start != begin) | (end == 0):
        run, start, end = long_run_at(segments, chunk_runs, chunk + 1, chunks, runs, CHUNK)
        inside = 1
    if (end > 0) & (start >= begin + inside) & (start < begin + CHUNK):
        columns = tl.arange(0, BLOCK_D)
        mask = columns < D
        first = tl.load(parts + (2 * chunk + inside) * D + columns, mask=mask, other=0.0)
        others = tl.cdiv(end, CHUNK) - (chunk + 1)
        total = tl.zeros((TILE, BLOCK_D), first.dtype)
        for i in range(0, tl.cdiv(others, TILE)):
            other = i * TILE + tl.arange(0, TILE)
            part = parts + (2 * (chunk + 1 + other)[:, None]) * D + columns[None, :]
            total += tl.load(part, mask=(other < others)[:, None] & mask[None, :], other=0.0)
        sums = first + tl.sum(total, 0)
        tl.store(out + run * D + columns, sums.to(out.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@triton.jit
def weight_kernel(
    described,
    ids,
    offsets,
    counts,
    source,
    out,
    batch,
    features,
    ids_count,
    padding,
    skip,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BAGS: tl.constexpr,
    DTYPE: tl.constexpr,
    HASH: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The gradient of each id's weight: its row times the gradient of its bag."""
    blocks = tl.cdiv(batch, BAGS)
    feature = tl.program_id(0) // blocks
    sample = ((tl.program_id(0) % blocks) * BAGS + tl.arange(0, BAGS)).to(tl.int64)
    exists = sample < batch
    columns = tl.arange(0, BLOCK_D)
    fields = described + feature * FIELDS
    table = tl.load(fields + ADDRESS).to(tl.pointer_type(DTYPE))
    rows = tl.load(fields + ROWS)
    reciprocal = tl.load(fields + RECIPROCAL)
    stride = tl.load(fields + STRIDE)
    bag = feature.to(tl.int64) * batch + sample
    start, end = bag_range(offsets, bag, exists, tl.cast(features, tl.int64) * batch, ids_count, False)
    vector = sample * (features + skip) + feature + skip
    gradient = load_rows(source, vector * D, exists, columns, D, False)
    if MEAN:
        gradient = gradient / tl.maximum(tl.load(counts + bag, mask=exists, other=1), 1).to(gradient.dtype)[:, None]
    length = end - start
    for i in range(0, tl.max(length, 0)):
        row, counted = look_up(ids, start + i, i < length, padding, rows, reciprocal, HASH, HAS_PADDING, False)
        value = load_rows(table, row * stride, counted, columns, D, ALIGNED)
        products = tl.sum(value * gradient, 1)
        tl.store(out + start + i, products.to(out.dtype.element_ty), mask=i < length)


# ---------------------------------------------------------------------------------------------------------------------


def embedding_aggregation_backward(
    grad: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None,
    weights: Tensor | None,
    vectors: Tensor | None,
    order: Tensor | None,
    bags: Tensor | None,
    segments: Tensor | None,
    counts: Tensor | None,
    count: int,
    table_rows: list[int],
    feature_tables: list[int],
    pooling: str,
    padding_index: int | None,
    hash: str,
    cross: str,
    has_dense: bool,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = empty_outputs(
        grad, tables, ids, offsets, vectors, count, feature_tables, cross, has_dense, needs_weights
    )  # fmt: skip
    row_grads, grad_dense, grad_weights = outputs
    features, batch = len(feature_tables), batch_size(offsets, len(feature_tables))
    if not batch:
        return row_grads.zero_(), grad_dense, grad_weights
    width = vector_width(grad, tables, vectors, features + has_dense, has_dense, cross)
    given = None
    if needs_weights or (cross != "none" and vectors is None):
        given = gather(
            tables, ids, offsets, dense if cross != "none" else None, weights, feature_tables, pooling, padding_index,
            hash, "zero",
        )  # fmt: skip
    # The gradients of bags: [B, skip + F, D], those of features behind `skip` others.
    source, skip = grad.contiguous(), int(has_dense)
    if cross == "none":
        if has_dense:
            grad_dense.copy_(source[:, 0])
    elif fused_cross(features + has_dense, width):
        source, skip = _through_cross(source, given, vectors, grad_dense, batch, features, width, cross, has_dense), 0
    else:
        if vectors is None:
            assert given is not None
            shape = (batch, features + has_dense, width)
            vectors = grad.new_empty(shape, dtype=computing_dtype(grad.dtype))
            launch_pool(vectors, given)
        source = crossed_gradient(source.to(vectors.dtype), vectors, has_dense, cross).contiguous()
        if has_dense:
            grad_dense.copy_(source[:, 0])
    if count:
        _sum_runs(source, order, bags, segments, counts, weights, row_grads, batch, features + skip, skip, pooling)
    if needs_weights:
        assert given is not None
        described, ids, offsets, *_ = given.tensors
        block_d = block_of_width(width)
        bags_a_program = max(1, min(32, 1024 // block_d))
        kept = ("D", "BLOCK_D", "DTYPE", "HASH", "HAS_PADDING", "MEAN", "ALIGNED")
        launch(
            weight_kernel,
            ceil_div(batch, bags_a_program) * features,
            (described, ids, offsets, counts, source, grad_weights),
            (*given.numbers, skip),
            max(1, block_d * bags_a_program // 2048),
            BAGS=bags_a_program,
            **{name: given.constants[name] for name in kept},
        )
    return outputs


def _through_cross(
    grad: Tensor,
    given: Gather | None,
    vectors: Tensor | None,
    grad_dense: Tensor,
    batch: int,
    features: int,
    width: int,
    cross: str,
    has_dense: bool,
) -> Tensor:
    """The gradients of the pooled vectors, [B, F, D] in the dtype of sums; writes that of the dense one."""
    out = grad.new_empty((batch, features, width), dtype=computing_dtype(grad.dtype))
    block_n = vectors_block(features, has_dense)
    if vectors is None:
        assert given is not None
        tensors, numbers, constants = given.tensors, given.numbers, given.constants
    else:  # nothing is looked up
        tensors, numbers = (None,) * 5, (batch, features, 0, 0)
        names = ("DTYPE", "HASH", "HAS_PADDING", "ERROR", "HAS_WEIGHTS", "MEAN", "ALIGNED")
        constants = {"D": width, "BLOCK_D": block_of_width(width), "HAS_DENSE": int(has_dense), **dict.fromkeys(names)}
        vectors = vectors.contiguous()
    block_k, warps = cross_layout(block_n, constants["BLOCK_D"])
    launch(
        cross_backward_kernel,
        batch,
        (grad, *tensors, vectors, out, grad_dense),
        numbers,
        warps,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        CROSS=CROSSES[cross],
        KEPT=vectors is not None,
        PRECISION=precision(grad.dtype),
        **constants,
    )
    return out


def _sum_runs(
    source: Tensor,
    order: Tensor,
    bags: Tensor,
    segments: Tensor,
    counts: Tensor,
    weights: Tensor | None,
    out: Tensor,
    batch: int,
    vectors: int,
    skip: int,
    pooling: str,
) -> None:
    """out[k]: the sum over run k. source: [B, vectors, D], a bag's gradient behind `skip` others of its sample."""
    runs, width = out.shape
    n, block_d = order.numel(), block_of_width(width)
    ids = tuple(t.contiguous() for t in (segments, order, bags, counts))
    tensors = (*ids, None if weights is None else weights.contiguous(), source)
    dtype = tl.float64 if source.dtype == torch.float64 else tl.float32
    constants = {
        "D": width,
        "BLOCK_D": block_d,
        "CHUNK": CHUNK,
        "HAS_WEIGHTS": weights is not None,
        "MEAN": pooling == "mean",
        "ALIGNED": source.data_ptr() % 16 == 0 and width * source.itemsize % 16 == 0,
    }
    a_program = max(1, min(MOST_RUNS, RUN_ELEMENTS // block_d))
    launch(
        run_kernel,
        ceil_div(runs, a_program),
        (*tensors, out),
        (runs, batch, vectors, skip),
        max(1, block_d * a_program // RUN_ELEMENTS_A_WARP),
        RUNS=a_program,
        DTYPE=dtype,
        **constants,
    )
    if n <= CHUNK:
        return
    chunks = ceil_div(n, CHUNK)
    chunk_runs = order.new_empty(chunks)
    launch(
        chunk_run_kernel,
        ceil_div(chunks, SEARCHES),
        (ids[0], chunk_runs),
        (chunks, runs),
        SEARCHES // 32,
        CHUNK=CHUNK,
        STEPS=(runs + 1).bit_length(),
        BLOCK=SEARCHES,
    )
    parts = source.new_empty((2 * chunks, width), dtype=computing_dtype(source.dtype))
    tile = max(1, min(TILE, 4096 // block_d))
    warps = max(1, block_d * tile // 1024)
    launch(
        part_kernel,
        2 * chunks,
        (*tensors, chunk_runs, parts),
        (chunks, runs, batch, vectors, skip),
        min(warps, 8),
        TILE=tile,
        DTYPE=dtype,
        **constants,
    )
    launch(
        long_run_kernel,
        chunks,
        (ids[0], chunk_runs, parts, out),
        (chunks, runs),
        min(warps, 8),
        D=width,
        BLOCK_D=block_d,
        CHUNK=CHUNK,
        TILE=tile,
    )
