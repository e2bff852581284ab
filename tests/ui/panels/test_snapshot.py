"""The curves that stay in the notebook, and the report."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plotly.graph_objects as go
import pytest
from recorded import RecordedRun
from rows import row

from nbgpu.run_folder.reader import Reader
from nbgpu.text.palette import rank_color
from nbgpu.ui.run.snapshot import bundle, page, report_html, write_report

NAMES = [
    "Loss",
    "Validation: psnr (dB)",
    "Memory (GiB)",
    "Utilization (%)",
    "Throughput (samples/s)",
    "kl",
]
"""The charts of a recorded run."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = RecordedRun(tmp_path_factory.mktemp("run"), steps=60, step_s=0.002)
    run.wait(30)
    return run


def test_the_bundle_shows_itself_with_and_without_plotly(run: Any) -> None:
    shown = bundle(run)
    assert list(shown) == ["application/vnd.plotly.v1+json", "text/html", "text/plain"]
    assert shown["text/plain"].startswith("autoencoder: finished, step 60 of 60")


def test_the_figure_is_one_that_plotly_takes(run: Any) -> None:
    figure = bundle(run)["application/vnd.plotly.v1+json"]
    json.dumps(figure, allow_nan=False)
    checked = go.Figure(data=figure["data"], layout=figure["layout"])
    titles = [a.text for a in checked.layout.annotations if a.text.startswith("<b>")]
    assert titles == [f"<b>{name}</b>" for name in NAMES]
    raw = next(t for t in checked.data if t.customdata is not None)
    assert raw.hovertemplate == "step %{x}, rank 0: %{y:.4g}, smoothed %{customdata:.4g}<extra></extra>"
    # The newest raw value has a dot, which the smoothed line does not hide.
    assert [size for size in raw.marker.size if size] == [6]
    by_rank = {t.name: t.line.color for t in checked.data if t.name.startswith("rank")}
    assert by_rank == {"rank 0": rank_color(0), "rank 1": rank_color(1)}


def test_the_letters_of_the_pictures_are_readable_where_the_page_is_narrow(run: Any) -> None:
    shown = bundle(run)["text/html"]
    assert re.findall(r"</span> (rank \d|validation)", shown) == ["rank 0", "rank 1", "validation"]
    encoded = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)" style="flex:1 1 (\d+)px', shown)
    assert len(encoded) == len(NAMES)
    for picture, least_px in encoded:
        # Two are beside each other in the output of a page of 900 pixels, and one is in that of a telephone.
        assert 2 * int(least_px) + 8 <= 617
        root = ElementTree.fromstring(base64.b64decode(picture))
        words = [e for e in root.iter() if e.tag.endswith("text")]
        assert {"".join(e.itertext()).strip() for e in words} & {*NAMES}
        sizes = re.findall(r"font-size: ([\d.]+)px", " ".join(e.get("style", "") for e in words))
        width = float(root.attrib["viewBox"].split()[2])
        assert min(map(float, sizes)) * int(least_px) / width >= 11


def test_a_run_with_nothing_recorded_is_a_line_of_text(tmp_path: Path) -> None:
    run: Any = RecordedRun(tmp_path, steps=1, step_s=0.001)
    run.wait(30)
    run.reader = Reader(tmp_path / "empty", 2, live=False)
    shown = bundle(run)
    assert list(shown) == ["text/plain"]
    assert shown["text/plain"].startswith("autoencoder: finished")


def test_the_report_opens_with_no_network(run: Any) -> None:
    path = write_report(run)
    assert path == run.folder / "report.html"
    told = path.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", told)
    for words in ("batch_size", "samples for each rank", "NVIDIA H200", "trilinear", "23.1", "step-40"):
        assert words in told


@row(
    "a name in a run holds `<!--<script>`",
    "the report's charts are drawn, and nothing of it runs",
    bound_s=None,
)
def test_no_name_ends_the_script_of_the_report() -> None:
    figure = {"data": [{"name": "<!--<script></script>"}], "layout": {}, "config": {}}
    told = page(title="t", heading="h", headline="l", body='<div id="charts"></div>', figures=[figure])
    (drawn,) = re.findall(r"const figure of (.*)\) {", told)
    assert "<" not in drawn
    assert json.loads(drawn) == [figure]


def test_the_report_shows_what_a_recipe_says_as_text_and_not_as_html(run: Any) -> None:
    told = report_html(run)
    assert "&lt;b&gt;made up&lt;/b&gt;" in told
    assert "<b>made up</b>" not in told
