"""docs/from-torchrun.md is true: its cells run in order, and say what the page says."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from conftest import REPOSITORY
from kernel import kernel

pytestmark = pytest.mark.long

PAGE = REPOSITORY / "docs" / "from-torchrun.md"
CELLS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE.read_text(), re.DOTALL)


def test_the_page_has_all_steps() -> None:
    assert len(CELLS) > 18
    headings = re.findall(r"^## (.*)", PAGE.read_text(), re.MULTILINE)
    assert len(headings) == 9
    assert sum("Error" in shown or "ranks" in shown for _, shown in CELLS) >= 5


def test_every_cell_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the page writes a checkpoint
    with kernel() as notebook:
        for code, shown in CELLS:
            done = notebook.run(code)
            fails = "Error:" in shown or ".to(rank)" in code or "mp.spawn" in code
            assert done.status == ("error" if fails else "ok"), (code, done.error)
            said = "\n".join([done.stdout, done.value, done.error, done.stderr])
            for line in shown.splitlines():
                assert line in said, (code, line, said)
        after = notebook.run("%%distributed\nassert losses[-1] < 0.5 * losses[0]\nlen(losses), lr")
        assert after.said(0, 1) == [["(200, 0.003)"], ["(200, 0.003)"]], after.error
        notebook.run("%nbgpu stop")
    # torch's processes write their errors into these files, and torch leaves them behind.
    for left in Path(tempfile.gettempdir()).glob("pytorch-errorfile-*"):
        left.unlink()
