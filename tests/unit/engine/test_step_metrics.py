"""How the marks and transfers of a step become its parts."""

from __future__ import annotations

import pytest

from nbgpu.engine.training.step_metrics import step_parts

MARKS = [
    ("data", 10.0),
    ("agreement", 11.0),
    ("forward", 11.1),
    ("backward", 13.0),
    ("beside", 19.0),
    ("waiting", 19.0),
    ("optimizer", 19.2),
    ("other", 20.0),
]


def test_the_exchange_is_hidden_until_the_last_gradient_and_exposed_after_it() -> None:
    parts = step_parts(MARKS, [(14.0, 15.0), (14.5, 15.5), (17.0, 18.5)])
    assert parts == pytest.approx(
        {
            "forward_s": 1.9,
            "backward_s": 4.0,
            "optimizer_s": 0.8,
            "exchange_s": 3.0,
            "hidden_s": 1.5,
            "exposed_s": 1.5,
            "begun_at_s": 10.0,
            "ready_at_s": 17.0,
        }
    )


def test_a_bucket_that_waits_behind_others_arrives_after_the_last_gradient() -> None:
    parts = step_parts(MARKS, [(14.0, 18.0), (16.0, 18.9), (17.0, 18.8)])
    assert parts["exchange_s"] == pytest.approx(4.9)
    assert parts["hidden_s"] == pytest.approx(3.0)
    assert parts["exposed_s"] == pytest.approx(1.9)


def test_micro_batches_add_up() -> None:
    marks = [("data", 0.0), ("forward", 1.0), ("backward", 2.0), ("beside", 4.0)]
    marks += [("forward", 4.0), ("backward", 6.0), ("beside", 10.0), ("optimizer", 10.0), ("other", 11.0)]
    parts = step_parts(marks, [(9.0, 9.5)])
    assert (parts["forward_s"], parts["backward_s"], parts["optimizer_s"]) == (3.0, 5.0, 1.0)
    assert (parts["exposed_s"], parts["ready_at_s"]) == (0.5, 9.0)


def test_a_discriminator_computes_beside_and_is_exchanged_before_the_optimizer() -> None:
    marks = [("data", 0.0), ("forward", 1.0), ("backward", 2.0), ("beside", 5.0), ("waiting", 7.0)]
    marks += [("optimizer", 7.0), ("other", 10.0)]
    parts = step_parts(marks, [(3.0, 4.5), (7.5, 8.5)])
    assert parts["backward_s"] == 3.0
    assert parts["optimizer_s"] == 2.0
    assert (parts["exchange_s"], parts["hidden_s"], parts["exposed_s"]) == (2.5, 0.0, 2.5)
    assert parts["ready_at_s"] == 3.0


def test_nothing_is_said_of_an_exchange_that_was_not_noted() -> None:
    parts = step_parts(MARKS, [])
    assert set(parts) == {"forward_s", "backward_s", "optimizer_s", "begun_at_s"}
    assert parts["backward_s"] == 6.0
