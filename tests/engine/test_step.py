from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.arms import operator_set
from engine.checkpoint import read, write
from engine.config import TrainConfig
from engine.errors import RunError
from engine.step import Stepper, clip_gradients
from tests.engine.conftest import ToyTask

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


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation


class MaskedTask(ToyTask):
    """The loss is a mean over the samples that a mask leaves: of batch n, which has 2 n + 3, n."""

    def batch(self, step, rank=0):
        return {**self._samples(step, 2 * step + 3), "mask": torch.randperm(2 * step + 3)[:, None] < step}

    def count(self, batch):
        return int(batch["mask"].sum())

    def loss(self, model, batch):
        error = (model(batch["x"]) - batch["y"]).square()[batch["mask"]]
        return error.mean(), len(error)


def joined(batches):
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def double_stepper(task, **train):
    stepper = stepper_of(task, **train)
    stepper.model.double()
    return stepper


def as_double(batch):
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
@pytest.mark.parametrize("indices", [(1,), (2, 5), (1, 2, 3, 5, 8)])
def test_a_step_of_several_batches_is_that_of_one_of_them_all(indices, grad_clip):
    task = MaskedTask()
    batches = [as_double(task.batch(index)) for index in indices]
    counts = [task.count(batch) for batch in batches]
    assert counts == list(indices) and counts != [task.units(batch) for batch in batches]
    several, one = (double_stepper(task, grad_clip=grad_clip) for _ in range(2))
    for _ in range(3):
        found, expected = several(*batches), one(joined(batches))
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.gradient_norm, expected.gradient_norm, rtol=1e-12, atol=0)
    for a, b in zip(several.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_batch_of_which_nothing_counts_changes_nothing():
    task = MaskedTask()
    batches = [as_double(task.batch(index)) for index in (2, 5)]
    empty = as_double(task.batch(0))  # its mean is 0 / 0
    with_it, without = (double_stepper(task) for _ in range(2))
    assert torch.equal(with_it(batches[0], empty, batches[1]).loss, without(*batches).loss)
    assert all(map(torch.equal, with_it.model.parameters(), without.model.parameters()))
    with pytest.raises(RunError, match="none of the 2 batches of a step has anything that counts"):
        with_it(empty, empty)


def test_an_overflow_of_one_fp16_batch_skips_the_step_of_all():
    task = ToyTask()
    stepper = stepper_of(task, precision="fp16")
    bad = {"x": task.batch(1)["x"], "y": torch.full((6, 1), 3e4)}
    before = [p.detach().clone() for p in stepper.model.parameters()]
    assert stepper(task.batch(0), bad, task.batch(2)).skipped and stepper.taken == 0
    assert all(map(torch.equal, before, stepper.model.parameters()))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 3e-3)])
def test_accumulated_gradients_are_right_in_every_precision(precision, tolerance):
    task = MaskedTask()
    batches = [task.batch(index) for index in (1, 2, 3, 5)]
    exact, stepper = double_stepper(task, grad_clip=0), stepper_of(task, grad_clip=0, precision=precision)
    norm = stepper(*batches).gradient_norm
    torch.testing.assert_close(norm.double(), exact(as_double(joined(batches))).gradient_norm, rtol=tolerance, atol=0)
    for a, b in zip(stepper.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * 0.1 * float(norm))


# ---------------------------------------------------------------------------------------------------------------------
# The state


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_stepper_goes_on_from_a_state_that_went_through_a_file(tmp_path, precision):
    class Adam(ToyTask):
        def phases(self):
            (phase,) = super().phases()
            return [replace(phase, optimizers=lambda model: [torch.optim.AdamW(model.parameters(), lr=0.1)])]

    task = Adam()
    first, second = (stepper_of(task, precision=precision) for _ in range(2))
    bad = {"x": task.batch(1)["x"], "y": torch.full((6, 1), 3e4)}
    for batch in (task.batch(0), bad, task.batch(2)):
        first(batch)
    assert first.taken == (2 if precision == "fp16" else 3)
    write(tmp_path / "file", {"format": 1, "stepper": first.state_dict(), "model": first.model.state_dict()})
    content = read(tmp_path / "file")
    second.model.load_state_dict(content["model"])
    second.load_state_dict(content["stepper"])
    for step in (3, 4):
        results = [stepper(task.batch(step)) for stepper in (first, second)]
        assert torch.equal(results[0].loss, results[1].loss) and results[0].skipped == results[1].skipped
        assert first.learning_rate == second.learning_rate == pytest.approx(0.1 * 0.9 ** (first.taken - 1))
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
