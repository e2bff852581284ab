"""The moments of a step become the times of its parts."""

from __future__ import annotations

import pytest
import torch

from nbgpu.engine.model.bucket_times import BucketTimes
from nbgpu.engine.model.moments import Moment
from nbgpu.engine.training.step_clock import StepClocks

CPU = torch.device("cpu")


def at(time_s: float) -> Moment:
    moment = Moment(CPU)
    moment.time_s = time_s
    return moment


class Play:
    """A step whose moments are given."""

    def __init__(self) -> None:
        self.buckets = BucketTimes(CPU)
        self.clock = StepClocks(CPU, is_on_one_host=True).next(self.buckets)

    def mark(self, part: str, time_s: float) -> None:
        self.clock.enter(part)  # type: ignore[arg-type]
        self.clock._marks[-1] = (part, at(time_s))


def test_the_exchange_divides_into_what_the_backward_pass_hides_and_what_it_does_not() -> None:
    play = Play()
    for part, time_s in [
        ("data", 0),
        ("forward", 1),
        ("backward", 3),
        ("beside", 9),
        ("optimizer", 10),
        ("other", 12),
    ]:
        play.mark(part, time_s)
    play.buckets.ready += [at(4), at(6)]
    play.buckets.arrived += [at(5), at(8.5)]
    found = play.clock.seconds()
    assert found["forward_s"] == 2
    assert found["backward_s"] == 3
    assert found["exposed_s"] == 3
    assert found["optimizer_s"] == 2
    assert found["exchange_s"] == 3.5
    assert found["hidden_s"] == 1
    assert found["ready_at_s"] - found["begun_at_s"] == pytest.approx(6)


def test_micro_batches_add_up_and_only_the_last_one_exchanges() -> None:
    play = Play()
    marks = [
        ("forward", 0),
        ("backward", 1),
        ("beside", 3),
        ("forward", 3),
        ("backward", 4),
        ("beside", 7),
        ("other", 7),
    ]
    for part, time_s in marks:
        play.mark(part, time_s)
    play.buckets.ready.append(at(6))
    play.buckets.arrived.append(at(6.5))
    found = play.clock.seconds()
    assert (found["forward_s"], found["backward_s"], found["exposed_s"]) == (2, 4, 1)


def test_without_buckets_nothing_is_said_of_an_exchange() -> None:
    play = Play()
    for part, time_s in [("forward", 0), ("backward", 1), ("other", 3)]:
        play.mark(part, time_s)
    assert play.clock.seconds().keys() == {"forward_s", "backward_s", "optimizer_s", "begun_at_s"}


def test_a_step_that_was_cut_off_leaves_nothing_to_the_next() -> None:
    buckets = BucketTimes(CPU)
    clocks = StepClocks(CPU, is_on_one_host=True)
    clocks.next(buckets)
    buckets.ready.append(at(1))
    play = clocks.next(buckets)
    for part in ("forward", "backward", "other"):
        play.enter(part)
    assert "exchange_s" not in play.seconds()


def test_ranks_of_several_hosts_have_no_clock_in_common() -> None:
    buckets = BucketTimes(CPU)
    clock = StepClocks(CPU, is_on_one_host=False).next(buckets)
    for part in ("forward", "backward"):
        clock.enter(part)
    buckets.ready.append(Moment(CPU))
    buckets.arrived.append(Moment(CPU))
    clock.enter("other")
    found = clock.seconds()
    assert found["exposed_s"] > 0
    assert "ready_at_s" not in found
