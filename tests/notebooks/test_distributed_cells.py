"""notebooks/01_distributed_cells.ipynb runs to its end, and its cells show what the text beside them says."""

from __future__ import annotations

import re
from typing import Any

import notebook_run
import pytest


class Executed:
    """The notebook after its run; cells are found by a piece of their code."""

    def __init__(self, content: Any) -> None:
        self._cells = [cell for cell in content.cells if cell.cell_type == "code"]

    def outputs(self, piece: str) -> Any:
        (found,) = [cell.outputs for cell in self._cells if piece in cell.source]
        return found

    def said(self, piece: str) -> list[str]:
        (stdout,) = self.outputs(piece)
        assert stdout.name == "stdout", stdout
        return re.sub(r"\x1b\[[0-9;]*m", "", stdout.text).splitlines()

    def failed(self) -> list[str]:
        return [
            output.evalue for cell in self._cells for output in cell.outputs if output.output_type == "error"
        ]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return Executed(notebook_run.executed("01_distributed_cells.ipynb", tmp_path_factory.mktemp("notebook")))


def test_with_one_gpu_it_says_where_its_two_ranks_are(executed: Executed) -> None:
    told, described = "".join(each.text for each in executed.outputs("%nbgpu start")).splitlines()
    assert told.startswith("at_least=2, and 1 GPU is free: 2 ranks on the CPU. Times are those of CPU ranks")
    assert described == "no GPU used: 2 CPU ranks, gloo"


def test_one_cell_fails_on_purpose_and_all_others_run(executed: Executed) -> None:
    assert len(executed.failed()) == 1
    stderr, error = executed.outputs("on purpose")
    assert stderr.text == "freed from waiting for the others: rank 0\n"
    assert "on rank 1:" in "".join(error.traceback)
    assert executed.said("the ranks count") == ["[0-1] the ranks count 2", "[0] kept: 100", "[1] kept: 101"]
    assert executed.said("%nbgpu stop") == ["stopped"]


def test_alike_is_said_once_and_apart_by_rank(executed: Executed) -> None:
    assert executed.said("there are") == [
        "[0-1] there are 2 ranks",
        "[0] this is rank 0 on cpu",
        "[1] this is rank 1 on cpu",
    ]
    assert executed.said("only rank 0") == ["[0] only rank 0 has run this: [5.0, 5.0, 5.0]"]


def test_each_rank_draws_its_own_random_numbers(executed: Executed) -> None:
    on_0, on_1 = executed.said("drawn = torch.rand")
    assert (on_0[:3], on_1[:3]) == ("[0]", "[1]")
    assert on_0[4:] != on_1[4:]


@pytest.mark.parametrize(
    ("collective", "said"),
    [
        ("dist.broadcast", ["[1] before [1.0, 1.0, 1.0]", "[0-1] after  [0.0, 0.0, 0.0]"]),
        ("dist.all_reduce(largest", ["[0-1] sum     [10.0, 12.0, 14.0]", "[0-1] maximum [10.0, 11.0, 12.0]"]),
        ("dist.all_gather", ["[1] before [10.0, 10.0]", "[0-1] after  [[0.0, 0.0], [10.0, 10.0]]"]),
        ("dist.reduce_scatter", ["[0] after  [10.0, 12.0]", "[1] after  [14.0, 16.0]"]),
        ("dist.scatter", ["[1] scatter [10.0, 10.0]", "[0] gather  [[1.0, 1.0], [12.0, 12.0]]"]),
    ],
)
def test_a_tensor_is_seen_before_and_after(executed: Executed, collective: str, said: list[str]) -> None:
    assert set(said) <= set(executed.said(collective))


def test_values_travel(executed: Executed) -> None:
    (areas,) = executed.outputs("max(areas")
    assert areas.data["text/plain"].startswith("12.56")
    (by_rank,) = executed.outputs("%pull mine --into")
    assert by_rank.data["text/plain"] == "{0: tensor([5., 5., 5.]), 1: tensor([10., 10., 10.])}"
    (table,) = executed.outputs("%nbgpu vars")
    assert re.search(r"mine +all +Tensor +\(3,\) +float32 .*≠ value", table.data["text/plain"])


def test_the_averaged_gradient_is_that_of_the_whole_batch(executed: Executed) -> None:
    own = executed.said("batch = torch.randn")
    assert [line[:3] for line in own] == ["[0]", "[1]"]
    assert own[0][3:] != own[1][3:]
    (averaged,) = executed.said("averaged /= world_size")
    gradient = averaged.removeprefix("[0-1] ")
    for by in ("the whole batch", "by DDP"):
        assert executed.said(f'print("{by}"') == [f"[0-1] {by} {gradient}", "[0-1] the same: True"]
    losses = executed.said("torch.optim.SGD")
    assert losses[-1].startswith("[0-1] weights ")
    first, *_, last = [float(line.split()[-1]) for line in losses if line.startswith("[1] step")]
    assert last < first / 5
