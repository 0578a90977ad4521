from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from engine.batches import training_batches
from engine.config import TrainConfig
from engine.errors import Interrupted, RunError
from engine.loop import best_evaluation, matmul_precision
from engine.signals import StopSignal


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_arms_start_from_the_same_weights_and_see_the_same_batches(toy_task, compare):
    task = toy_task(steps=7)
    comparison = compare(task)
    comparison.run()
    native, fused = (comparison.trainings[arm] for arm in ("native", "fused"))
    assert len(native.losses) == 7
    torch.testing.assert_close(torch.tensor(fused.losses), torch.tensor(native.losses), rtol=1e-6, atol=0)
    first, second = (comparison.build(arm).state_dict() for arm in comparison.arms)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dropout_repeats_with_the_seed(toy_task, compare):
    runs = []
    for seed in (1, 1, 2):
        comparison = compare(toy_task(dropout=0.5), ("native",), train=TrainConfig(seed=seed, device="cpu"))
        comparison.run()
        runs.append(comparison.trainings["native"].losses)
    assert runs[0] == runs[1] != runs[2]


def test_the_validation_loss_is_weighted_by_count(toy_task, compare):
    task = toy_task()
    comparison = compare(task, ("native",))
    comparison.run()
    loss = comparison.trainings["native"].validation[-1][1]["loss"]
    # 9 samples and 2: the mean of the batches' means would be another figure.
    torch.manual_seed(0)
    model = comparison.build(comparison.arms[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
        optimizer.zero_grad()
        task.loss(model, task.batch(step))[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    batches = task.validation()
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in ("x", "y")}
    with torch.no_grad():
        assert loss == pytest.approx(float(task.loss(model, whole)[0]), rel=1e-5)


def test_metrics_have_a_line_for_each_stretch_and_evaluation(toy_task, compare, tmp_path):
    train = TrainConfig(log_every=4, eval_every=3, device="cpu")
    compare(toy_task(steps=10), ("native",), train=train).run()
    found = lines(tmp_path)
    assert [line["step"] for line in found if "train/loss" in line] == [4, 8, 10]
    assert [line["step"] for line in found if "val/loss" in line] == [3, 6, 9, 10]
    last = next(line for line in found if line["step"] == 8)
    assert last["arm"] == "native" and last["perf/samples_per_s"] > 0
    assert last["train/learning_rate"] == pytest.approx(0.1 * 0.9**7)


@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_a_loss_that_is_not_finite_ends_the_run_naming_its_step(toy_task, compare, tmp_path, log_every):
    comparison = compare(
        toy_task(steps=8, poisoned=4), ("native",), train=TrainConfig(log_every=log_every, device="cpu")
    )
    with pytest.raises(RunError, match="step 5: the training loss is nan"):
        comparison.run()


def test_a_gradient_that_is_not_finite_is_named_apart_from_the_loss(toy_task, compare):
    task = toy_task(steps=8)
    loss = task.loss

    def rooted(model, batch):
        value, count = loss(model, batch)
        return value + (value - value.detach()).sqrt(), count  # finite, with an infinite slope

    task.loss = rooted
    with pytest.raises(RunError, match=r"step 1: the norm of the gradient is (nan|inf)"):
        compare(task, ("native",)).run()


def test_a_validation_metric_that_is_not_finite_ends_the_run(toy_task, compare):
    task = toy_task()
    task.evaluate = lambda model, batches: {"loss": 1.0, "auc": float("nan")}
    with pytest.raises(RunError, match="validation auc is nan"):
        compare(task, ("native",)).run()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_and_keeps_what_was_measured(toy_task, compare, tmp_path, signum):
    task = toy_task(steps=50)
    batch, before = task.batch, signal.getsignal(signum)

    def interrupting(step):
        if step == 5:
            os.kill(os.getpid(), signum)
        return batch(step)

    task.batch = interrupting
    with pytest.raises(Interrupted) as stopped, StopSignal() as stop:
        compare(task, stop=stop).run()
    assert stopped.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before
    assert [line["step"] for line in lines(tmp_path)] == [2, 4, 6]  # the sixth step ended, and was logged
    assert {line["arm"] for line in lines(tmp_path)} == {"native"}


def test_tf32_is_set_for_the_run_alone():
    before = torch.backends.cuda.matmul.fp32_precision
    for tf32, precision in ((True, "tf32"), (False, "ieee")):
        with matmul_precision(tf32):
            assert torch.backends.cuda.matmul.fp32_precision == precision
    assert torch.backends.cuda.matmul.fp32_precision == before


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation


def test_steps_of_several_batches_take_them_in_order_and_all_of_them_count(toy_task, compare):
    task = toy_task(steps=6)
    comparison = compare(task, ("native",), train=TrainConfig(accumulation=3, log_every=2, device="cpu"))
    comparison.train_arm(comparison.arms[0])
    assert task.seen == list(range(18))
    assert comparison.trainings["native"].units == 3 * 3 * 6  # the steps after the first three, 3 batches of 6 samples
    assert comparison.units_per_step == 3 * 6 and comparison.flops_per_step == 3 * 1000


def test_the_operators_and_the_timing_pass_are_of_whole_steps(toy_task, compare):
    rows = {}
    for accumulation in (1, 4):
        comparison = compare(toy_task(), train=TrainConfig(accumulation=accumulation, device="cpu"))
        comparison.run()
        rows[accumulation] = {
            (row["operator"], row["path"]): row["calls_per_step"] for row in comparison.operators["fused"]
        }
        assert comparison.units_per_step == accumulation * 6
    assert rows[4] == {key: 4 * calls for key, calls in rows[1].items()} and rows[1]


def test_batches_prepared_ahead_keep_their_own_states(toy_task, monkeypatch):
    read = []

    class Streamed(toy_task):
        def batches(self, start, state=None):
            assert (start, state) == (4, {"read": 4})
            for index in range(4, 100):
                read.append(index)
                yield self._samples(index, index), {"read": index + 1}

    monkeypatch.setattr("engine.batches.to_device", lambda batch, device: batch)  # there need be no GPU
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    steps = list(training_batches(Streamed(), 2, range(2, 5), torch.device("cuda"), {"read": 4}))
    assert [[len(batch["x"]) for batch in step.batches] for step in steps] == [[4, 5], [6, 7], [8, 9]]
    assert [step.units for step in steps] == [9, 13, 17]
    assert [step.stream for step in steps] == [{"read": 6}, {"read": 8}, {"read": 10}]
    assert read == list(range(4, 10))  # none past the last step


# ---------------------------------------------------------------------------------------------------------------------
# Early stop


@pytest.mark.parametrize(
    ("losses", "delta", "best"),
    [
        ([5], 0, 0),
        ([5, 4, 3], 0, 2),
        ([5, 4, 4], 0, 1),
        ([5, 4, 4.5, 3.9], 0, 3),
        ([5, 4.8, 4.6, 4.4], 0.5, 3),  # in sum lower by more than 0.5 than the best, which is still the first
        ([5, 4.8, 4.6], 0.5, 0),
        ([5, 4.5], 0.5, 0),
    ],
)
def test_the_best_evaluation_is_lower_by_more_than_delta(losses, delta, best):
    assert best_evaluation(losses, delta) == best


@pytest.mark.parametrize(
    ("losses", "patience", "steps", "reported"),
    [
        ((5, 4, 3, 2, 1, 0.5), 2, 11, 11),
        ((5, 4, 4.5, 4.2, 1, 0.5), 2, 8, 4),
        ((5, 4, 4.5, 3, 3.5, 2), 2, 11, 11),
        ((5, 4, 4.5, 3, 3.5, 3.25), 2, 11, 8),
        ((5, 6, 1, 1, 1, 1), 1, 4, 2),
    ],
)
def test_an_early_stop_reports_its_best_evaluation_and_says_why(toy_task, compare, losses, patience, steps, reported):
    task, script = toy_task(steps=11), iter(losses)

    def evaluate(model, batches):
        return {"loss": next(script)}

    task.evaluate = evaluate
    train = TrainConfig(eval_every=2, early_stop=patience, log_every=100, device="cpu")
    comparison = compare(task, ("native",), train=train)
    comparison.train_arm(comparison.arms[0])
    training = comparison.trainings["native"]
    assert len(training.losses) == steps and training.validation[-1][0] == steps
    assert training.reported == (reported, {"loss": losses[(reported + 1) // 2 - 1]})
    if steps == 11:
        assert training.stopped_early is None
    else:
        assert training.stopped_early == (
            f"stopped at step {steps} of 11: in {patience} evaluations the validation loss did not fall below the "
            f"{training.reported[1]['loss']:.4f} of step {reported}"
        )
