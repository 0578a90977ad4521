"""The slots: places in a model where an implementation is chosen, each with its signature and its implementations.

A fused implementation says why it does not support a case, falls back to the native one, and announces that once.
"""

from fusedops.operators.silu_mul import silu_mul
from fusedops.slots.activation import activation_native
from fusedops.slots.attention import attention_fused, attention_native, attention_unfused
from fusedops.slots.embedding import embedding_fused, embedding_native
from fusedops.slots.laplacian import (
    laplacian_forward,
    laplacian_forward_native,
    laplacian_native,
    laplacian_stencil,
    laplacian_stencil_native,
)
from fusedops.slots.mlp import mlp_fused, mlp_native
from fusedops.slots.slot import Implementation, Slot, make_slot

__all__ = ["SLOTS", "Implementation", "Slot"]

SLOTS: dict[str, Slot] = {
    slot.name: slot
    for slot in (
        make_slot(
            "attention",
            "(q, k, v, causal, scale, mask=None, dropout_p=0.0) -> out",
            native=(attention_native, ("aten::scaled_dot_product_attention",)),
            fused=(attention_fused, ("fusedops::flash_attention", "fusedops::flash_attention_backward")),
            unfused=(attention_unfused, ("aten::softmax",)),
        ),
        make_slot(
            "mlp",
            "(x, w1, b1, w2, b2, p, approximate, training) -> y",
            native=(mlp_native, ("aten::gelu", "aten::gelu_backward")),
            fused=(mlp_fused, ("fusedops::linear_gelu_dropout", "fusedops::gelu_dropout_backward")),
        ),
        make_slot(
            "activation",
            "(gate, up) -> y",
            native=(activation_native, ("aten::silu", "aten::silu_backward")),
            fused=(silu_mul, ("fusedops::silu_mul", "fusedops::silu_mul_backward")),
        ),
        make_slot(
            "embedding",
            "(tables, ids, offsets, dense, spec) -> features",
            native=(embedding_native, ("aten::_embedding_bag", "aten::_embedding_bag_sparse_backward")),
            fused=(
                embedding_fused,
                (
                    "fusedops::embedding_aggregation",
                    "fusedops::embedding_rows",
                    "fusedops::embedding_aggregation_backward",
                    "fusedops::row_update_",
                ),
            ),
        ),
        make_slot(
            "laplacian",
            "(network, points) -> (u, du, lap)",
            native=(laplacian_native, ("aten::addmm", "aten::mm")),
            stencil_native=(laplacian_stencil_native, ("aten::addmm", "aten::slice_backward")),
            stencil=(laplacian_stencil, ("fusedops::laplacian3d", "fusedops::laplacian3d_adjoint")),
            forward_native=(laplacian_forward_native, ("aten::mm",)),
            forward=(
                laplacian_forward,
                (
                    "fusedops::forward_laplacian_input_linear",
                    "fusedops::forward_laplacian_linear",
                    "fusedops::forward_laplacian_output",
                    "fusedops::forward_laplacian_input_linear_backward",
                    "fusedops::forward_laplacian_linear_backward",
                    "fusedops::forward_laplacian_output_backward",
                ),
            ),
            fused="forward",
        ),
    )
}
