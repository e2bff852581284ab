"""The docs site is built without a warning, and every link within it leads somewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

CHECK = REPOSITORY / "docs" / "_site" / "check_links.py"


def _check(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), str(site)], capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_the_site_is_built_and_whole(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(site)]
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    checked = _check(site)
    assert checked.returncode == 0, checked.stderr
    # Every notebook, how-to page and recipe is a page, and every public name stands in the reference.
    for folder, pattern in (("notebooks", "*.ipynb"), ("docs", "**/*.md")):
        for source in (REPOSITORY / folder).glob(pattern):
            assert (site / source.relative_to(REPOSITORY)).with_suffix(".html").exists(), source
    reference = (site / "docs" / "reference.html").read_text()
    import nbgpu

    missing = [
        name for name in nbgpu.__all__ if f'id="nbgpu.{name}"' not in reference and "Error" not in name
    ]
    assert set(missing) <= {"ClusterConfig", "TrainConfig"}
    index = json.loads(
        (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    )
    assert {"checkpoint", "gloo"} <= {word for word in index["terms"] if word in ("checkpoint", "gloo")}


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '<a href="two.html#here">x</a><a href="https://example.org/none">y</a>'
    )
    (tmp_path / "two.html").write_text('<p id="here"></p><a href="one.html"></a>')
    assert _check(tmp_path).returncode == 0
    (tmp_path / "three.html").write_text('<a href="two.html#there"></a><img src="gone.png">')
    checked = _check(tmp_path)
    assert checked.returncode == 1
    assert "three.html: two.html#there: there is no such heading" in checked.stderr
    assert "three.html: gone.png: there is no such file" in checked.stderr
