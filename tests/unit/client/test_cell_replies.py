"""The output of a cell that comes after its answer."""

from __future__ import annotations

import threading
import time

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
