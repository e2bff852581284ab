"""Masks from files: exact coverage, and every bad input told at once."""

from __future__ import annotations

from pathlib import Path

import gdstk
import numpy as np
import pytest
import torch
from PIL import Image

from nbgpu.config import train_config
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.layouts import read_layout
from nbgpu.recipes.lithography.lithobench import (
    find_lithobench,
    load_design,
    load_png,
    load_print,
)
from nbgpu.recipes.lithography.pairs import read_npz
from nbgpu.recipes.lithography.rasterise import rasterised
from nbgpu.recipes.lithography.recipe import Lithography
from nbgpu.recipes.lithography.tiles import tiles

REAL = Path(__file__).resolve().parents[6] / "shared" / "data" / "layouts"
REAL = REAL if REAL.is_dir() else Path("/work/shared/data/layouts")
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real layouts are not at {REAL}")

GLP = """BEGIN     /* a comment */
EQUIV  1  1000  MICRON  +X,+Y
CNAME Temp_Top
LEVEL M1

CELL Temp_Top PRIME
   RECT N M1  10  20  30  40
   PGON N M1  30  50  70  50  70  90  50 90 50 70 30 70
ENDMSG
"""


def _rectangle(x: float, y: float, width: float, height: float) -> np.ndarray:
    return np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])


def test_coverage_is_exact_and_overlaps_count_once() -> None:
    both = [_rectangle(3, 4, 14, 11), _rectangle(10, 10, 12, 30)[::-1]]
    found = rasterised(both, (0, 0), (5, 4), 8.0)
    fine = rasterised(both, (0, 0), (40, 32), 1.0)
    assert set(np.unique(fine)) == {0.0, 1.0}
    np.testing.assert_allclose(found, fine.reshape(5, 8, 4, 8).mean(axis=(1, 3)), atol=1e-7)
    assert fine.sum() == 14 * 11 + 12 * 30 - 7 * 5
    half = rasterised([_rectangle(0.25, 0.5, 1.0, 0.25)], (0, 0), (1, 2), 1.0)
    np.testing.assert_allclose(half, [[0.75 * 0.25, 0.25 * 0.25]], atol=1e-7)
    assert rasterised([_rectangle(-9, -9, 3, 3)], (0, 0), (2, 2), 1.0).sum() == 0


def test_glp_gds_and_oasis_give_the_same_polygons(tmp_path: Path) -> None:
    (tmp_path / "a.glp").write_text(GLP)
    library = gdstk.Library(unit=1e-6, precision=1e-9)  # in micrometres, as most files are
    part = library.new_cell("part")
    part.add(gdstk.rectangle((0, 0), (0.03, 0.04), layer=7))
    top = library.new_cell("top")
    top.add(gdstk.Reference(part, (0.01, 0.02)))
    corners = np.array([[30, 50], [70, 50], [70, 90], [50, 90], [50, 70], [30, 70]]) / 1000
    top.add(gdstk.Polygon(corners, layer=7))
    library.write_gds(tmp_path / "a.gds")
    library.write_oas(tmp_path / "a.oas")
    images = [
        rasterised(read_layout(str(tmp_path / name), layer), (0, 0), (10, 10), 10.0)
        for name, layer in (("a.glp", "M1"), ("a.gds", "7"), ("a.oas", "7/0"))
    ]
    assert images[0].sum() == 3 * 4 + 4 * 4 - 2 * 2 - 1 * 1
    np.testing.assert_allclose(images[1], images[0], atol=1e-6)
    np.testing.assert_allclose(images[2], images[0], atol=1e-6)


def test_what_is_wrong_with_a_layout_is_said_with_its_place(tmp_path: Path) -> None:
    bad = tmp_path / "bad.glp"
    bad.write_text(GLP + "   RECT N M1 1 2 3\n   PGON N M1 0 0 1 x\n   RECT N M1 nan 2 3 4\n")
    expected = r"line 10: a RECT needs(.|\n)*line 11: could not convert(.|\n)*line 12: coordinates must be"
    with pytest.raises(DataError, match=expected):
        read_layout(bad)
    two = tmp_path / "two.glp"
    two.write_text(GLP + "   RECT N M2 1 2 3 4\n")
    with pytest.raises(DataError, match=r"several layers\. Name one with layer=: M1, M2"):
        read_layout(two)
    with pytest.raises(DataError, match=r"has no layer M3\. Layers: M1, M2"):
        read_layout(two, "M3")
    (tmp_path / "bad.gds").write_bytes(b"not a layout")
    with pytest.raises(DataError, match=r"bad\.gds: (cannot be read as GDSII|has no polygon)"):
        read_layout(tmp_path / "bad.gds")


