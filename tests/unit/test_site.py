"""The docs site is built without a warning, and every link within it leads somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, chromium

CHECK = REPOSITORY / "docs" / "_site" / "check_links.py"


def _check(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), str(site)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("docs")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-c",
        "docs",
        ".",
        str(folder / "site"),
    ]
    built = subprocess.run(
        [*command, "-d", str(folder / "doctrees")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.mark.long
def test_the_site_is_whole(site: Path) -> None:
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


@pytest.mark.long
@pytest.mark.browser
def test_figures_and_search_work_from_a_disk_with_no_network(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    problems: list[str] = []
    notebook = json.loads((REPOSITORY / "notebooks" / "04_what_ddp_does.ipynb").read_text())
    num_figures = sum(
        "application/vnd.plotly.v1+json" in output.get("data", {})
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((site / "notebooks" / "04_what_ddp_does.html").as_uri())
        page.locator(".nbgpu-figure .main-svg").first.wait_for()
        assert num_figures > 3
        assert page.locator(".nbgpu-figure .plot-container").count() == num_figures
        assert problems == []
        # The search works without the excerpts, which a browser does not let it read from a disk.
        page.goto((site / "search.html").as_uri() + "?q=gloo")
        # The page adds one result after another.
        page.locator(".search li a", has_text=re.compile("^Devices$")).wait_for()
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


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
