"""Checkpoints on disk: whole or not at all, whatever happens while they are written or after."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import row
from safetensors.torch import load_file

from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.checkpoints.files import Writer
from nbgpu.errors import RunError
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder.checkpoint_files import Score

TENSORS = {
    "model.weight": torch.arange(12.0).reshape(3, 4),
    "model.half": torch.ones(5, dtype=torch.bfloat16),
    "optimizer.0.step": torch.tensor(7.0),
    "optimizer.0.exp_avg": torch.full((3, 4), 1 / 3),
}
ABOUT = {"config": {"recipe": "autoencoder"}, "lr": 0.1 + 0.2, "scaler": {"scale": 65536.0}}
ALL_FILES = (*checkpoint_files.FILES, checkpoint_files.MANIFEST)


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, TENSORS, ABOUT)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_saved_is_loaded_to_the_last_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    assert path == tmp_path / "checkpoints" / "step-00000005"
    tensors, about = checkpoint.load(path)
    assert about == {"step": 5, **ABOUT}
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_the_model_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    assert set(load_file(save(tmp_path, 5) / "model.safetensors")) == {"weight", "half"}


def test_the_average_is_a_file_of_its_own_and_as_well_guarded(tmp_path: Path) -> None:
    average = {"average.weight": torch.full((3, 4), 1 / 7)}
    path = checkpoint.save(tmp_path, 5, TENSORS | average, ABOUT)
    assert torch.equal(load_file(path / "average.safetensors")["weight"], average["average.weight"])
    tensors, _ = checkpoint.load(path)
    assert set(tensors) == {*TENSORS, *average}
    flip_a_bit(path / "average.safetensors")
    assert checkpoint_files.damage(path).startswith("average.safetensors: ")
    (path / "average.safetensors").unlink()
    with pytest.raises(RunError, match=r"average\.safetensors: is missing"):
        checkpoint.load(path)


def test_tied_and_transposed_weights_are_saved_too(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tied = {"model.a": weight, "model.b": weight, "model.c": weight[1:], "model.d": weight.t()}
    tensors, _ = checkpoint.load(checkpoint.save(tmp_path, 1, tied, ABOUT))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tied.items())


def test_the_same_step_again_leaves_a_whole_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    inode = path.stat().st_ino
    assert save(tmp_path, 5).stat().st_ino == inode
    (path / "state.json").unlink()
    assert not checkpoint_files.damage(save(tmp_path, 5))


# ---- damage --------------------------------------------------------------------------------------------


class Malicious:
    """Unpickling one runs a command that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    path.write_bytes(content)


def pickle_in_its_place(path: Path) -> None:
    path.write_bytes(pickle.dumps(Malicious(path.parents[2] / "executed")))


def torch_pickle_in_its_place(path: Path) -> None:
    torch.save(Malicious(path.parents[2] / "executed"), path)


def pipe_in_its_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut off": truncate,
    "changed by one bit": flip_a_bit,
    "missing": Path.unlink,
    "a malicious pickle": pickle_in_its_place,
    "a malicious torch.save": torch_pickle_in_its_place,
    "a pipe": pipe_in_its_place,
}


@row(
    "a file of a run's newest checkpoint is {damage}",
    "the checkpoint is refused with the file's name, nothing is executed, the one before it is taken",
    bound_s=None,
    runs_on="CPU",
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, name: str, damage: str
) -> None:
    good, bad = save(tmp_path, 5), save(tmp_path, 10)
    DAMAGES[damage](bad / name)
    assert checkpoint_files.damage(bad).startswith(f"{name}: ")
    with pytest.raises(RunError, match=rf"step-00000010 is damaged \({name}: "):
        checkpoint.load(bad)
    newest = checkpoint_files.newest_whole(tmp_path)
    assert newest.checkpoint == good
    assert newest.damaged == [(bad, checkpoint_files.damage(bad))]
    assert not (tmp_path / "executed").exists()


def test_a_pickle_with_a_manifest_that_agrees_is_not_executed_either(tmp_path: Path) -> None:
    """Whoever can write into the folder can make the sums right."""
    for name in checkpoint_files.FILES:
        path = save(tmp_path / name, 5) if (tmp_path / name).mkdir() is None else tmp_path
        pickle_in_its_place(path / name)
        contents = {file: (path / file).read_bytes() for file in checkpoint_files.FILES}
        seals = {file: checkpoint_files.sealed(content) for file, content in contents.items()}
        (path / checkpoint_files.MANIFEST).write_text(
            checkpoint_files.text(checkpoint_files.CheckpointManifest(5, 0.0, seals))
        )
        with pytest.raises(RunError, match=rf"\({name}: is no"):
            checkpoint.load(path)
        assert not (tmp_path / name / "executed").exists()


def test_the_pickle_of_these_tests_does_harm_where_it_is_loaded(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Malicious(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_every_single_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 5) / checkpoint_files.MANIFEST
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError):
            checkpoint_files.read(path.parent)


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    moved = save(tmp_path, 5).rename(tmp_path / "checkpoints" / "step-00000009")
    assert checkpoint_files.damage(moved) == "manifest.json: is that of step-00000005"


