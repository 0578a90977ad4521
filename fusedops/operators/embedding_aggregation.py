"""embedding_aggregation: raw ids of all features -> rows of tables -> pooled vectors -> cross of features, in one pass.

Contract, which later versions keep:

    fusedops.embedding_aggregation(tables, ids, offsets, dense, feature_tables=..., pooling=..., cross=...) -> features

One Parameter a table; `sparse` chooses what their gradients are. An optimizer, ours (`fusedops.optim`) or a stock one,
then updates the rows touched: a sparse gradient arrives coalesced in `.grad`, each row once and in ascending order.
Sums are taken in fp32 (fp64 of fp64 tables) in an order that the ids fix, without atomic additions: every result is
bitwise repeatable, whatever `torch.use_deterministic_algorithms` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.operators.embedding_backward import fused_cross
from fusedops.operators.embedding_bags import batch_size, check_layout, check_values, locate
from fusedops.operators.embedding_cross import CROSSES, crossed, crossed_shape
from fusedops.operators.embedding_gradient import backward, setup
from fusedops.operators.embedding_pooling import (
    POOLINGS,
    check_tensors,
    computing_dtype,
    looked_up_stock,
    pooled_cpu,
    pooled_stock,
    vectors_of,
    widest_dtype,
)
from fusedops.operators.embedding_rows import random_bags
from fusedops.registration import Cost, Kernel, Sample, looped_vmap, register


def embedding_aggregation(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dense: Tensor | None = None,
    *,
    feature_tables: Sequence[int] | None = None,
    pooling: str = "sum",
    weights: Tensor | None = None,
    padding_index: int | None = None,
    hash: str = "modulo",
    out_of_range: str = "error",
    cross: str = "none",
    sparse: bool = True,
) -> Tensor:
    """Look up, pool and cross the ids of F features of B samples.

    tables: T of them, [rows, D], which may differ in rows (1 to 2^31 - 1 each); of one device and dtype, float16,
    bfloat16, float32 or float64. ids: [N], int64 or int32, any values; offsets: [F * B + 1]: those of a keyed jagged
    tensor (torchrec's KeyedJaggedTensor.values() and .offsets()); bag f * B + b, of feature f in sample b, is
    ids[offsets[f * B + b] : offsets[f * B + b + 1]]. dense: [B, D], a vector that takes part in the cross, of the
    tables' dtype. feature_tables: the table of each feature, several may share one; default: feature f has table f.

    hash, from an id to a row of a table of so many rows:
        modulo  id mod rows, never negative (floor modulo).
        mix32   (m32(low half of id ^ high half * 0x9E3779B1) * rows) >> 32, with MurmurHash3's 32-bit finaliser m32.
        mix64   (m64(id) * rows) >> 64, with its 64-bit finaliser.
        none    the id. Where it is no row, negative or too large: with out_of_range "error" a ValueError on a CPU and a
                device-side assertion on a GPU (as stock PyTorch's), with "zero" the id does not count.

    pooling: "sum" or "mean" of a bag's rows, each times its weight if weights, [N], are given; a mean divides by how
    many ids count, not by the weights. Ids equal to padding_index, compared before hashing, do not count: no row of
    theirs is read. A bag where none counts is zeros.

    cross, of the n vectors of a sample, which are dense (first, if given) and those pooled, in the order of features:
        none  the vectors, [B, n, D].
        dot   dense, then the products of vectors i and j for i = 1, 2, ... and each j < i (Naumov et al. 2019, DLRM):
              [B, D + n (n - 1) / 2], or without dense [B, n (n - 1) / 2].
        fm    [B, D], half of (sum of vectors)^2 - sum of vectors^2: its sum over D is the second-order term of a
              factorisation machine (Rendle 2010).

    Returns a contiguous tensor of the tables' dtype; under autocast, of the widest dtype among the floating tensors.

    Gradients: of tables, dense and weights; for those of a cross the vectors are kept, [B, n, D]. sparse: those of the
    tables are coalesced sparse COO tensors, which hold each row touched once; False: dense. The host must know how many
    rows those are: on a GPU the forward pass finds them, so that the backward pass need not wait. Under capture of a
    CUDA graph and under torch.func a sparse gradient is a RuntimeError, and torch.compile leaves the call out of its
    graph (fullgraph=True raises).
    Derivatives of higher order with sparse=False, else RuntimeError; forward mode raises NotImplementedError.

    Raises TypeError for dtypes that are not allowed or differ; ValueError for shapes, devices and offsets that do not
    match and options that do not exist: before anything runs, but for offsets that fall, do not begin with 0 or do not
    end with N, which are a device-side assertion on a GPU.
    """
    tables = list(tables)
    if feature_tables is None:
        feature_tables = range(len(tables))
    wants = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
    run = _outside_of_graphs if wants and sparse and torch.compiler.is_compiling() else _run
    return run(tables, ids, offsets, dense, weights, list(feature_tables), pooling, padding_index, hash, out_of_range,
               cross, sparse, wants)  # fmt: skip


def _run(
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
    wants: bool,
) -> Tensor:
    # A cross's gradient needs the pooled vectors: to read them is faster than to look them up again.
    save_vectors = wants and cross != "none"
    return embedding_aggregation_operator(
        tables, ids, offsets, dense, weights, feature_tables, pooling, padding_index, hash, out_of_range, cross, sparse,
        save_vectors,
    )[0]  # fmt: skip


def _outside_of_graphs(*args: Any) -> Tensor:
    return torch.compiler.disable(_run)(*args)


# As torch.compiler.disable does, which would import Dynamo here and now.
_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_graphs._torchdynamo_disable_msg = "sparse gradients of embedding_aggregation"  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------------
# Forward


def _rows(tables: Sequence[Tensor]) -> list[int]:
    return [table.shape[0] for table in tables]


def _check(
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
) -> None:
    operator = "embedding_aggregation"
    check_tensors(operator, tables, ids, weights)
    check_layout(operator, ids, offsets, _rows(tables), feature_tables, hash, out_of_range)
    if dense is not None:
        first, shape = tables[0], (batch_size(offsets, len(feature_tables)), tables[0].shape[1])
        if dense.dtype != first.dtype:
            raise TypeError(f"{operator}: dense is {dense.dtype}, tables are {first.dtype}; they must be of one dtype")
        if dense.shape != shape:
            raise ValueError(
                f"{operator}: dense has shape {tuple(dense.shape)}; by offsets, {len(feature_tables)} features and "
                f"tables it must be {shape}"
            )
        if dense.device != first.device:
            raise ValueError(
                f"{operator}: dense is on {dense.device}, tables on {first.device}; they must be on one device"
            )
    for name, value, allowed in (("pooling", pooling, POOLINGS), ("cross", cross, CROSSES)):
        if value not in allowed:
            raise ValueError(f"{operator}: {name} is {value!r}; allowed: {', '.join(allowed)}")


def empty_outputs(
    tables: list[Tensor],
    offsets: Tensor,
    dense: Tensor | None,
    feature_tables: list[int],
    cross: str,
    save_vectors: bool,
) -> tuple[Tensor, Tensor]:
    """Features, and the vectors that they are crossed from or none of them, not filled."""
    batch, width = batch_size(offsets, len(feature_tables)), tables[0].shape[1]
    vectors = len(feature_tables) + (dense is not None)
    features = tables[0].new_empty(crossed_shape(batch, vectors, width, dense is not None, cross))
    kept = (batch, vectors, width) if save_vectors else (0,)
    return features, tables[0].new_empty(kept, dtype=computing_dtype(tables[0].dtype))


def _path(tables: list[Tensor], ids: Tensor, offsets: Tensor, dense: Tensor | None, *options: Any) -> str:
    feature_tables, cross = options[1], options[6]
    fused = cross == "none" or fused_cross(len(feature_tables) + (dense is not None), tables[0].shape[1])
    return "triton" if fused else "cublas+triton"


def _shape(
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
    return empty_outputs(tables, offsets, dense, feature_tables, cross, save_vectors)


def _cpu(
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
    rows = _rows(tables)
    check_values("embedding_aggregation", ids, offsets, rows, feature_tables, padding_index, hash, out_of_range)
    pooled = pooled_cpu(tables, ids, offsets, weights, feature_tables, pooling, padding_index, hash)
    vectors = vectors_of(pooled, dense)
    features, kept = empty_outputs(tables, offsets, dense, feature_tables, cross, save_vectors)
    features.copy_(crossed(vectors, dense is not None, cross))
    return features, kept.copy_(vectors) if save_vectors else kept


def _reference(
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
    with torch.autocast(ids.device.type, enabled=False):  # which would take the products' precision
        located = locate(ids, offsets, _rows(tables), feature_tables, padding_index, hash)
        looked_up = looked_up_stock(tables, located)
        pooled = pooled_stock(looked_up, located, weights, offsets, feature_tables, pooling, sum(_rows(tables)))
        vectors = vectors_of(pooled, dense)
        features = crossed(vectors, dense is not None, cross).to(widest_dtype(tables, dense, weights))
    return features, vectors.detach() if save_vectors else vectors.detach().new_empty(0)


# ---------------------------------------------------------------------------------------------------------------------
# Samples, cost, registration


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(
        name: str,
        lengths: tuple[int, ...],
        width: int,
        *,
        rows: tuple[int, ...] = (4, 3),
        features: tuple[int, ...] = (0, 1, 1),
        has_dense: bool = False,
        weighted: bool = False,
        pooling: str = "sum",
        padding_index: int | None = None,
        hash: str = "modulo",
        out_of_range: str = "error",
        cross: str = "none",
        save_vectors: bool = False,
        most: int = 2**62,
    ) -> Sample:
        ids, offsets = random_bags(lengths, len(features), device, most=most)
        dense = randn(len(lengths), width) if has_dense else None
        weights = randn(len(ids)) if weighted else None
        arguments = ([randn(count, width) for count in rows], ids, offsets, dense, weights, list(features))
        return Sample(name, (*arguments, pooling, padding_index, hash, out_of_range, cross, False, save_vectors))

    yield sample("look-up", (1, 0, 2), 2)
    yield sample("look-up, dense, mean", (1, 3, 0), 3, has_dense=True, pooling="mean")
    yield sample("dot", (1, 2), 3, cross="dot", has_dense=True, weighted=True)
    yield sample("fm", (2, 0), 3, cross="fm", has_dense=True, pooling="mean", weighted=True)
    yield sample("weights", (1, 0, 5, 2), 5, weighted=True)
    yield sample("dot without dense, mean", (2, 1, 3), 17, cross="dot", pooling="mean")
    yield sample("fm without dense", (2, 1, 0), 7, cross="fm", save_vectors=True)
    yield sample("dot, vectors kept", (1, 4, 2), 9, cross="dot", has_dense=True, save_vectors=True)
    yield sample("mix32", (1, 0, 4), 5, hash="mix32", rows=(1000, 37))
    yield sample("mix64", (1, 0, 4), 5, hash="mix64", rows=(1000, 37))
    yield sample("zero out of range", (3, 1, 2), 5, hash="none", out_of_range="zero", most=6)
    yield sample("padding", (3, 5, 2), 5, hash="none", out_of_range="zero", most=4, padding_index=2, pooling="mean")
    yield sample("long bags", (63, 0, 111), 33, rows=(500, 40), weighted=True)
    yield sample("many features", (1,) * 5, 64, rows=(50,) * 26, features=tuple(range(26)), has_dense=True, cross="dot")
    yield sample("no samples", (), 3, has_dense=True, cross="dot")
    yield sample("no ids", (0, 0), 3, has_dense=True, cross="fm", pooling="mean")
    name, args = sample("strided tables and dense", (2, 0, 1), 4, has_dense=True, cross="dot")
    tables = [randn(5, 14)[:, 3:7], randn(4, 6).t()]
    yield Sample(name, (tables, *args[1:3], randn(4, 3).t(), *args[4:]))


def _cost(
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
) -> Cost:
    """Bytes: ids, offsets and what comes out once, and each row as often as it is looked up, but no table twice."""
    batch, width, n = batch_size(offsets, len(feature_tables)), tables[0].shape[1], len(feature_tables)
    vectors = n + (dense is not None)
    itemsize = tables[0].itemsize
    rows = min(ids.numel(), sum(_rows(tables)))
    out = torch.Size(crossed_shape(batch, vectors, width, dense is not None, cross)).numel()
    kept = batch * vectors * width * computing_dtype(tables[0].dtype).itemsize if save_vectors else 0
    given = sum(t.nbytes for t in (dense, weights) if t is not None)
    flops = ids.numel() * width * (1 if weights is None else 2)
    flops += {"none": 0, "fm": 3 * batch * vectors * width, "dot": batch * vectors * (vectors - 1) * width}[cross]
    return Cost(flops=flops, bytes=ids.nbytes + offsets.nbytes + (rows * width + out) * itemsize + kept + given)


embedding_aggregation_operator = register(
    schema=(
        "embedding_aggregation(Tensor[] tables, Tensor ids, Tensor offsets, Tensor? dense, Tensor? weights, "
        "int[] feature_tables, str pooling, int? padding_index, str hash, str out_of_range, str cross, bool sparse, "
        "bool save_vectors) -> (Tensor features, Tensor vectors)"
    ),
    check=_check,
    shape=_shape,
    cpu=_cpu,
    kernel=Kernel("embedding_aggregation", "embedding_aggregation", _path),
    reference=_reference,
    samples=_samples,
    cost=_cost,
    stock="F.embedding_bag a feature, torch.stack, torch.bmm, the lower triangle",
    setup=setup,
    backward=backward,
    vmap=looped_vmap,
    autocast="promote",
)
