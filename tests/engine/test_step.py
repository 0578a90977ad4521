from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.arms import operator_set
from engine.config import TrainConfig
from engine.errors import RunError
from engine.step import Stepper, clip_gradients

CPU = torch.device("cpu")


def stepper_of(task, **train):
    torch.manual_seed(3)
    model = task.build(operator_set("native", task.slots).functions)
    return Stepper(task, model, task.phases()[0], TrainConfig(**train), CPU)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_dense_gradients_are_clipped_as_pytorch_clips_them(max_norm):
    ours = [nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours[:2], theirs[:2], strict=True):  # the last has no gradient
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clip_gradients(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_sparse_gradient_counts_by_its_coalesced_values():
    # Row 2 twice: 3 + 1 = 4 in one row; with the dense 3 the norm is 5, not sqrt(9 + 1 + 9).
    sparse, dense = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(1))
    sparse.grad = torch.sparse_coo_tensor([[2, 2]], [[3.0], [1.0]], (4, 1), check_invariants=True)
    dense.grad = torch.tensor([3.0])
    norm = clip_gradients([sparse, dense], 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert sparse.grad.is_sparse and sparse.grad.is_coalesced()
    torch.testing.assert_close(sparse.grad.to_dense()[:, 0], torch.tensor([0.0, 0.0, 0.8, 0.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(dense.grad, torch.tensor([0.6]), rtol=1e-5, atol=0)


def test_zero_clips_nothing():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([30.0, 40.0])
    assert clip_gradients([parameter], 0.0).item() == pytest.approx(50.0)
    assert parameter.grad.tolist() == [30.0, 40.0]


def test_the_learning_rate_follows_the_schedule(toy_task):
    task = toy_task()
    stepper = stepper_of(task)
    rates = []
    for step in range(3):
        stepper(task.batch(step))
        rates.append(stepper.learning_rate)
    assert rates == pytest.approx([0.1, 0.09, 0.081])


def test_a_skipped_fp16_step_moves_neither_weights_nor_schedule(toy_task):
    task = toy_task()
    stepper = stepper_of(task, precision="fp16")
    good, bad = task.batch(0), {"x": task.batch(1)["x"], "y": torch.full((6, 1), 3e4)}
    before = [p.detach().clone() for p in stepper.model.parameters()]
    result = stepper(bad)  # the loss is finite; 2^16 times its gradient is not, in fp16
    assert result.loss.isfinite() and result.skipped and stepper.taken == 0
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
    assert not stepper(good).skipped and stepper.taken == 1
    assert stepper.learning_rate == pytest.approx(0.1)  # the schedule's first
    assert not any(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))


def test_gradients_that_overflow_fp16_at_any_scale_end_the_run(toy_task):
    task = toy_task()
    stepper = stepper_of(task, precision="fp16")
    batch = {"x": task.batch(1)["x"], "y": torch.full((6, 1), float("nan"))}
    with pytest.raises(RunError, match="not finite in fp16"):
        for _ in range(100):
            stepper(batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains(toy_task, precision):
    task = toy_task(steps=40)
    stepper = stepper_of(task, precision=precision)
    losses = [float(stepper(task.batch(step % 4)).loss) for step in range(40)]
    assert sum(losses[-8:]) < sum(losses[:8])
    assert all(p.dtype == torch.float32 for p in stepper.model.parameters())
