"""Work that an interrupt must not cut in two."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from nbgpu.machine.signals import noted, uninterrupted


def test_an_interrupt_in_a_block_within_a_block_is_raised_at_the_end_of_the_outer_one() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012 - what comes after the interrupt is the point
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_from_before_hears_of_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_function_that_is_called_again_within_itself_is_interrupted_at_the_end_of_the_outer_call() -> None:
    done = []

    @uninterrupted()
    def count_down(number: int) -> None:
        if number:
            count_down(number - 1)
        else:
            signal.raise_signal(signal.SIGINT)
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        count_down(2)
    assert done == [0, 1, 2]


def test_the_error_of_a_block_says_more_than_an_interrupt_in_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="bad"), uninterrupted():  # noqa: PT012 - the error comes after the interrupt
        signal.raise_signal(signal.SIGINT)
        raise ValueError("bad")
    assert signal.getsignal(signal.SIGINT) is before


def test_on_another_thread_it_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)

    def look() -> object:
        with uninterrupted():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result() is before


def test_an_inner_block_holds_back_what_a_handler_set_within_the_outer_one_would_get() -> None:
    """ipykernel sets its own for the time of a cell, within the block that records a Stop before it."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with noted():
        own = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [signal.SIGINT]
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is before
