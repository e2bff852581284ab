"""Work that an interrupt must not cut in two."""

from __future__ import annotations

import signal

import pytest

from nbgpu.machine.signals import uninterrupted


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