def _save(path: Path, *cells: gdstk.Cell) -> Path:
    library = gdstk.Library(unit=1e-9, precision=1e-9)
    library.add(*cells)
    (library.write_oas if path.suffix == ".oas" else library.write_gds)(path)
    return path


@pytest.mark.parametrize("suffix", [".gds", ".oas"])
def test_several_top_cells_are_not_laid_over_one_another(tmp_path: Path, suffix: str) -> None:
    cells = [
        gdstk.Cell(f"INV_{number}").add(gdstk.rectangle((0, 0), (100, 50 * number))) for number in (1, 2)
    ]
    path = _save(tmp_path / f"library{suffix}", *cells)
    with pytest.raises(DataError, match=r"2 top cells.*Name one with cell=: INV_1, INV_2"):
        read_layout(path)
    (polygon,) = read_layout(path, cell="INV_2")
    assert polygon.max(axis=0).tolist() == [100, 100]
    with pytest.raises(DataError, match=r"no cell 'INV_3'\. Top cells: INV_1, INV_2"):
        read_layout(path, cell="INV_3")
    (tmp_path / "a.glp").write_text(GLP)
    with pytest.raises(DataError, match="no cells to choose from"):
        read_layout(tmp_path / "a.glp", cell="INV_2")


def test_a_cell_that_a_layout_lacks_is_named(tmp_path: Path) -> None:
    part = gdstk.Cell("part").add(gdstk.rectangle((0, 0), (100, 100)))
    top = gdstk.Cell("top").add(gdstk.rectangle((0, 0), (100, 100)), gdstk.Reference(part, (500, 0)))
    with pytest.raises(DataError, match=r"refers to cells that it lacks: part\."):
        read_layout(_save(tmp_path / "dangling.gds", top))
    assert len(read_layout(_save(tmp_path / "whole.gds", top, part))) == 2


def test_what_lies_between_far_marks_takes_no_memory(tmp_path: Path) -> None:
    marks = gdstk.Cell("marks").add(*(gdstk.rectangle((x, x), (x + 400, x + 400)) for x in (0, 10_000_000)))
    pairs = tiles(_save(tmp_path / "marks.gds", marks), "", 64, 5.0, margin=20)
    assert sum(float(pair.mask.double().sum()) for pair in pairs) * 25 >= 2 * 400**2
    inner = sum(float(pair.mask[:, 20:-20, 20:-20].double().sum()) for pair in pairs)
    assert inner * 25 == pytest.approx(2 * 400**2)
    assert len(pairs) <= 8
    whole = gdstk.Cell("whole").add(gdstk.rectangle((0, 0), (10_000_000, 10_000_000)))
    with pytest.raises(DataError, match=r"covers 1e\+04 x 1e\+04 um.*Name a smaller cell"):
        tiles(_save(tmp_path / "whole.gds", whole), "", 64, 5.0)