# ---- a killed save -------------------------------------------------------------------------------------


def test_a_step_whose_save_was_killed_is_saved_again(tmp_path: Path) -> None:
    """As by the next process, which goes on from the checkpoint before."""
    left_over = tmp_path / "checkpoints" / f"step-00000005{checkpoint_files.UNFINISHED}"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    assert checkpoint_files.damage(save(tmp_path, 5)) == ""
    assert not left_over.exists()


SAVE_FOR_EVER_AND_BE_KILLED = """
import json, os, random, signal, statistics, sys, tempfile, time, torch
from pathlib import Path
from nbgpu.run_folder import checkpoint_files
from nbgpu.engine.checkpoints import files as checkpoint
folder, num_kills, moments = Path(sys.argv[1]), int(sys.argv[2]), random.Random(1)
tensors = {"model.w": torch.rand(200_000), "optimizer.0.m": torch.rand(400_000)}
taken_s = []
with tempfile.TemporaryDirectory() as elsewhere:
    for step in range(5):
        begun_s = time.perf_counter()
        checkpoint.save(Path(elsewhere), step + 1, tensors, {"n": step})
        taken_s.append(time.perf_counter() - begun_s)
save_s = statistics.median(taken_s)
for number in range(num_kills):
    newest = checkpoint_files.checkpoints(folder)
    step = int(newest[0].name.removeprefix("step-")) if newest else 0
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            checkpoint.save(folder, step, tensors, {"n": step})
    # A few saves are finished, however little the machine has left for them.
    while number % 4 == 0 and checkpoint_files.checkpoints(folder) == newest:
        time.sleep(0.001)
    time.sleep(moments.uniform(0.3 * save_s, 5 * save_s))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    damages = {path.name: checkpoint_files.damage(path) for path in checkpoint_files.checkpoints(folder)}
    num_unfinished = len(list(folder.glob("checkpoints/*" + checkpoint_files.UNFINISHED)))
    print(json.dumps([damages, num_unfinished]))
"""


@pytest.mark.slow
@row(
    "a rank is ended by SIGKILL while it writes a checkpoint",
    "every finished checkpoint is whole; the next save removes what is left over",
    bound_s=None,
    runs_on="CPU",
)
def test_a_save_that_is_killed_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """SIGKILL of processes that save without a pause, at 25 random moments."""
    command = [sys.executable, "-c", SAVE_FOR_EVER_AND_BE_KILLED, str(tmp_path), "25"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400)
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == 25
    found = {name: what for damages, _ in rounds for name, what in damages.items()}
    assert len(found) >= 5
    assert set(found.values()) == {""}
    assert any(num_unfinished for _, num_unfinished in rounds), "no kill hit a save: this test shows nothing"
    path = save(tmp_path, 10**6)
    assert checkpoint_files.newest_whole(tmp_path).checkpoint == path
    assert not [name for name in names(tmp_path) if name.endswith(checkpoint_files.UNFINISHED)]


# ---- a full disk, and what the writer does -------------------------------------------------------------


BIG = {"model.w": torch.zeros(40_000), "optimizer.0.m": torch.zeros(1)}
"""160 kB: on the small disk there is room for one."""


