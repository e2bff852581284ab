"""The output of a cell that comes after its answer."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nbgpu.client.cells import outputs
from nbgpu.client.engines.cell_replies import Answer, Arrivals


def _answered(num_outputs: int) -> tuple[Arrivals, Answer]:
    """What there is of a cell that rank 3 has answered, with so many messages under way."""
    arrivals = Arrivals()
    gathered = {"stdout": "", "stderr": "", "outputs": []}
    answer = Answer(3, arrivals, gathered, socket=None, forget=lambda: None)
    answer.complete(1, num_outputs)
    return arrivals, answer


def _come(answer: Answer, number: int, period_s: float) -> None:
    for i in range(number):
        time.sleep(period_s)
        message = {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": f"{i}\n"}}
        for receive in answer.iopub_callbacks:
            receive(message)


@pytest.mark.slow
def test_output_that_goes_on_coming_is_waited_for_whatever_it_takes() -> None:
    arrivals, answer = _answered(20)
    coming = threading.Thread(target=_come, args=(answer, 20, 0.1))
    coming.start()
    assert arrivals.wait_for_ends([3], 1.0) == set()
    coming.join()
    assert len(arrivals.take()) == 20


def test_output_of_which_nothing_comes_any_more_is_said_to_be_missing() -> None:
    arrivals, answer = _answered(2)
    _come(answer, 1, 0)
    assert arrivals.wait_for_ends([3], 0.05) == {3}


def test_a_cell_says_that_output_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "_OUTPUT_PATIENCE_S", 0.05)
    arrivals, answer = _answered(2)
    _come(answer, 1, 0)
    outputs.CellOutput(arrivals, [3], max_lines=100).finish()
    said = capsys.readouterr()
    assert "0" in said.out
    assert "the last output of rank 3 is missing" in said.err


def _print_lines(arrivals: Arrivals, num_lines: int) -> None:
    for line in range(num_lines):
        content = {"name": "stdout", "text": f"line {line}\n"}
        arrivals.add(0, {"header": {"msg_type": "stream"}, "content": content})


def test_a_cell_whose_output_no_file_can_take_shows_its_first_and_its_last_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nbgpu_runs").touch()
    arrivals = Arrivals()
    _print_lines(arrivals, 30)
    outputs.CellOutput(arrivals, [0], max_lines=10).close()
    shown = capsys.readouterr()
    assert "line 9\n" in shown.out
    assert "line 10\n" not in shown.out
    assert "line 29\n" in shown.out
    assert "The rest is lost: " in shown.err
    assert "cannot be written (Not a directory)" in shown.err


def _value(text: str) -> dict[str, Any]:
    return {
        "header": {"msg_type": "execute_result"},
        "content": {"data": {"text/plain": text}, "metadata": {}},
    }


@pytest.mark.parametrize(("num_printed", "num_in_value"), [(2, 40), (30, 40), (30, 1)])
def test_a_value_counts_as_text_unless_it_is_short(
    num_printed: int,
    num_in_value: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    arrivals = Arrivals()
    _print_lines(arrivals, num_printed)
    arrivals.add(0, _value("\n".join(f"value {number}" for number in range(num_in_value))))
    outputs.CellOutput(arrivals, [0], max_lines=12).close()
    numbers = [int(number) for number in re.findall(r"value (\d+)$", capsys.readouterr().out, re.MULTILINE)]
    # Of a long value the beginning, as far as it fits, and the end.
    assert numbers == ([*range(12 - num_printed), *range(30, 40)] if num_in_value == 40 else [0])


def test_a_disk_that_is_full_ends_no_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arrivals = Arrivals()
    _print_lines(arrivals, 30)
    output = outputs.CellOutput(arrivals, [0], max_lines=10)
    output.show_new()
    assert output._transcript is not None
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), output._transcript._files[0].fileno())
    _print_lines(arrivals, 30)
    output.finish(without=[0])
    shown = capsys.readouterr()
    assert "lines are missing in the files: " in shown.err
    assert "(No space left on device)" in shown.err
    assert "the last of 60 lines:" in shown.err