def test_tiles_with_margins_are_cuts_of_the_whole_layout(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    corners = generator.integers(0, 1500, (40, 2)).astype(float)
    boxes = [_rectangle(x, y, *generator.integers(20, 300, 2)) for x, y in corners]
    layout = gdstk.Cell("top").add(*(gdstk.Polygon([tuple(p) for p in box]) for box in boxes))
    pairs = tiles(_save(tmp_path / "a.gds", layout), "", 32, 10.0, margin=9)
    assert len(pairs) > 20
    for pair in pairs:
        x, y = pair.origin_nm
        wanted = rasterised(boxes, (x - 90, y - 90), (50, 50), 10.0)
        np.testing.assert_allclose(pair.mask[0], wanted, atol=1e-6)


def test_slanted_edges_are_taken(tmp_path: Path) -> None:
    (tmp_path / "slanted.glp").write_text(GLP + "   PGON N M1 100 0 120 0 120 30 110 40\n")
    image = rasterised(read_layout(tmp_path / "slanted.glp"), (0, 0), (10, 13), 10.0)
    assert image[:, 10:].sum() * 10.0**2 == pytest.approx(550, abs=0.01)


@needs_real
def test_real_layouts_keep_their_area() -> None:
    for path in sorted(REAL.glob("*.glp")):
        polygons = [gdstk.Polygon(points) for points in read_layout(path)]
        area = sum(p.area() for p in gdstk.boolean(polygons, [], "or", precision=1e-3))
        masks = torch.stack([pair.mask for pair in tiles(path, "", 64, 25.0)])
        assert float(masks.double().sum()) * 25.0**2 == pytest.approx(area, rel=1e-6)
    polygons = [gdstk.Polygon(points) for points in read_layout(REAL / "gcd_45nm.gds", "11")]
    area = sum(p.area() for p in gdstk.boolean(polygons, [], "or", precision=1e-3))
    cut = tiles(REAL / "gcd_45nm.gds", "11", 64, 25.0)
    assert len(cut) > 300
    assert sum(float(pair.mask.double().sum()) for pair in cut) * 25.0**2 == pytest.approx(area, rel=1e-6)


def test_archives_are_read_and_averaged_down(tmp_path: Path) -> None:
    masks = (np.random.default_rng(0).random((3, 32, 32, 1)) < 0.4).astype(np.float32)
    np.savez(tmp_path / "a.npz", masks=masks, aerials=masks / 2, pixel_nm=10.0)
    pairs = read_npz(tmp_path / "a.npz", 16, 20.0)
    assert [tuple(pair.mask.shape) for pair in pairs] == [(1, 16, 16)] * 3
    wanted = masks[1, ..., 0].reshape(16, 2, 16, 2).mean(axis=(1, 3))
    np.testing.assert_allclose(pairs[1].mask[0], wanted, atol=1e-6)
    np.testing.assert_allclose(pairs[1].aerial[0], wanted / 2, atol=1e-6)
    with pytest.raises(DataError, match="which are 20 nm at 16 x 16, and pixel_nm is 25"):
        read_npz(tmp_path / "a.npz", 16, 25.0)


def test_all_that_is_wrong_with_an_archive_is_said_at_once(tmp_path: Path) -> None:
    masks = np.zeros((4, 32, 32), dtype=np.float32)
    masks[1, 0, 0], masks[3, 0, 0] = 0.5, np.nan
    aerials = -np.ones((3, 32, 32), dtype=np.float32)
    np.savez(tmp_path / "bad.npz", masks=masks, aerials=aerials)
    with pytest.raises(DataError) as caught:
        read_npz(tmp_path / "bad.npz", 32, 25.0)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "differ in shape: (4, 32, 32) and (3, 32, 32)" in lines[0]
    assert "masks: NaN or infinite values in number 3" in lines[1]
    assert "masks: other values than 0 and 1 in number 1" in lines[2]
    assert "aerials: intensities below 0 in numbers 0, 1, 2" in lines[3]
    with pytest.raises(DataError, match="32 x 32 pixels, which cannot be averaged down to 20 x 20"):
        read_npz(tmp_path / "bad.npz", 20, 25.0)
    whole = (tmp_path / "bad.npz").read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "damaged.npz").write_bytes(whole[:500] + b"x" * 500 + whole[1000:])
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, masks)
    for name in ("short", "damaged", "array"):
        with pytest.raises(DataError, match=rf"{name}\.npz: cannot be read as an \.npz archive"):
            read_npz(tmp_path / f"{name}.npz", 32, 25.0)
    np.savez(tmp_path / "other.npz", images=masks)
    with pytest.raises(DataError, match=r"has no array 'masks'\. Arrays: images"):
        read_npz(tmp_path / "other.npz", 32, 25.0)


