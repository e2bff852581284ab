"""What the panel says in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nbgpu.config import TrainConfig
from nbgpu.protocol.records import Device, Event, RankStatus, RunInfo, RunState, Sample
from nbgpu.ui.run import wording
from nbgpu.ui.run.history import History
from nbgpu.ui.run.wording import epochs, pace, progress, recent, summary, warning

GIB = 2**30
GPU = Device("cuda", "NVIDIA H200", "GPU-1", 0, 100 * GIB)
INFO = RunInfo("run-1", "autoencoder", (GPU, GPU), "nccl", 100, 20, 2, 4, 1000.0)


def status(rank: int = 0, state: RunState = "training", silent_s: float = 0.0, **values: float) -> RankStatus:
    return RankStatus(rank, state, 30 + rank, GPU, silent_s, values)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (status(), ""),
        (status(silent_s=4.2), "no heartbeat for 4 s"),
        (status(state="starting", silent_s=13), ""),
        (status(state="loading packages", silent_s=13), ""),
        (status(state="loading packages", silent_s=61), "no heartbeat for 61 s"),
        (status(state="working out the result", silent_s=4.2), "no heartbeat for 4 s"),
        (status(state="finished", silent_s=400), ""),
        (status(memory_reserved_bytes=94 * GIB), "memory 94 %"),
        (status(memory_reserved_bytes=50 * GIB), ""),
    ],
)
def test_warnings_come_in_words_and_never_call_a_rank_dead(seen: RankStatus, words: str) -> None:
    assert warning(seen) == words


def test_progress_is_the_slowest_ranks_and_the_rate_everyones() -> None:
    now = progress(INFO, "training", [status(0, samples_per_s=8.0), status(1, samples_per_s=8.0)])
    assert (now.step, now.epoch, now.num_epochs, now.samples_per_s) == (30, 2, 5, 16)
    assert now.eta_s == pytest.approx(70 * 4 / 16)


def test_the_number_of_epochs_does_not_jump_when_the_batch_size_changes() -> None:
    """Twenty steps an epoch, and from the second epoch on five."""
    changed = replace(INFO, epochs_from=((0, 0, 20), (20, 1, 5)))
    now = progress(changed, "training", [status()])
    assert (now.epoch, now.num_epochs, epochs(now)) == (4, 0, "epoch 4")
    # A length that was given in epochs stays the same, whatever number of steps each has.
    asked = replace(changed, epochs=17)
    assert epochs(progress(asked, "training", [status()])) == "epoch 4 of 17"
    assert epochs(progress(INFO, "training", [status()])) == "epoch 2 of 5"


def test_a_summary_without_a_history_has_the_newest_losses_of_the_ranks() -> None:
    seen = [status(0, loss=1.0, val_loss=3.0), status(1, loss=2.0)]
    assert "loss 1.5, validation loss 3" in summary(INFO, "training", seen)


def test_a_summary_leaves_out_ranks_that_the_run_has_lost() -> None:
    history = History()
    history.add([Sample(rank, 30, 1e9, 1, {"loss": 1.0 + 2 * rank}) for rank in range(2)])
    assert summary(INFO, "training", [status(0), status(1)], history).endswith("loss 2")
    assert summary(replace(INFO, devices=(GPU,)), "training", [status(0)], history).endswith("loss 1")


def test_a_run_with_a_name_is_called_by_it() -> None:
    assert summary(INFO, "training", [status()], History()).startswith(
        "autoencoder: training, step 30 of 100"
    )
    named = replace(INFO, name="with-ema")
    said = summary(named, "training", [status()], History())
    assert said.startswith("autoencoder 'with-ema': training, step 30 of 100")


def test_steps_that_nobody_has_counted_yet_are_not_said() -> None:
    """A run of 3 epochs has no number of steps before the ranks have seen the data."""
    config = TrainConfig.checked(epochs=3)
    early = replace(INFO, total_steps=config.total_steps(steps_per_epoch=0), steps_per_epoch=0)
    assert summary(early, "loading", [status()], History()) == "autoencoder: loading, step 30"
    assert summary(replace(early, total_steps=60), "training", [status()]).split(", ")[1] == "step 30 of 60"


def test_nothing_is_said_to_be_left_while_the_result_is_worked_out() -> None:
    done = RankStatus(0, "working out the result", 100, GPU, 0.0, {"samples_per_s": 8.0})
    assert progress(INFO, "working out the result", [done]).eta_s is None


def test_how_much_of_the_result_is_worked_out_is_said_by_rank_and_for_all() -> None:
    ranks = [
        RankStatus(0, "working out the result", 100, GPU, 0.0, {}, done=4, total=11),
        RankStatus(1, "waiting for rank 0", 100, GPU, 0.0, {}, done=10, total=10),
    ]
    assert [wording.state(rank) for rank in ranks] == [
        "working out the result, 4 of 11",
        "waiting for rank 0",
    ]
    said = "14 of 21 samples of the result evaluated"
    assert wording.evaluated(ranks) == said
    assert said in wording.summary(INFO, "working out the result", ranks, History())
    # After its share rank 0 does the rest alone.
    done = [RankStatus(0, "working out the result", 100, GPU, 0.0, {}, done=11, total=11), ranks[1]]
    assert [wording.state(rank) for rank in done] == ["working out the result", "waiting for rank 0"]
    assert wording.evaluated(done) == ""


@pytest.mark.parametrize("state", ["paused", "finished"])
def test_nothing_is_said_to_be_left_of_a_run_that_does_not_move(state: str) -> None:
    assert progress(INFO, state, [status(0, samples_per_s=8.0)]).eta_s is None


def history_with(name: str, *seconds: float) -> History:
    history = History()
    for rank, value in enumerate(seconds):
        history.add([Sample(rank, 0, 1000.0, 1, {"step_s": 0.2, name: value})])
    return history


def test_the_slowest_rank_is_named_with_how_much() -> None:
    assert pace(history_with("data_s", 0.01, 0.05), 2) == (
        "Rank 1 is the slowest: it waits 40 ms (20 % of a step) longer for data than rank 0."
    )


def test_even_ranks_are_said_to_be_even() -> None:
    assert pace(history_with("data_s", 0.01, 0.0101), 2).startswith("All ranks keep the same pace")


@pytest.mark.parametrize("history", [History(), history_with("data_s", 0.01)])
def test_one_rank_has_nobody_to_be_slower_than(history: History) -> None:
    assert pace(history, 2) == ""


def test_a_rank_that_is_lost_with_its_host_has_no_pace() -> None:
    assert pace(history_with("data_s", 0.01, 0.05), 1) == ""
    assert pace(history_with("data_s", 0.01, 0.05, 0.9), 2).startswith(
        "Rank 1 is the slowest: it waits 40 ms"
    )


def test_the_summary_is_one_line() -> None:
    history = History()
    history.add(
        [Sample(0, 0, 1000.0, 30, {"loss": 0.5, "val_loss": 0.75}), Sample(1, 0, 1000.0, 30, {"loss": 1.5})]
    )
    ranks: Any = [status(0, samples_per_s=8.0), status(1, samples_per_s=8.0)]
    assert summary(INFO, "training", ranks, history) == (
        "autoencoder: training, step 30 of 100, epoch 2 of 5, loss 1, validation loss 0.75, "
        "16 samples/s on 2 ranks, 18 s left"
    )


def test_the_last_things_that_happened_are_told() -> None:
    history = History()
    for step in range(1, 6):
        history.add([Event(0, step, 0.0, step, "checkpoint", f"step-{step}")])
    history.add([Event(0, 6, 0.0, 6, "note", "the disk is full")])
    assert recent(history) == [
        "step 4: checkpoint step-4",
        "step 5: checkpoint step-5",
        "step 6: the disk is full",
    ]
