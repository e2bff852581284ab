"""Code of a person's object that raises, waits or computes for ever gives no answer, and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from nbgpu.engine.variables import persons_objects


class _UntellableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _raise(error: BaseException) -> Any:
    raise error


def _compute() -> None:
    while True:
        with suppress(Exception):  # as a person's code may have it
            time.sleep(0.001)


ENDLESS = {
    "computes": _compute,
    "sleeps": lambda: time.sleep(60),
    "waits for a lock": lambda: threading.Lock().acquire() and threading.Event().wait(400),
}


class _Asked:
    """What is asked; it can be referred to weakly."""


@pytest.mark.parametrize("how", ENDLESS)
def test_code_that_does_not_end_is_ended_and_not_asked_again(how: str) -> None:
    asked = _Asked()
    answer, problem = persons_objects.run_limited(asked, ENDLESS[how], 0.1)
    assert (answer, problem) == (None, "its code had not ended after 0.1 s")
    assert persons_objects.run_limited(asked, lambda: 1) == (None, "its code had not ended after 10 s")
    assert persons_objects.run_limited(_Asked(), lambda: 1) == (1, "")


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        (lambda: _raise(ValueError("no")), "ValueError: no"),
        (lambda: _raise(SystemExit(3)), "SystemExit: 3"),
        (lambda: _raise(_UntellableError()), "ValueError"),
    ],
)
def test_code_that_raises_gives_the_reason(question: Callable[[], Any], problem: str) -> None:
    assert persons_objects.run_limited(_Asked(), question) == (None, problem)


def test_stop_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        persons_objects.run_limited(_Asked(), lambda: _raise(KeyboardInterrupt()))


def test_modules_are_read_past_their_own_methods() -> None:
    class Odd(nn.Linear):
        def named_modules(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError

    class Unmade(nn.Module):
        def __init__(self) -> None:
            pass

    model = nn.Sequential(Odd(2, 1), nn.BatchNorm1d(1))
    assert [*persons_objects.walk_modules(model)] == [model, model[1], model[0]]
    assert {id(tensor) for tensor in persons_objects.walk_parameters(model)} == {
        id(tensor) for layer in model for tensor in vars(layer)["_parameters"].values()
    }
    assert sum(1 for _ in persons_objects.walk_tensors(model)) == 2 + 2 + 3
    assert [*persons_objects.walk_tensors(Unmade())] == []
    assert persons_objects.attributes(torch.Size([1])) == {}
