"""What tables and pictures of a study show where the size of the model differs between its points."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nbgpu.client.scaling import study_table
from nbgpu.config import ClusterConfig
from nbgpu.performance.study_results import Gap, Measured, PointSummary, summarise
from nbgpu.planning.studies import StudyConfig, StudyPlan
from nbgpu.text.html import as_image
from nbgpu.ui.study import view
from nbgpu.ui.study.chart import chart


class Made:
    """A study of one rank with two repeats of each point. Points with None instead of a size have failed."""

    def __init__(self, vary: str, sizes: dict[Any, int | None]) -> None:
        config = StudyConfig(repeats=2)
        self.plan = StudyPlan("autoencoder", config, ClusterConfig(), vary, list(sizes), {})
        self.folder: Path | None = None
        self._sizes = sizes

    def describe(self) -> str:
        return "measuring"

    def summary(self) -> Sequence[PointSummary | Gap]:
        found = [
            Measured(point, repeat, (), why_failed="no memory")
            if size is None
            else Measured(point, repeat, (0.1 + point,) * 3, {"forward_s": 0.1}, parameters=size)
            for repeat in range(2)
            for point, size in enumerate(self._sizes.values())
        ]
        return summarise([(value, 1, 4) for value in self._sizes], found)


CHANNELS = Made("channels", {(32, 64): 70_000, (8, 16): 5_000, (64, 128): None, (16, 32): 19_000})


def test_the_picture_has_the_number_of_parameters_on_a_logarithmic_axis() -> None:
    drawn = chart(CHANNELS)
    assert (
        drawn.title == "Samples per second by number of parameters (channels), measured: autoencoder, 1 rank"
    )
    assert drawn.x_title == "number of parameters"
    assert drawn.x == [5_000, 19_000, 70_000]
    assert drawn.y == pytest.approx([4 / 1.1, 4 / 3.1, 4 / 0.1])
    assert drawn.names == ["(8, 16)", "(16, 32)", "(32, 64)"]
    assert drawn.parts_x_title == "channels"
    figure = view.plotly_figure(CHANNELS)
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert figure["data"][0]["x"] == drawn.x
    assert figure["layout"]["xaxis"]["ticktext"] == ["5,000", "19,000", "70,000"]
    # A title of one line would reach over the other chart.
    assert figure["layout"]["annotations"][0]["text"].replace("<br>", " ") == drawn.title
    assert "<br>" in figure["layout"]["annotations"][0]["text"]
    assert figure["data"][1]["x"] == drawn.names
    svg = view.svg(CHANNELS)
    assert "number of parameters" in svg
    assert "(16, 32)" in svg
    # The page gives each chart 380 pixels at least, and stacks them where there is less place.
    assert "flex: 1 1 380px" in view.page(CHANNELS, svg)
    widths = [float(width) for width in re.findall(r'viewBox="0 0 ([\d.]+) ', svg)]
    letters = [float(size) * 380 / max(widths) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", svg)]
    assert len(widths) == 2
    assert min(letters) >= 11, letters
    assert as_image(svg).count("<img ") == 2


@pytest.mark.parametrize(
    ("study", "axis"),
    [
        (Made("amp", {"off": 5_000, "bf16": 5_000}), ["off", "bf16"]),
        (Made("width", {64: 5_000, 128: 9_000}), [64, 128]),
        (Made("channels", {"(8, 16)": 0, "(16, 32)": 0}), ["(8, 16)", "(16, 32)"]),
        (Made("channels", {"(8, 16)": 0, "(16, 32)": 19_000}), ["(8, 16)", "(16, 32)"]),
    ],
    ids=["one size", "numbers", "unknown", "partly unknown"],
)
def test_otherwise_the_axis_has_the_values(study: Made, axis: list[Any]) -> None:
    drawn = chart(study)
    assert drawn.title == f"Samples per second by {study.plan.vary}, measured: autoencoder, 1 rank"
    assert drawn.x == axis
    figure = view.plotly_figure(study)
    assert "type" not in figure["layout"]["xaxis"]
    # Between two names there is nothing that a line could show.
    assert figure["data"][0]["mode"] == ("markers" if isinstance(axis[0], str) else "lines+markers")


def test_numbers_far_apart_are_on_a_logarithmic_axis() -> None:
    far = Made("bucket_mb", {0.05: 5_000, 1: 5_000, 25: 5_000})
    axis = view.plotly_figure(far)["layout"]["xaxis"]
    assert (axis["type"], axis["ticktext"]) == ("log", ["0.05", "1", "25"])
    assert ">25<" in view.svg(far)


def test_the_tables_have_a_column_where_the_size_differs() -> None:
    shown = "\n".join(study_table.lines(CHANNELS.plan, CHANNELS.summary()))
    assert " parameters " in shown
    assert "70,000" in shown
    assert '<th scope="col">parameters</th>' in view.table_html(CHANNELS)
    assert "<td>19,000</td>" in view.table_html(CHANNELS)
    same = Made("amp", {"off": 5_000, "bf16": 5_000})
    assert "parameters" not in "\n".join(study_table.lines(same.plan, same.summary()))
    assert "parameters" not in view.table_html(same)


def test_the_frame_has_whole_numbers_and_none_where_nothing_was_measured() -> None:
    column = study_table.frame(CHANNELS.plan, CHANNELS.summary())["parameters"]
    assert column.isna().tolist() == [False, False, True, False]
    assert column.dropna().tolist() == [70_000, 5_000, 19_000]
    assert str(column.dtype) == "Int64"
    unknown = Made("amp", {"off": 0, "bf16": 0})
    assert "parameters" not in study_table.frame(unknown.plan, unknown.summary())
