"""Text with carriage returns as lines and rows."""

from __future__ import annotations

import io
import random

import pytest
from tqdm import tqdm

from nbgpu.client.cells.terminal_text import Screen


def finished(*texts: str) -> list[str]:
    screen = Screen()
    lines = [line for text in texts for line in screen.write(text) + screen.settle()]
    return lines + screen.finish()


def test_lines_are_whole() -> None:
    screen = Screen()
    assert screen.write("one\ntwo\nthr") == ["one", "two"]
    assert screen.write("ee\n\n") == ["three", ""]
    assert screen.finish() == []
    assert finished("no end") == ["no end"]


def test_a_begun_line_is_a_row_once_it_is_no_news() -> None:
    screen = Screen()
    screen.write("epoch 1 ...")
    assert screen.rows() == []
    assert screen.rows() == ["epoch 1 ..."]
    assert screen.write(" done\n") == ["epoch 1 ... done"]
    assert screen.rows() == []


def test_a_row_that_is_drawn_again_ends_as_one_line() -> None:
    screen = Screen()
    assert screen.write("\r10%") == []
    assert screen.rows() == ["10%"]
    assert screen.write("\r100%") == []
    assert screen.rows() == ["100%"]
    screen.write("\n")
    assert screen.settle() + screen.settle() + screen.settle() == ["100%"]
    assert finished("long text\rab\n") == ["abng text"]
    assert finished("\rgone\r\x1b[Kthere\n") == ["there"]


def test_windows_line_ends_are_no_rows() -> None:
    assert finished("a\r\nb\r\n") == ["a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_bars_within_each_other_end_as_their_last_state_however_the_text_is_cut(seed: int) -> None:
    written = io.StringIO()
    for epoch in tqdm(range(3), desc="epochs", file=written, mininterval=0, ascii=True):
        for _ in tqdm(range(4), desc="batches", file=written, mininterval=0, leave=False, ascii=True):
            pass
        tqdm.write(f"epoch {epoch}", file=written)
    text = written.getvalue()
    assert "\x1b[A" in text

    chance = random.Random(seed)
    screen = Screen()
    lines: list[str] = []
    while text:
        # A bar draws itself in far less time than passes between two looks at the screen.
        cut = chance.randrange(100, 400)
        lines += screen.write(text[:cut]) + screen.settle()
        text = text[cut:]
    lines += screen.finish()
    assert [line[:7] for line in lines] == ["epoch 0", "epoch 1", "epoch 2", "epochs:"]
    assert "100%" in lines[-1]


def test_a_bar_that_was_closed_stands_before_what_is_printed_elsewhere_and_an_open_one_does_not() -> None:
    screen = Screen()
    assert screen.write("\r 50%") == []
    assert screen.pass_by() == []
    # The inner of two bars, drawn below the outer one.
    screen.write("\n\r 10%\x1b[A")
    assert screen.pass_by() == []
    screen.write("\n\r      \r\x1b[A\r100%\n")
    assert screen.pass_by() == ["100%"]
    assert screen.finish() == []
