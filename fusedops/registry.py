"""The operators, by name: what tests, benchmarks, inspection and the tables of the documentation go through."""

from __future__ import annotations

from fusedops.operators.embedding_aggregation import embedding_aggregation_operator
from fusedops.operators.embedding_backward import embedding_aggregation_backward_operator
from fusedops.operators.embedding_rows import embedding_rows_operator
from fusedops.operators.flash_attention import flash_attention_backward_operator, flash_attention_operator
from fusedops.operators.forward_laplacian_activation import (
    forward_laplacian_activation_backward_operator,
    forward_laplacian_activation_operator,
)
from fusedops.operators.forward_laplacian_linear import (
    forward_laplacian_input_linear_backward_operator,
    forward_laplacian_input_linear_operator,
    forward_laplacian_linear_backward_operator,
    forward_laplacian_linear_operator,
)
from fusedops.operators.forward_laplacian_output import (
    forward_laplacian_output_backward_operator,
    forward_laplacian_output_operator,
)
from fusedops.operators.laplacian3d import laplacian3d_adjoint_operator, laplacian3d_operator
from fusedops.operators.linear_gelu_dropout import gelu_dropout_backward_operator, linear_gelu_dropout_operator
from fusedops.operators.row_update import row_update_operator
from fusedops.operators.silu import silu_backward_operator, silu_operator
from fusedops.operators.silu_mul import silu_mul_backward_operator, silu_mul_operator
from fusedops.operators.smooth_relu import smooth_relu_backward_operator, smooth_relu_operator
from fusedops.registration import Operator

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        silu_operator,
        silu_backward_operator,
        silu_mul_operator,
        silu_mul_backward_operator,
        smooth_relu_operator,
        smooth_relu_backward_operator,
        linear_gelu_dropout_operator,
        gelu_dropout_backward_operator,
        flash_attention_operator,
        flash_attention_backward_operator,
        laplacian3d_operator,
        laplacian3d_adjoint_operator,
        forward_laplacian_activation_operator,
        forward_laplacian_activation_backward_operator,
        forward_laplacian_output_operator,
        forward_laplacian_output_backward_operator,
        forward_laplacian_input_linear_operator,
        forward_laplacian_input_linear_backward_operator,
        forward_laplacian_linear_operator,
        forward_laplacian_linear_backward_operator,
        embedding_aggregation_operator,
        embedding_aggregation_backward_operator,
        embedding_rows_operator,
        row_update_operator,
    )
}


def operator(name: str) -> Operator:
    """The operator `name`. Raises KeyError naming those that exist."""
    if name not in OPERATORS:
        raise KeyError(f"no operator {name!r}; there are {', '.join(OPERATORS)}")
    return OPERATORS[name]
