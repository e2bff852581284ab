"""Every picture that a recipe draws names its axes and their units, and says what its colours mean."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from nbgpu.recipes import side_by_side
from nbgpu.recipes.autoencoder import recipe
from nbgpu.recipes.lithography import overlay, prediction
from nbgpu.recipes.microstructure import pictures as microstructure
from nbgpu.recipes.side_by_side import Colours, Grid
from nbgpu.recipes.survival import pictures as survival
from nbgpu.text.palette import TEXT_COLOR

PHASE = Colours("number of the phase", 0, 1, "viridis")
NM = Grid("nm", 25.0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved while the test runs."""
    figures: list[Figure] = []
    save = Figure.savefig

    def note(figure: Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", note)
    return figures


def _of_autoencoder(folder: Path) -> None:
    images = torch.rand(3, 1, 12, 10, 8)
    recipe.pictures(images, images)


def _of_microstructure(folder: Path) -> None:
    phases = (torch.rand(8, 9, 10) > 0.5).long()
    microstructure.slices(phases, PHASE)
    microstructure.slices(phases[0], PHASE)
    microstructure.correlations(torch.rand(15, 15), torch.rand(15, 15))


def _of_survival(folder: Path) -> None:
    survival.slices([torch.rand(1, 12, 10, 8)] * 3)
    times, events = np.arange(1.0, 7.0), np.array([True, False] * 3)
    survival.curves(times, events, np.array([0, 0, 0, 1, 1, 1]), 2)


def _of_lithography(folder: Path) -> None:
    masks = torch.zeros(2, 32, 32)
    masks[:, 8:24, 10:20] = 1
    overlay.row(masks, Colours("transmission", 0, 1), NM)
    overlay.draw_contours(masks, masks, masks, 0.5, 25.0)
    overlay.draw_errors(masks, masks, 0.5, 25.0, margin=4)
    prediction.write_picture(masks[0], masks[0], masks[0], 0.5, 25.0, folder / "mask")


@pytest.mark.slow
@pytest.mark.parametrize("draw", [_of_autoencoder, _of_microstructure, _of_survival, _of_lithography])
def test_axes_and_colours_have_names(
    draw: Callable[[Path], None], drawn: list[Figure], tmp_path: Path
) -> None:
    draw(tmp_path)
    assert drawn
    for figure in drawn:
        assert _without_names(figure) == []


def test_a_picture_can_be_read_on_a_white_and_on_a_dark_page(drawn: list[Figure], tmp_path: Path) -> None:
    _of_survival(tmp_path)
    for figure in drawn:
        assert figure.patch.get_alpha() == 0, "the page is not seen around the axes"
        colours = {text.get_color() for text in figure.findobj(Text) if text.get_text()}
        assert colours == {TEXT_COLOR}


def test_a_block_names_its_three_edges(drawn: list[Figure]) -> None:
    microstructure.block(torch.zeros(8, 9, 10), PHASE)
    texts = [text.get_text() for axes in drawn[0].axes for text in axes.texts]
    assert texts == ["axis 0, 8 voxels", "axis 1, 9 voxels", "axis 2, 10 voxels"]
    assert _without_names(drawn[0]) == []


def test_the_ends_of_the_axes_are_the_ends_of_the_image() -> None:
    figure = side_by_side.row([np.zeros((4, 6))] * 2, PHASE, NM)
    first, second, bar = figure.axes
    assert [label.get_text() for label in first.get_xticklabels()] == ["0", "150"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["0", "100"]
    assert (first.get_xlabel(), first.get_ylabel()) == ("x, nm", "y, nm")
    assert not any(label.get_text() for label in second.get_yticklabels())
    assert bar.get_ylabel() == "number of the phase"
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "1"]


@pytest.mark.parametrize("goes_up", [True, False])
def test_each_pixel_is_drawn_as_a_square_where_it_is(goes_up: bool) -> None:
    image = np.zeros((4, 6))
    image[0, 1] = 1
    shown = _pixels(side_by_side.row([image], PHASE, Grid(goes_up=goes_up)))
    rows, columns = (shown[..., 0] > 0.98).nonzero()
    yellow = (shown[rows, columns, 1] > 0.85) & (shown[rows, columns, 2] < 0.2)
    rows, columns = rows[yellow], columns[yellow]
    left = columns < 0.8 * shown.shape[1]  # not those of the bar
    rows, columns = rows[left], columns[left]
    # 19 pixels of the screen each, so that 6 of them are as wide as an image at least is.
    assert abs(np.ptp(rows) + 1 - 19) <= 1
    assert abs(np.ptp(columns) + 1 - 19) <= 1
    assert bool(rows.mean() > shown.shape[0] / 2) == goes_up


def _pixels(figure: Figure) -> np.ndarray:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    pixels: np.ndarray = matplotlib.image.imread(buffer)
    return pixels


def _without_names(figure: Figure) -> list[str]:
    """The axes of a figure without names; those beside others share the names of the first."""
    missing = []
    images = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    for axes in images:
        if axes.texts and not axes.axison:
            continue
        if not axes.get_xlabel() or not _vertical(axes, images[0]):
            missing.append(axes.get_title() or axes.get_label())
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    missing += ["a bar of colours" for bar in bars if not bar.get_ylabel()]
    if not bars and any(axes.images and axes.images[0].get_array().ndim == 2 for axes in images):
        # An image without a bar is a mask, which is black and white.
        values = {float(v) for axes in images for v in np.unique(axes.images[0].get_array())}
        missing += [] if values <= {0.0, 1.0} else ["colours"]
    return missing


def _vertical(axes: Axes, first: Axes) -> str:
    has_own = any(label.get_text() for label in axes.get_yticklabels())
    return axes.get_ylabel() or ("" if has_own else first.get_ylabel())
