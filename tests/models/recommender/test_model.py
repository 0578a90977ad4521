"""The networks: what they compute against the papers' formulas, and that arms differ in the slot's function alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedops.slots import SLOTS
from models.recommender import ModelConfig
from models.recommender.model import Recommender, RecommenderOps

ROWS = (11, 5, 31)
B, DENSE, WIDTH = 6, 4, 8


def model_of(name: str = "native", n_dense: int = DENSE, seed: int = 0, **keys: Any) -> Recommender:
    torch.manual_seed(seed)
    keys = {"embedding_dim": WIDTH, "bottom": [9], "top": [12, 7]} | keys
    architecture = ModelConfig(**keys).architecture()
    ops = RecommenderOps(SLOTS["embedding"].implementation(name).function) if architecture["embeddings"] else None
    return Recommender(architecture, n_dense, ROWS, ops)


def batch_of(n_dense: int = DENSE) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(0, 4, (len(ROWS) * B,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randn(B, n_dense), torch.randint(-(2**62), 2**62, (int(offsets[-1]),)), offsets


def pooled(tables: nn.ParameterList, ids: Tensor, offsets: Tensor) -> Tensor:
    """[B, features, D] by a loop."""
    vectors = []
    for f, table in enumerate(tables):
        ends = offsets[f * B : (f + 1) * B + 1].tolist()
        bags = [ids[first:last] % len(table) for first, last in pairwise(ends)]
        vectors.append(torch.stack([table[bag].sum(0) for bag in bags]))
    return torch.stack(vectors, 1)


@pytest.mark.parametrize("cross", ["dot", "none"])
def test_dlrm_is_that_of_the_paper(cross: str) -> None:
    model, (dense, ids, offsets) = model_of(cross=cross), batch_of()
    vector = model.bottom(dense)  # type: ignore[misc]
    vectors = torch.cat([vector[:, None], pooled(model.tables, ids, offsets)], 1)
    if cross == "dot":
        products = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i)]
        seen = torch.cat([vector, torch.stack(products, 1)], 1)
    else:
        seen = vectors.flatten(1)
    torch.testing.assert_close(model(dense, ids, offsets), model.top(seen).squeeze(-1))


@pytest.mark.parametrize("cross", ["fm", "none"])
def test_deepfm_is_that_of_the_paper(cross: str) -> None:
    model, (dense, ids, offsets) = model_of(network="deepfm", cross=cross), batch_of()
    nn.init.normal_(model.linear_tables[1])
    vectors = torch.cat([model.bottom(dense)[:, None], pooled(model.tables, ids, offsets)], 1)  # type: ignore[misc]
    expected = model.top(vectors.flatten(1)).squeeze(-1) + pooled(model.linear_tables, ids, offsets).sum((1, 2))
    if cross == "fm":
        expected = expected + sum((vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i))
    torch.testing.assert_close(model(dense, ids, offsets), expected)


@pytest.mark.parametrize(
    "keys",
    [{}, {"cross": "none"}, {"network": "deepfm"}, {"network": "deepfm", "cross": "none"}, {"hash": "mix64"}],
    ids=str,
)
@pytest.mark.parametrize("n_dense", [DENSE, 0])
def test_arms_have_the_same_state_and_compute_the_same(keys: dict[str, Any], n_dense: int) -> None:
    native, fused = (model_of(name, n_dense, **keys) for name in ("native", "fused"))
    state = native.state_dict()
    assert list(state) == list(fused.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in fused.state_dict().items())
    batch = batch_of(n_dense)
    outputs = []
    for model in (native, fused):
        output = model(*batch)
        assert output.shape == (B,)
        output.square().sum().backward()
        outputs.append(output)
    torch.testing.assert_close(outputs[1], outputs[0])
    for (name, ours), stock in zip(fused.named_parameters(), native.parameters(), strict=True):
        assert ours.grad is not None and stock.grad is not None, name
        assert ours.grad.is_sparse == stock.grad.is_sparse == ("tables" in name)
        torch.testing.assert_close(ours.grad.to_dense(), stock.grad.to_dense(), msg=name)


def test_without_embeddings_ids_do_not_matter() -> None:
    model, (dense, ids, offsets) = model_of(embeddings=False), batch_of()
    assert not [name for name, _ in model.named_parameters() if "tables" in name]
    assert torch.equal(model(dense, ids, offsets), model(dense, ids + 1, offsets))


def test_without_dense_features_there_is_a_learnt_vector() -> None:
    model, (dense, ids, offsets) = model_of(n_dense=0), batch_of(0)
    assert model.constant is not None and model.constant.shape == (WIDTH,)
    model(dense, ids, offsets).sum().backward()
    assert model.constant.grad is not None and model.constant.grad.any()


def test_features_may_share_a_table() -> None:
    a = ModelConfig(embedding_dim=WIDTH).architecture()
    model = Recommender(
        a, DENSE, [17], RecommenderOps(SLOTS["embedding"].implementation("fused").function), [0] * len(ROWS)
    )
    assert len(model.tables) == 1 and model(*batch_of()).shape == (B,)


def test_tables_begin_within_their_bounds() -> None:
    model = model_of(table_scale=1.5)
    bound = 1.5 * WIDTH**-0.5
    values = torch.cat([table.detach().flatten() for table in model.tables])
    assert 0.9 * bound < values.max() <= bound and -bound <= values.min() < -0.9 * bound
