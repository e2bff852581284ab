"""notebooks/08_when_things_break.ipynb runs to its end, and its faults end as the folded answers say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from notebook_run import executed

pytestmark = pytest.mark.long

ON_PURPOSE = "raises-exception"


class Said:
    """What the cells left behind; a cell is found by a piece of its code."""

    def __init__(self, content: Any) -> None:
        self.cells: Sequence[Any] = [cell for cell in content.cells if cell.cell_type == "code"]

    def outputs(self, piece: str) -> Any:
        (found,) = [cell.outputs for cell in self.cells if piece in cell.source]
        return found

    def stream(self, piece: str, name: str = "stdout") -> str:
        streams = [o for o in self.outputs(piece) if o.output_type == "stream" and o.name == name]
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(output.text for output in streams))

    def error(self, piece: str) -> str:
        (error,) = [output for output in self.outputs(piece) if output.output_type == "error"]
        return str(error.evalue)

    def counted(self) -> list[str]:
        """What each count of the ranks that still have the variable said, in order."""
        cells = [cell for cell in self.cells if cell.source.startswith("count(")]
        return ["".join(output.text for output in cell.outputs) for cell in cells]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return Said(executed("08_when_things_break.ipynb", tmp_path_factory.mktemp("notebook")))


def test_the_cells_that_fail_are_those_that_say_so(said: Said) -> None:
    failed = [cell for cell in said.cells if any(o.output_type == "error" for o in cell.outputs)]
    assert failed == [cell for cell in said.cells if ON_PURPOSE in cell.metadata.get("tags", ())]
    assert len(failed) == 5


def test_only_a_rank_whose_process_ends_loses_its_variables(said: Said) -> None:
    raised, killed, stopped, without_memory, killed_in_a_run = said.counted()
    assert raised == "guessed 1, kept on 2 of 2 ranks\n"
    assert killed == "guessed 0, kept on 1 of 2 ranks\n"
    assert stopped == "guessed 1, kept on 2 of 2 ranks\n"
    assert without_memory == "guessed 1, kept on 2 of 2 ranks\n"
    assert killed_in_a_run == "guessed 0, kept on 1 of 2 ranks\n"


def test_a_rank_that_raises_is_named_and_the_next_sum_is_right(said: Said) -> None:
    assert said.error("raise ValueError") == "rank 1: ValueError: on purpose"
    assert said.stream("raise ValueError", "stderr") == "freed from waiting for the others: rank 0\n"
    assert said.stream("after the failure the ranks count") == "[0-1] after the failure the ranks count 2\n"


def test_a_killed_rank_is_replaced(said: Said) -> None:
    assert "rank 1 was killed by SIGKILL" in said.error("if rank == world_size - 1:\n    os.kill")
    told = said.stream("if rank == world_size - 1:\n    os.kill", "stderr")
    assert "rank 1 was replaced and is empty; rank 0 kept all variables" in told
    assert "--rank 1 --replay" in told
    assert said.stream("after the death the ranks count") == "[0-1] after the death the ranks count 2\n"


def test_a_hang_says_who_waits_where_and_what_the_other_does(said: Said) -> None:
    (notice,) = [
        output.data["text/plain"]
        for output in said.outputs("threading.Timer")
        if output.output_type == "display_data" and "text/html" in output.data
    ]
    pattern = r"until it was stopped: rank 0 waits in all_reduce, cell line \d, for \d+ s; rank 1 has finished the cell"
    assert re.fullmatch(pattern, notice), notice
    assert said.error("threading.Timer") == "the cell was stopped; the ranks keep their variables"


def test_a_rank_without_memory_says_who_holds_it(said: Said) -> None:
    error = said.error("history = [")
    assert "rank 1 ran out of memory" in error
    _, held = error.split("held by:\n")
    assert held.startswith("  history: list with 8 tensors, 8.0 MiB")


def test_a_nan_reaches_no_weights_and_the_run_goes_on_from_its_checkpoint(said: Said) -> None:
    error = said.error("damaged_run.wait()")
    found = re.search(
        r"loss is nan on rank \d \(its batch holds NaN.*\) at step (\d+); weights are those of step (\d+)",
        error,
    )
    assert found, error
    bad, good = map(int, found.groups())
    assert good == bad - 1
    checkpoint = f"guessed 100%, NaN in step-{good:08d}: 0%\n"
    assert said.stream("share = sum(") == checkpoint
    first, skipped = said.stream("skipping = dict").splitlines()
    assert first == f"the first step is {bad}, the last one 256"
    left_out = re.fullmatch(r"guessed 1, left out (\d): \[(\d+), (\d+), (\d+)\]", skipped)
    assert left_out, skipped
    assert [int(left_out[1]), int(left_out[2])] == [3, bad]


def test_a_run_whose_rank_is_killed_has_the_losses_of_one_that_is_unhurt(said: Said) -> None:
    told = re.search(r"Training goes on after step (\d+)\.", said.stream("for status in hurt.statuses"))
    assert told
    assert 200 <= int(told[1]) < 600
    pause, apart = said.stream("pause_s = ").splitlines()
    assert re.fullmatch(r"guessed 60 s, the longest time between two steps was \d+\.\d s", pause)
    assert apart == "the losses differ by at most 0.0e+00"
    drawn = said.outputs("plt.title(")
    assert any("image/png" in output.get("data", {}) for output in drawn)
