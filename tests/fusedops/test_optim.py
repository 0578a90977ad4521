"""fusedops.optim against stock optimizers and published formulas: values, state, and what PyTorch does around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops import optim

STEPS = 50
SIZES = ((40, 5), (7, 3), (300, 16))
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (optim.Adagrad, torch.optim.Adagrad, {"lr": 0.3}),
    "adagrad_decay": (
        optim.Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.3, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3},
    ),
    "sparse_adam": (optim.SparseAdam, torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
}
pairs = pytest.mark.parametrize("name", PAIRS)


class FormulaRowWiseAdagrad:
    """s += mean of g^2 over a row; w -= lr g / (sqrt(s) + eps), written down again (arXiv:2104.05158, FBGEMM)."""

    def __init__(self, params: list[Tensor], lr: float, eps: float) -> None:
        self.param_groups = [{"params": params, "lr": lr}]
        self._eps, self._sums = eps, [torch.zeros(len(p), dtype=p.dtype) for p in params]

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for parameter, total in zip(group["params"], self._sums, strict=True):
            if parameter.grad is None:
                continue
            grad = parameter.grad.to_dense()
            total += grad.square().mean(1)
            parameter -= group["lr"] * grad / (total.sqrt() + self._eps)[:, None]


def tables(dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def gradients(step: int, params: list[nn.Parameter]) -> None:
    """Sparse gradients whose ids repeat, some rows many times, one table now and then without any."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, parameter in enumerate(params):
        rows, width = parameter.shape
        count = 0 if i == 1 and step % 5 == 0 else 60
        ids = (torch.rand(count, generator=generator).square() * rows).long()
        values = torch.randn(count, width, generator=generator, dtype=torch.float64).to(parameter)
        indices = ids[None].to(parameter.device)
        parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def train(optimizer: Any, params: list[nn.Parameter], steps: range = range(STEPS)) -> list[Tensor]:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * 0.98**step  # a schedule
        gradients(step, params)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in params]


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.detach().cpu().double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("name", [*PAIRS, "rowwise_adagrad"])
def test_after_50_steps_the_error_is_at_most_twice_that_of_the_stock_one(name: str, device: torch.device) -> None:
    if name == "rowwise_adagrad":
        ours, stock, options = optim.RowWiseAdagrad, FormulaRowWiseAdagrad, {"lr": 0.3, "eps": 1e-8}
    else:
        ours, stock, options = PAIRS[name]
    mine, theirs, precise = tables(device=device), tables(), tables(torch.float64)
    exact = train(stock(precise, **options), precise)
    trained, reference = train(ours(mine, **options), mine), train(stock(theirs, **options), theirs)
    assert 0 < error(trained, exact) <= 2 * error(reference, exact) < 1e-5


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "sparse_adam"])
def test_only_the_rows_of_the_gradient_change(name: str) -> None:
    made = {"rowwise_adagrad": optim.RowWiseAdagrad, **{n: pair[0] for n, pair in PAIRS.items()}}[name]
    params = tables()
    before = [parameter.detach().clone() for parameter in params]
    optimizer = made(params, lr=0.1)
    gradients(1, params)
    touched = [parameter.grad.coalesce().indices()[0] for parameter in params]  # type: ignore[union-attr]
    optimizer.step()
    for parameter, old, rows in zip(params, before, touched, strict=True):
        changed = (parameter != old).any(1).nonzero()[:, 0]
        assert torch.equal(changed, rows)
        for key, state in optimizer.state[parameter].items():
            if key != "step":
                assert torch.equal(state.reshape(len(state), -1).any(1).nonzero()[:, 0], rows)


@pairs
def test_a_state_dict_goes_on_bit_for_bit(name: str) -> None:
    made, _, options = PAIRS[name]
    whole = tables()
    expected = train(made(whole, **options), whole)
    params = tables()
    first = made(params, **options)
    train(first, params, range(20))
    again = [nn.Parameter(parameter.detach().clone()) for parameter in params]
    second = made(again, lr=99.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for ours, theirs in zip(train(second, again, range(20, STEPS)), expected, strict=True):
        assert torch.equal(ours, theirs)


@pairs
def test_a_stock_state_dict_loads(name: str) -> None:
    made, stock, options = PAIRS[name]
    params = tables()
    expected = train(stock(params, **options), params)
    params = tables()
    first = stock(params, **options)
    train(first, params, range(20))
    second = made(params, lr=99.0)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(train(second, params, range(20, STEPS)), expected)


def test_state_of_half_precision_is_fp32_and_stays_so_when_loaded() -> None:
    """A sum of squares in bf16 stalls at 256 times its increment."""
    params = [nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))]
    optimizer = optim.Adagrad(params, lr=1e-3)
    for _ in range(1000):
        params[0].grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 1]]), torch.full((2, 3), 0.5, dtype=torch.bfloat16), (2, 3)
        )
        optimizer.step()
    assert torch.equal(optimizer.state[params[0]]["sum"], torch.tensor([[0.0] * 3, [1000.0] * 3]))
    other = optim.Adagrad(params)
    other.load_state_dict(optimizer.state_dict())
    state = other.state[params[0]]["sum"]
    assert state.dtype == torch.float32 and float(state[1, 0]) == 1000.0
    assert state is not optimizer.state[params[0]]["sum"]


