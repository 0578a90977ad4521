"""Fused Triton operators registered with PyTorch."""

from fusedops.operators.embedding_aggregation import embedding_aggregation
from fusedops.operators.flash_attention import flash_attention
from fusedops.operators.forward_laplacian import forward_laplacian
from fusedops.operators.laplacian3d import laplacian3d, laplacian3d_adjoint
from fusedops.operators.linear_gelu_dropout import linear_gelu_dropout
from fusedops.operators.row_update import row_update_
from fusedops.operators.silu import silu
from fusedops.operators.silu_mul import silu_mul
from fusedops.operators.smooth_relu import smooth_relu

__version__ = "0.1.0"
__all__ = [
    "embedding_aggregation",
    "flash_attention",
    "forward_laplacian",
    "laplacian3d",
    "laplacian3d_adjoint",
    "linear_gelu_dropout",
    "row_update_",
    "silu",
    "silu_mul",
    "smooth_relu",
]
