"""Every page of docs/howto does what it says, one after the other in one notebook, as a reader would try them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from conftest import REPOSITORY
from kernel import kernel

OF_OTHERS = "train_with_other_libraries"
"""The page of libraries that nbgpu does not need; test_other_libraries.py has its tests."""
FOLDER = REPOSITORY / "docs" / "howto"
PAGES = re.findall(r"^([a-z_]+)$", (FOLDER / "index.md").read_text(), re.MULTILINE)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_TWO_CPU_RANKS = {"%nbgpu start": "%nbgpu start --gpus none --ranks 2", "autoencoder --": "autoencoder --gpus none --"}


def test_the_index_names_every_page() -> None:
    assert set(PAGES) == {page.stem for page in FOLDER.glob("*.md")} - {"index"}


@pytest.mark.parametrize("page", [page for page in PAGES if page != OF_OTHERS])
def test_a_page_is_short_and_says_where_to_read_on(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text()
    assert text.startswith("# ")
    assert re.search(r"More:\s\[", text)
    written = [line for line in BLOCK.sub("", text).splitlines()[1:] if line]
    assert len(written) <= 10
    assert BLOCK.search(text)


@pytest.mark.long
@pytest.mark.release
@pytest.mark.timeout(900)
def test_every_page_in_one_notebook(tmp_path: Path) -> None:
    """One test, because a page goes on where the page before it ended."""
    _make_volumes(tmp_path / "volumes")
    commands = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with kernel() as notebook:
        assert notebook.run(f"%cd -q {tmp_path}").status == "ok"
        for page in PAGES:
            if page == OF_OTHERS:
                continue
            for kind, code in BLOCK.findall((FOLDER / f"{page}.md").read_text()):
                for said, done in ON_TWO_CPU_RANKS.items():
                    code = code.replace(said, done)
                if kind == "python":
                    cell = notebook.run(code, timeout_s=240)
                    assert cell.status == "ok", f"{page}: {cell.error}\n{cell.written}"
                    continue
                runs = sorted((tmp_path / "nbgpu_runs").glob("*-autoencoder-*/run_info.json"))
                code = code.replace("RUN_FOLDER", str(runs[-1].parent) if runs else "")
                # torchrun would leave a folder for the logs of its processes in the temporary one.
                code = code.replace("torchrun ", f"torchrun --log-dir {tmp_path / 'logs'} ")
                ran = subprocess.run(
                    ["bash", "-e", "-c", code],
                    cwd=tmp_path,
                    env=commands,
                    capture_output=True,
                    text=True,
                    timeout=600,
                    check=False,
                )
                assert ran.returncode == 0, f"{page}: {code}\n{ran.stdout}\n{ran.stderr}"
        assert notebook.run("%nbgpu stop").status == "ok"
    assert (tmp_path / "made" / "predictions.csv").read_text().count("\n") == 9


def _make_volumes(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for index in range(8):
        values = rng.uniform(0, 1000, (20, 20, 20)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{index}.nii.gz")