def _png(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def _lithobench(folder: Path, names: str) -> np.ndarray:
    """Masks of a bar with images and prints, and the layout of a smaller bar; returns the masks' pixels."""
    mask = np.zeros((32, 32))
    mask[8:20, 4:28] = 255
    for name in names:
        _png(folder / "pixelILT" / f"{name}.png", mask)
        _png(folder / "litho" / f"{name}.png", mask * 0.6)
        _png(folder / "resist" / f"{name}.png", np.where(mask > 0, 140, 100))
        (folder / "glp").mkdir(exist_ok=True)
        (folder / "glp" / f"{name}.glp").write_text(
            GLP.replace("10  20  30  40", "0 0 200 100").split("PGON")[0]
        )
    return mask


def test_lithobench_folders_are_joined_by_name(tmp_path: Path) -> None:
    mask = _lithobench(tmp_path / "MetalSet", "abc")
    pairs = find_lithobench(tmp_path, 16, 25.0)
    assert [Path(pair.name).name for pair in pairs] == ["a.png", "b.png", "c.png"]
    aerial, printed, design = pairs[0].aerial, pairs[0].printed, pairs[0].design
    assert isinstance(aerial, Path)
    assert printed is not None
    assert design is not None
    assert load_png(aerial, 16, binary=False).max() == pytest.approx(0.6, abs=0.002)
    assert torch.equal(load_print(printed, 32)[0] > 0.5, torch.from_numpy(mask > 0))
    drawn = load_design(design, 16, 25.0)
    assert float(drawn.sum()) == 8 * 4
    assert drawn[0, 6:10, 4:12].min() == 1
    # A target counts more than a layout, and small pixels are too few for it.
    for name in "abc":
        _png(tmp_path / "MetalSet" / "target" / f"{name}.png", mask)
    assert {pair.design.parent.name for pair in find_lithobench(tmp_path, 16, 25.0) if pair.design} == {
        "target"
    }
    with pytest.raises(DataError, match=r"is 200 x 100 nm, and 16 pixels of 5 nm are 80\. Change pixel_nm"):
        load_design(design, 16, 5.0)


def test_a_run_on_lithobench_is_judged_by_its_prints_and_designs(tmp_path: Path) -> None:
    _lithobench(tmp_path, "abc")
    settings = {"data": str(tmp_path), "size": 16, "pixel_nm": 25.0, "val_fraction": 0.4, "kernel_nm": 200}
    config = train_config("lithography", num_kernels=4, batch_size=1, **settings)
    assert isinstance(config, LithographyConfig)
    recipe = Lithography(config)
    recipe.build_loaders(0, 1).close()
    result = recipe.result(recipe.build_model(), torch.device("cpu"))
    assert result["table"]["given images"]["printed_iou"] == 1
    assert result["table"]["given images"]["edge_nm"] == 0
    assert 0 <= result["table"]["network"]["printed_iou"] <= 1


def test_every_bad_file_of_lithobench_is_named_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "MetalSet"
    mask = _lithobench(folder, "abcdef")
    (folder / "litho" / "a.png").unlink()
    (folder / "glp" / "b.glp").unlink()
    _png(folder / "resist" / "x.png", mask)
    _png(folder / "litho" / "c.png", mask[:, :20])
    _png(folder / "resist" / "d.png", np.zeros((16, 16)))
    (folder / "litho" / "e.png").write_bytes(b"no picture")
    (folder / "printed").mkdir()
    with pytest.raises(DataError) as caught:
        find_lithobench(tmp_path, 16, 25.0)
    wanted = (
        "MetalSet: has both printed and resist",
        "a.png: has no image of that name in litho",
        "pixelILT/a.png: has no image of that name in printed",
        "b.png: has no layout of that name in glp",
        "c.png: has 20 x 32 pixels, which cannot be averaged down to 16 x 16",
        "e.png: cannot be read as a picture",
    )
    for text in wanted:
        assert text in str(caught.value)
    (folder / "printed").rmdir()
    with pytest.raises(DataError, match=r"resist/x\.png: has no mask of that name") as caught:
        find_lithobench(tmp_path, 16, 25.0)
    assert "d.png: has 16 x 16 pixels, and its mask 32 x 32" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 6


def test_pixels_are_looked_at_before_training(tmp_path: Path) -> None:
    mask = _lithobench(tmp_path, "abcdef")
    _png(tmp_path / "pixelILT" / "a.png", mask * 0.5)
    _png(tmp_path / "litho" / "b.png", np.stack([mask, mask, mask / 2], axis=2))
    whole = (tmp_path / "pixelILT" / "c.png").read_bytes()
    (tmp_path / "pixelILT" / "c.png").write_bytes(whole[:-40])
    (tmp_path / "glp" / "d.glp").write_text("RECT N M1 1 2 3")
    _png(tmp_path / "pixelILT" / "e.png", np.stack([mask, mask, mask], axis=2))
    config = train_config("lithography", data=str(tmp_path), size=16, pixel_nm=25.0, val_fraction=0)
    assert isinstance(config, LithographyConfig)
    with pytest.raises(DataError) as caught:
        Lithography(config).inspect()
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for text in (
        "a.png: a mask with other values than black and white",
        "b.png: its red, green and blue differ",
        "c.png: cannot be read as a picture",
        "d.glp: line 1: a RECT needs",
    ):
        assert sum(text in line for line in lines) == 1
    with pytest.raises(DataError, match="other values than black and white"):
        Lithography(config).build_loaders(0, 1)
    # What is wrong with names and headers comes first, and hides none of it.
    (tmp_path / "litho" / "f.png").unlink()
    with pytest.raises(DataError) as caught:
        Lithography(config).inspect()
    assert "f.png: has no image of that name" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 5
    _png(tmp_path / "litho" / "f.png", mask)
    (tmp_path / "litho").rename(tmp_path / "images")
    with pytest.raises(DataError, match="has pixelILT and no folder litho"):
        find_lithobench(tmp_path, 16, 25.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "a.npz"}, "the size of a pixel at the wafer is not known"),
        ({"source": "dipole", "rotate90_prob": 0.5}, "a dipole has an axis"),
        ({"zernikes": "7:0.02", "flip_prob": 0.5}, "Zernike 7 changes when it is mirrored"),
        ({"zernikes": "40:0.02"}, "each number from 1 to 36 at most once"),
        ({"intensity_prob": 0.5}, "a mask's value is its transmission"),
        ({"numerical_aperture": 1.2}, "must be below medium_index=1"),
        ({"pixel_nm": 60.0}, r"wavelength / \(4 NA\) = 56\.8 nm or less"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config("lithography", **settings)
    assert train_config("lithography", rotate90_prob=0.5, flip_prob=0.5, zernikes="9:0.02", defocus_nm=40)
