"""What a run is judged by: tiles that do not leak, edges that are lost, violations, and the band of the
process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.edges import contest_sites
from nbgpu.recipes.lithography.imaging import abbe
from nbgpu.recipes.lithography.measures import Measures
from nbgpu.recipes.lithography.pupil import Optics
from nbgpu.recipes.lithography.recipe import Lithography
from nbgpu.recipes.lithography.resist import Resist
from nbgpu.recipes.lithography.samples import build_resist, load_pairs, margin_pixels
from nbgpu.recipes.lithography.sources import Source
from nbgpu.recipes.lithography.tiles import distinct, tiles, without_margin
from nbgpu.recipes.lithography.window import band_nm2, pv_band_nm2


def _config(**settings: object) -> LithographyConfig:
    config = train_config("lithography", **settings)  # type: ignore[arg-type]
    assert isinstance(config, LithographyConfig)
    return config


def _layout(folder: Path) -> Path:
    """A layout of 6 x 3 tiles of 400 nm in which the first two columns of tiles are alike."""
    boxes = [(0, 0, 20, 20), (2380, 1180, 20, 20)]
    for row in range(3):
        boxes += [(400 * column + 60, 400 * row + 90, 250, 100) for column in (0, 1)]
        boxes += [
            (400 * column + 40 + 20 * row, 400 * row + 20, 100 + 40 * column, 360) for column in (2, 3, 4, 5)
        ]
    path = folder / "chip.glp"
    lines = [f"RECT N M1 {x} {y} {w} {h}" for x, y, w, h in boxes]
    path.write_text("\n".join(["EQUIV 1 1000 MICRON +X,+Y", *lines]))
    return path


def _layout_settings(tmp_path: Path) -> dict[str, object]:
    return {
        "data": str(_layout(tmp_path)),
        "size": 16,
        "pixel_nm": 25.0,
        "source_cells": 5,
        "val_fraction": 0.3,
    }


def test_no_tile_is_in_training_and_held_out_at_the_same_time(tmp_path: Path) -> None:
    config = _config(**_layout_settings(tmp_path))
    every, margin = load_pairs(config), margin_pixels(config)
    inner = [without_margin(pair.mask, margin).numpy().tobytes() for pair in every]  # type: ignore[arg-type]
    assert len(every) == 18
    # Two columns of three; a corner has a small box more.
    assert len(set(inner)) == len(distinct(every, margin)) == 14
    parts = Lithography(config)._parts()
    both = [without_margin(item["mask"], margin).numpy().tobytes() for item in parts.everything]
    assert len(set(both)) == len(both) == 14
    loaders = Lithography(config).build_loaders(0, 1)
    assert any("4 mask(s) repeat another one" in warning for warning in loaders.warnings)
    loaders.close()


def test_the_image_of_a_tile_is_that_of_the_layout_around_it(tmp_path: Path) -> None:
    config = _config(**_layout_settings(tmp_path) | {"source_cells": 31})
    margin = margin_pixels(config)
    # An optical diameter: 3.2 * 193 / 0.85 = 727 nm.
    assert margin == 30

    def tile(beside: int) -> Tensor:
        every = tiles(Path(config.data), "", 16, 25.0, beside)
        (mask,) = (pair.mask for pair in every if pair.name.endswith("row 1 column 2"))
        assert isinstance(mask, Tensor)
        imager = abbe(Optics(), Source(num_cells=31).points(), tuple(mask.shape[1:]), 25.0)  # type: ignore[arg-type]
        return without_margin(imager(mask.double()), beside)

    (found,) = (pair for pair in load_pairs(config) if pair.name.endswith("row 1 column 2"))
    made = without_margin(Lithography(config)._steps()({"mask": found.mask})["aerial"], margin)
    true = tile(80)
    apart, repeated = (float((image - true).square().mean().sqrt()) for image in (made, tile(0)))
    assert apart < repeated / 3
    assert float((made - true).abs().max()) < 0.01


def test_the_loss_does_not_see_the_margin(tmp_path: Path) -> None:
    recipe = Lithography(_config(**_layout_settings(tmp_path)))
    model = recipe.build_model()
    batch = recipe.example(2)
    assert batch["mask"].shape == (2, 1, 76, 76)
    before = recipe.loss(model, batch)["loss"].item()
    batch["aerial"][..., :30] += 1
    assert recipe.loss(model, batch)["loss"].item() == before
    batch["aerial"][..., 30] += 1
    assert recipe.loss(model, batch)["loss"].item() > before + 0.01


def _bars(widths: list[int]) -> Tensor:
    """Images of vertical bars, each 32 pixels wide with a soft edge, (N, 1, 32, 32)."""
    across = (torch.arange(32) + 0.5 - 16).abs()
    return torch.stack([(width / 2 - across).expand(1, 32, 32) for width in widths])


def test_lost_edges_and_widths_are_counted_and_not_passed_over() -> None:
    measures = Measures(Resist(0.0), 10.0)
    true, found = _bars([8, 8, 8]), _bars([8, 10, -40])
    reference = measures.reference(true, designs=(true > 0).float())
    errors = measures.errors(found, reference)
    # The second bar is a pixel wider on either side; the third does not print.
    assert errors["edge_nm"] == pytest.approx(5.0, abs=0.1)
    assert errors["edges_lost"] == 2 * 32
    assert errors["cd_nm"] == pytest.approx(10.0, abs=0.1)
    assert errors["cds_lost"] == 1
    nothing = measures.errors(true, reference)
    assert (nothing["edges_lost"], nothing["cds_lost"], nothing["edge_nm"]) == (0, 0, 0)


def test_violations_are_counted_at_the_contests_sites() -> None:
    design = torch.zeros(40, 40)
    design[5:25, 10:14] = 1  # 200 nm tall and 40 nm wide, in pixels of 10 nm
    sites = contest_sites(design, 10.0)
    ends = [(120.0, 50.0), (120.0, 250.0)]
    sides = [(x, y) for x in (100.0, 140.0) for y in (90.0, 130.0, 170.0, 210.0)]
    assert sorted(map(tuple, sites.points_nm.tolist())) == sorted(ends + sides)
    assert {tuple(normal) for normal in sites.normals.tolist()} == {(1, 0), (-1, 0), (0, 1), (0, -1)}
    measures = Measures(Resist(0.0), 10.0)
    reference = measures.reference(_bars([8]), designs=(_bars([8]) > 0).float())
    counts = [measures.errors(_bars([width]), reference)["epe_violations"] for width in (8, 10, 12, -40)]
    # Edges of 320 nm have 7 sites each; 10 nm off is none, 20 nm are, and so is what does not print.
    assert counts == [0, 0, 14, 14]


def test_the_band_between_two_doses_of_a_cosine() -> None:
    """1/2 + cos(2 pi x / P) / 4 prints above 1/2 over P / pi * arccos(4 (t / dose - 1/2))."""
    x = (torch.arange(64, dtype=torch.float64) / 16).expand(64, 64)
    image = 0.5 + torch.cos(2 * math.pi * x) / 4
    widths = [16 / math.pi * math.acos(4 * (0.5 / dose - 0.5)) for dose in (1.2, 0.9)]
    expected = 4 * (widths[0] - widths[1]) * 64 * 10.0**2
    assert band_nm2(1.2 * image, 0.9 * image, 0.5, 10.0) == pytest.approx(expected, rel=0.01)
    assert band_nm2(image, image, 0.5, 10.0) == 0


def test_the_band_of_a_mask_grows_where_there_is_less_contrast() -> None:
    lines = (torch.arange(48) % 16 < 8).double().expand(48, -1)
    lens, source = Optics(na=0.85), Source(num_cells=7)
    sharp = pv_band_nm2(lines, lens, source, Resist(), 20.0)
    blurred = pv_band_nm2(lines, lens, source, Resist(diffusion_nm=60.0), 20.0)
    assert 0 < sharp < blurred
    assert pv_band_nm2(lines, lens, source, Resist(), 20.0, margin=8) == pytest.approx(
        sharp * 32**2 / 48**2, rel=0.2
    )


def test_lithobenchs_folders_have_lithobenchs_threshold(tmp_path: Path) -> None:
    (tmp_path / "MetalSet" / "pixelILT").mkdir(parents=True)
    assert build_resist(_config(data=str(tmp_path), pixel_nm=16.0)).threshold == 0.225
    assert build_resist(_config(data=str(tmp_path), pixel_nm=16.0, resist_threshold=0.4)).threshold == 0.4
    assert build_resist(_config()).threshold == 0.3


@pytest.mark.parametrize(("na", "warned"), [(0.8, False), (0.85, True)])
def test_a_high_na_is_said_to_be_scalar(na: float, warned: bool) -> None:
    config = _config(numerical_aperture=na, num_masks=4, size=16, source_cells=3)
    loaders = Lithography(config).build_loaders(0, 1)
    assert any("scalar" in warning for warning in loaders.warnings) == warned
    loaders.close()
