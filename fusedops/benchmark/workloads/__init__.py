"""The contenders of each operator's rows, and the float64 reference they are checked against."""

from __future__ import annotations

from collections.abc import Callable

from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.attention import flash_attention
from fusedops.benchmark.workloads.common import Settings, Workload
from fusedops.benchmark.workloads.embedding import embedding_aggregation
from fusedops.benchmark.workloads.laplacian import laplacian3d
from fusedops.benchmark.workloads.linear import linear_gelu_dropout
from fusedops.benchmark.workloads.pinn import residual_step
from fusedops.benchmark.workloads.pointwise import silu, silu_mul, smooth_relu

__all__ = ["BUILDERS", "Settings", "Workload", "build"]

BUILDERS: dict[str, Callable[[Row, dict[str, int], Settings], Workload]] = {
    "silu": silu,
    "silu_mul": silu_mul,
    "smooth_relu": smooth_relu,
    "linear_gelu_dropout": linear_gelu_dropout,
    "flash_attention": flash_attention,
    "laplacian3d": laplacian3d,
    "forward_laplacian_activation": residual_step,
    "embedding_aggregation": embedding_aggregation,
}


def build(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    """The workload of a row at these sizes, its inputs drawn from the current generator of the device."""
    return BUILDERS[row.operator](row, shape, settings)