def test_on_a_full_disk_a_save_is_told_nothing_is_left_of_it_and_the_last_good_one_stays(
    small_disk: Any,
) -> None:
    disk = small_disk(256 * 1024)
    told: list[tuple[str, str, int]] = []
    writer = Writer(disk, 3, lambda *event: told.append(event))
    writer.begin(5, BIG, ABOUT)
    writer.wait()
    writer.begin(10, BIG, ABOUT)
    writer.wait()
    failure = "checkpoint at step {} could not be written: No space left on device; the last good one is step-00000005"
    assert told == [("checkpoint", "step-00000005", 5), ("note", failure.format(10), 10)]
    assert names(disk) == ["step-00000005"]
    assert not checkpoint_files.damage(disk / "checkpoints" / "step-00000005")
    with pytest.raises(RunError, match=failure.format(15)):
        writer.finish(15, BIG, ABOUT)
    # There is room again.
    shutil.rmtree(disk / "checkpoints" / "step-00000005")
    writer.finish(20, BIG, ABOUT)
    writer.close()
    assert names(disk) == ["step-00000020"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    told: list[tuple[str, str, int]] = []
    writer = Writer(tmp_path, 3, lambda *event: told.append(event))
    writer.begin(5, TENSORS, ABOUT)
    wait_until(lambda: bool(told), told)
    writer.close()
    ((kind, text, step),) = told
    assert (kind, step) == ("note", 5)
    assert text.startswith("checkpoint at step 5 could not be written: ")
    assert text.endswith("; there is no earlier one")


def test_the_newest_whole_ones_stay(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 2, lambda *_: None)
    for step in (1, 2, 3):
        writer.finish(step, TENSORS, ABOUT)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    truncate(tmp_path / "checkpoints" / "step-00000003" / "model.safetensors")
    writer.finish(4, TENSORS, ABOUT)
    writer.close()
    # The damaged one does not count.
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_the_best_one_stays_beside_the_newest_and_is_found_again(tmp_path: Path) -> None:
    told: list[tuple[str, str, int]] = []
    writer = Writer(tmp_path, 2, lambda *event: told.append(event))
    assert checkpoint_files.best(tmp_path) is None
    for step, score in ((1, 0.5), (2, 0.25), (3, None), (4, None), (5, None)):
        writer.finish(step, TENSORS, ABOUT, None if score is None else Score(step, "loss", score))
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert ("checkpoint", "step-00000002, the best so far: loss 0.25", 2) in told
    best = checkpoint_files.best(tmp_path)
    assert best == checkpoint_files.Best(tmp_path / "checkpoints" / "step-00000002", Score(2, "loss", 0.25))
    assert checkpoint_files.newest_whole(tmp_path).checkpoint == tmp_path / "checkpoints" / "step-00000005"
    # A better one takes its place.
    writer.finish(6, TENSORS, ABOUT, Score(6, "loss", 0.125))
    writer.close()
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    # What is written there by others is not believed.
    (tmp_path / checkpoint_files.BEST).write_text("[]")
    with pytest.raises(ValueError, match=r"best\.json is not what nbgpu writes"):
        checkpoint_files.best(tmp_path)


def test_a_best_mark_that_cannot_be_written_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told: list[tuple[str, str, int]] = []
    writer = Writer(tmp_path, 1, lambda *event: told.append(event))
    writer.finish(1, TENSORS, ABOUT, None)
    monkeypatch.setattr(checkpoint_files, "point_to_best", refuse)
    writer.finish(2, TENSORS, ABOUT, Score(2, "loss", 0.25))
    writer.close()
    noted = "step-00000002, the best so far: loss 0.25, which could not be noted: No space left on device"
    assert ("checkpoint", noted, 2) in told
    assert names(tmp_path) == ["step-00000002"]


def test_a_best_one_waits_for_a_slow_disk_and_only_the_newest_of_them_does(tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def tell(kind: str, text: str, step: int) -> None:
        if step == 1:
            begun.set()
            assert release.wait(400)

    writer = Writer(tmp_path, 9, tell)
    writer.begin(1, TENSORS, ABOUT)
    assert begun.wait(400)
    for step in (2, 3):
        writer.begin(step, TENSORS, ABOUT, Score(step, "loss", 1 / step))
    release.set()
    writer.wait()
    writer.close()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    best = checkpoint_files.best(tmp_path)
    assert best is not None
    assert best.score.step == 3


def test_the_best_of_an_earlier_run_is_found_unless_it_is_gone(tmp_path: Path) -> None:
    score = Score(2, "loss", 0.25)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    best = save(first, 2)
    assert checkpoint.point_to_earlier_best(second, save(first, 4), score) is None
    assert checkpoint.point_to_earlier_best(third, save(second, 6), score) is None
    found = checkpoint_files.best(third)
    assert found == checkpoint_files.Best(best, score)
    # Runs may be moved together.
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    shutil.copytree(tmp_path, moved)
    found = checkpoint_files.best(moved / "third")
    assert found is not None
    assert found.checkpoint == moved / "first" / "checkpoints" / "step-00000002"
    shutil.rmtree(best)
    told = checkpoint.point_to_earlier_best(third, save(second, 6), score)
    assert told is not None
    assert "of step 2 with loss 0.25, is not on the disk any more" in told


def test_what_changes_while_it_is_written_is_written_as_it_was(tmp_path: Path) -> None:
    weight = torch.zeros(1_000_000)
    writer = Writer(tmp_path, 3, lambda *_: None)
    writer.begin(1, {"model.w": weight, "optimizer.0.m": weight}, ABOUT)
    weight += 1
    writer.finish(2, {"model.w": weight, "optimizer.0.m": weight}, ABOUT)
    writer.close()
    for step in (1, 2):
        tensors, _ = checkpoint.load(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert all(bool((tensor == step - 1).all()) for tensor in tensors.values())


def test_a_slow_disk_holds_up_nobody(tmp_path: Path) -> None:
    release = threading.Event()
    told: list[tuple[str, str, int]] = []

    def tell(kind: str, text: str, step: int) -> None:
        told.append((kind, text, step))
        if kind == "checkpoint":
            assert release.wait(400)

    writer = Writer(tmp_path, 3, tell)
    writer.begin(5, TENSORS, ABOUT)
    wait_until(lambda: len(told) == 1, told)
    writer.begin(10, TENSORS, ABOUT)
    release.set()
    writer.finish(15, TENSORS, ABOUT)
    writer.close()
    assert told[1] == ("note", "no checkpoint at step 10: the one of step 5 is still being written", 10)
    assert names(tmp_path) == ["step-00000005", "step-00000015"]


def wait_until(condition: Any, told: object) -> None:
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, f"the writer has told {told}"
        time.sleep(0.005)
