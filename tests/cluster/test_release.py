"""A cluster that nobody uses ends by itself, and never in the middle of something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel import Kernel, kernel

from nbgpu.client.host import registry

AFTER_S = 4
HANG_S = 300

TRAIN = """
run = nbgpu.current().train("autoencoder", data="phantoms", patch_size=16, num_phantoms=16, batch_size=2, steps=100_000,
    val_every=0, threads=1, runs_dir={folder!r})
"""


@pytest.fixture
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        yield started


def start(notebook: Kernel, flags: str) -> None:
    done = notebook.run(f"%load_ext nbgpu\nimport nbgpu\n%nbgpu start --gpus none --ranks 2 {flags}")
    assert done.status == "ok", done.error


def is_there() -> bool:
    return bool(registry.entries())


def wait_until_it_is_gone() -> None:
    give_up_s = time.monotonic() + HANG_S
    while is_there():
        assert time.monotonic() < give_up_s, "the cluster was not ended"
        time.sleep(0.1)


def shown_until(notebook: Kernel, begin: str) -> str:
    """Return the next text that is shown, also in another one's place, and begins with `begin`; with an empty
    `begin` the next text is removed."""
    give_up_s = time.monotonic() + HANG_S
    while time.monotonic() < give_up_s:
        message = notebook.client.get_iopub_msg(timeout=HANG_S)
        text = message["content"].get("data", {}).get("text/plain")
        if text is not None and (text.startswith(begin) if begin else not text):
            return str(text)
    raise AssertionError(f"nothing that begins with {begin!r} was shown")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_it_ends_when_nobody_uses_it_and_not_before(notebook: Kernel, tmp_path: Path) -> None:
    start(notebook, f"--release-after-s {AFTER_S}")
    # A cell of the notebook's own, one of the ranks, and one that leaves the ranks at work.
    for code in (
        f"import time; time.sleep({AFTER_S + 2})",
        f"%%distributed\nimport time\ntime.sleep({AFTER_S + 2})",
        "waits = nbgpu.current().submit('import time; time.sleep(8)')",
    ):
        assert notebook.run(code).status == "ok"
        assert is_there()
    time.sleep(AFTER_S + 2)
    assert is_there(), "the ranks were at work"
    assert notebook.run("[result.wait() for result in waits.values()]").status == "ok"

    assert notebook.run(TRAIN.format(folder=str(tmp_path))).status == "ok"
    time.sleep(AFTER_S + 2)
    assert notebook.run("assert not run.over; run.stop(); run.wait(400)").status == "ok"
    assert is_there()

    shown = shown_until(notebook, "The cluster ends at")
    assert "because nothing uses it (release_after_s). Any cell or typing keeps it" in shown
    assert shown_until(notebook, "") == "", "the warning goes with the cluster"
    wait_until_it_is_gone()
    done = notebook.run("1 + 1")
    assert done.value == "2"
    assert "The cluster was ended at" in done.stderr
    assert f"no cell, run or typing had used it for {AFTER_S} s (release_after_s)" in done.stderr
    assert "%nbgpu start" in done.stderr
    again = notebook.run("%%distributed\n1")
    assert "no cluster is running" in again.error
    assert again.stderr == ""
    # And it starts again as if nothing had been.
    start(notebook, "")
    assert notebook.run("%%distributed\nprint(rank)").said(0) == [["0"]]
    assert notebook.run("%nbgpu stop").status == "ok"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_who_types_uses_it(notebook: Kernel) -> None:
    # The first answer takes as long as IPython needs to load its completer.
    notebook.client.complete("impor", 5, reply=True, timeout=180)
    start(notebook, f"--release-after-s {AFTER_S}")
    give_up_s = time.monotonic() + AFTER_S + 3
    while time.monotonic() < give_up_s:
        notebook.client.complete("impor", 5, reply=True, timeout=30)
        time.sleep(0.5)
    assert is_there()
    wait_until_it_is_gone()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_variables_are_saved_first_and_where_that_fails_it_goes_on(
    notebook: Kernel, tmp_path: Path
) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    start(notebook, f"--release-after-s {AFTER_S} --save-on-release {folder}")
    assert notebook.run("%%distributed\nvalue = rank + 5").status == "ok"
    time.sleep(2 * AFTER_S + 1)
    assert is_there(), "the variables could not be saved"
    done = notebook.run("%%distributed\nprint(value)")
    assert "goes on all the same, because its variables could not be saved (save_on_release): " in done.stderr
    assert "has other files, such as notes.txt" in done.stderr
    (folder / "notes.txt").unlink()

    wait_until_it_is_gone()
    done = notebook.run("1 + 1")
    assert f"the ranks' variables are in {folder}: %nbgpu load {folder}" in done.stderr
    start(notebook, "")
    assert notebook.run(f"%nbgpu load {folder}").status == "ok"
    assert notebook.run("%%distributed\nprint(value)").said(0, 1) == [["5"], ["6"]]
    # Whoever learns that the ranks will end soon saves in the same way.
    at_the_end = f"nbgpu.current().save_before_the_end({str(folder)!r}, 'the job has 90 s left')"
    assert notebook.run(f"import nbgpu; told = {at_the_end}").stderr == ""
    warning = f"the job has 90 s left: the ranks' variables are in {folder}: %nbgpu load {folder}"
    done = notebook.run("print(told)")
    assert done.stdout.strip() == warning
    assert done.stderr.strip() == f"T{warning[1:]}", "the next cell shows it"
    assert notebook.run("1").stderr == "", "and no other"
    (folder / "notes.txt").write_text("mine")
    notebook.run(at_the_end)
    done = notebook.run("1")
    assert f"The job has 90 s left, and the ranks' variables could not be saved in {folder}: " in done.stderr
    assert "has other files, such as notes.txt" in done.stderr
    assert notebook.run("%nbgpu stop").status == "ok"