def test_param_groups_have_their_own_options() -> None:
    params, alone = tables(), tables()
    optimizer = optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)
    optimizer_of_one = optim.SGD(alone[:1], lr=0.5)
    gradients(1, params)
    gradients(1, alone)
    optimizer.step()
    optimizer_of_one.step()
    assert torch.equal(params[0], alone[0]) and not torch.equal(params[1], alone[1])


def test_two_backwards_accumulate_as_one_of_both() -> None:
    weight = torch.randn(9, 4)
    ids, offsets = torch.tensor([1, 3, 3, 8, 1]), torch.tensor([0, 2, 5])

    def updated(parts: list[Tensor]) -> Tensor:
        bag = nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum", sparse=True)
        optimizer = optim.Adagrad(bag.parameters(), lr=0.1)
        for part in parts:
            bag(ids, offsets[:-1]).mul(part).sum().backward()
        optimizer.step()
        return bag.weight.detach()

    torch.testing.assert_close(updated([torch.tensor(2.0), torch.tensor(3.0)]), updated([torch.tensor(5.0)]))


def test_a_step_that_fp16_skips_changes_nothing() -> None:
    params = tables()
    before = [parameter.detach().clone() for parameter in params]
    optimizer = optim.SparseAdam(params)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # makes the scale
    gradients(1, params)
    params[2].grad._values()[0, 0] = float("inf")  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(parameter, old) for parameter, old in zip(params, before, strict=True))
    assert not optimizer.state


def test_a_closure_is_called_with_gradients_on() -> None:
    params = tables()
    optimizer = optim.SGD(params, lr=0.1)

    def closure() -> float:
        assert torch.is_grad_enabled()
        gradients(1, params)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert not torch.equal(params[0], tables()[0])


def test_tables_of_several_dtypes_and_without_gradients() -> None:
    params = [*tables(), nn.Parameter(torch.ones(5, 2, dtype=torch.float64)), nn.Parameter(torch.ones(5, 2))]
    optimizer = optim.Adagrad(params, lr=0.1)
    gradients(1, params[:4])
    optimizer.step()
    assert torch.equal(params[4], torch.ones(5, 2)) and not torch.equal(params[3], torch.ones(5, 2).double())


def test_a_dense_gradient_is_refused() -> None:
    params = tables()
    gradients(1, params)
    params[1].grad = torch.zeros_like(params[1])
    before = params[0].detach().clone()
    with pytest.raises(TypeError, match=r"SGD: the gradient of a table of shape \(7, 3\) in parameter group 0 is"):
        optim.SGD(params, lr=0.1).step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD(p, lr=-1.0), "SGD: lr=-1.0: must be at least 0"),
        (lambda p: optim.Adagrad(p, eps=float("nan")), "Adagrad: eps=nan: must be"),
        (lambda p: optim.SparseAdam(p, betas=(0.9, 1.0)), "betas=.*: each must be at least 0 and below 1"),
        (lambda p: optim.RowWiseAdagrad([{"params": p, "lr": -2.0}]), "RowWiseAdagrad: lr=-2.0"),
        (lambda p: load(optim.SGD(p), torch.optim.SGD(p, lr=0.1, momentum=0.9)), "SGD: momentum=0.9"),
        (lambda p: load(optim.Adagrad(p), torch.optim.Adagrad(p, weight_decay=0.1)), "Adagrad: weight_decay=0.1"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[list[nn.Parameter]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tables())


def load(ours: torch.optim.Optimizer, stock: torch.optim.Optimizer) -> None:
    ours.load_state_dict(stock.state_dict())


def test_a_hook_that_merges_rows_is_seen() -> None:
    """A gradient is marked as coalesced only where it is the one that was made."""
    table = torch.nn.Parameter(torch.zeros(6, 1, dtype=torch.float64))
    table.register_hook(lambda g: torch.sparse_coo_tensor(g._indices() // 2 * 2, g._values(), g.shape))
    optimizer = optim.SGD([table], lr=1.0)
    fusedops.embedding_aggregation([table], torch.tensor([0, 1, 2, 3]), torch.tensor([0, 4])).sum().backward()
    optimizer.step()
    assert table.flatten().tolist() == [-2, 0, -2, 0, 0, 0]


def test_a_refused_group_is_not_kept() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(2))
    optimizer = optim.RowWiseAdagrad([first])
    for group in ({"params": [second], "lr": -1.0}, {"params": [torch.nn.Parameter(torch.zeros(4))]}):
        with pytest.raises(
            ValueError, match=r"RowWiseAdagrad: (lr=-1.0: must be|a parameter has shape \(4,\); allowed)"
        ):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1 and list(optimizer.state) == [first]


def test_steps_of_an_older_stock_state_are_numbers() -> None:
    table = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = optim.Adagrad([table])
    state = optimizer.state_dict()
    state["state"][0]["step"] = 3
    optimizer.load_state_dict(state)
    table.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (4, 2))
    optimizer.step()
    assert float(optimizer.state[table]["step"]) == 4
