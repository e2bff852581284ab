"""`%nbgpu save` and `%nbgpu load` where something is wrong: nothing is lost, and it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbgpu


def test_what_cannot_be_saved_is_named_with_its_line(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute(
        "import threading\ngood = 1\nnumbers = (n for n in range(3))\nheld = {'lock': threading.Lock(), 'x': 1}\n"
        "file = open('/dev/null')\nmade = [lambda: 1]\n"
        "pair = dist.new_group([0, 1])\n"
        "on_pair = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=pair)"
    )
    saved = cluster2.save(tmp_path / "held")
    assert saved.names == ["good", "threading"]
    assert saved.refused == [
        "numbers: generator cannot be saved: it is in mid-run. Save what it yields: list(...). "
        "Made by: numbers = (n for n in range(3))  (cell 1, line 3)",
        "held['lock']: _thread.lock cannot be saved: it is of use in its own process only. "
        "Made by: held = {'lock': threading.Lock(), 'x': 1}  (cell 1, line 4)",
        "file: _io.TextIOWrapper cannot be saved: it is open in its own process only. Save its path, or what is in it. "
        "Made by: file = open('/dev/null')  (cell 1, line 5)",
        "made[0]: a lambda cannot be saved: its source is not known. Define it in a cell, at the left margin. "
        "Made by: made = [lambda: 1]  (cell 1, line 6)",
        *[line for line in saved.refused if line.startswith(("pair", "on_pair"))],
    ]
    assert len(saved.refused) == 6
    assert "Make it again after loading" in saved.refused[-1]
    cluster2.execute("file.close(); del numbers, held, file, made, on_pair, pair")


def test_a_value_of_one_rank_is_named_with_its_rank(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute("both = iter([1])\nif rank == 1: both = (n for n in [1])")
    saved = cluster2.save(tmp_path / "held", ["both"])
    assert [line.partition(":")[0] for line in saved.refused] == ["rank 1"]
    with pytest.raises(nbgpu.RankError, match=r"bothh: there is no variable of this name. Did you mean both"):
        cluster2.save(tmp_path / "held", ["bothh"])


def test_other_files_are_not_overwritten(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(nbgpu.DataError, match=r"has other files, such as notes.txt"):
        cluster2.save(tmp_path)
    with pytest.raises(nbgpu.DataError, match="is a file"):
        cluster2.save(tmp_path / "notes.txt")
    with pytest.raises(nbgpu.DataError, match="has no saved variables: there is no such folder"):
        cluster2.load(tmp_path / "nowhere")
    with pytest.raises(nbgpu.DataError, match=r"has no saved variables: it has no manifest.json"):
        cluster2.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_second_save_takes_the_place_of_the_first(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute("value = 1")
    cluster2.save(tmp_path / "held", ["value"])
    cluster2.execute("value = 2")
    cluster2.save(tmp_path / "held", ["value"])
    assert len(list((tmp_path / "held").glob("data-*"))) == 1
    cluster2.execute("value = 3")
    cluster2.load(tmp_path / "held")
    assert cluster2.execute("print(value)") == {0: "2\n", 1: "2\n"}


@pytest.mark.parametrize("file", ["tensors.safetensors", "variables.json", "../../manifest.json"])
def test_damage_is_found_and_changes_no_variable(cluster2: nbgpu.Cluster, tmp_path: Path, file: str) -> None:
    cluster2.execute("value = torch.arange(100.0)")
    cluster2.save(tmp_path / "held", ["value"])
    (data,) = (tmp_path / "held").glob("data-*")
    path = data / "rank-1" / file
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    cluster2.execute("value = 3")
    with pytest.raises(
        (nbgpu.RankError, nbgpu.DataError), match=r"damaged|not what nbgpu writes|cannot be read"
    ):
        cluster2.load(tmp_path / "held")
    assert cluster2.execute("print(value)") == {0: "3\n", 1: "3\n"}


def test_a_pickle_of_somebody_else_runs_only_with_trust(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    """The folder is whole by its own seals: whoever makes it can make those, too."""
    ran = tmp_path / "ran"
    cluster2.execute(
        "class Evil:\n    def __reduce__(self):\n        return exec, (act,)\n"
        f"act = {f'open({str(ran)!r}, mode=chr(97)).close()'!r}\nevil = Evil(); good = 1"
    )
    cluster2.save(tmp_path / "held", ["evil", "good"])
    assert not ran.exists()
    loaded = cluster2.load(tmp_path / "held")
    assert (loaded.names, [*loaded.untrusted]) == (["good"], ["evil"])
    assert not ran.exists()
    cluster2.load(tmp_path / "held", trust=True)
    assert ran.exists()


def test_a_class_that_refuses_its_state_costs_no_other_variable(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    opened = tmp_path / "data"
    opened.touch()
    cluster2.execute(
        "class Reads:\n    def __init__(self, path):\n        self.path = path\n"
        "    def __setstate__(self, state):\n        open(state['path']).close()\n"
        f"        self.path = state['path']\nreads = Reads({str(opened)!r}); good = 1"
    )
    cluster2.save(tmp_path / "held", ["reads", "good"])
    opened.unlink()
    cluster2.execute("good = 2")
    loaded = cluster2.load(tmp_path / "held", trust=True)
    assert loaded.names == ["good"]
    assert all("reads: Reads raised FileNotFoundError" in line for line in loaded.left_out), loaded
    assert loaded.left_out
    assert cluster2.execute("print(good)") == {0: "1\n", 1: "1\n"}
