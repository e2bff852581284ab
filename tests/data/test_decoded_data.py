"""What the notebook's side says of the memory of decoded data, beside what the ranks keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.workload.recipe import Loaders
from nbgpu.machine import cgroups
from nbgpu.planning import decoded_data as looks
from nbgpu.planning.decoded_data import DecodedData, UnknownError, decoded_data, memory_fit
from nbgpu.planning.workers import HostResources
from nbgpu.recipes.autoencoder.recipe import Autoencoder
from nbgpu.recipes.diffusion.recipe import Diffusion
from nbgpu.recipes.lithography.recipe import Lithography
from nbgpu.recipes.survival.recipe import Survival

GIB = 2**30
TWO_RANKS = HostResources(num_cores=4, num_ranks=2, shared_bytes=None)
RECIPES: dict[str, Any] = {
    "autoencoder": Autoencoder,
    "diffusion": Diffusion,
    "lithography": Lithography,
    "survival": Survival,
}
NETWORK: dict[str, Any] = {"channels": (8, 16), "latent_channels": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six heads with empty margins, of two sizes."""
    rng = np.random.default_rng(0)
    for number in range(6):
        volume = np.zeros((50 + 4 * (number % 2), 44, 40), np.float32)
        volume[8:44, 6:40, 4:36] = rng.random((36, 34, 32)) ** 2
        nibabel.save(
            nibabel.Nifti1Image(volume, np.diag([1.0, 1.0, 2.0, 1.0])), tmp_path / f"{number}.nii.gz"
        )
    return tmp_path


def of_ranks(recipe: str, **settings: Any) -> tuple[int, int]:
    """(the training volumes, the bytes that two ranks keep of them decoded)."""
    config: TrainConfig = train_config(recipe, **settings)
    built = RECIPES[recipe](config)
    found = 0
    for rank in (0, 1):
        loaders: Loaders = built.build_loaders(rank, 2)
        found += loaders.cached_bytes()
        loaders.close()
    return built.amount()[0], found


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("autoencoder", {"data": "phantoms", "patch_size": 16, "num_phantoms": 20, "test_fraction": 0.1}),
        ("diffusion", {"num_phantoms": 11}),
        ("survival", {"num_patients": 40}),
        ("lithography", {"num_masks": 12, "size": 32}),
    ],
)
def test_of_generated_data_the_settings_say_it(recipe: str, settings: dict[str, Any]) -> None:
    config = train_config(recipe, **settings)
    found = decoded_data(config)
    assert found.basis == ""
    kept = looks._cached_bytes(config, found, TWO_RANKS, rate=1.0)
    assert (found.num_volumes, kept) == of_ranks(recipe, **settings)


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8-sig"), (";", "cp1252")])
def test_tables_of_patients_are_read_as_the_recipe_reads_them(
    tmp_path: Path, separator: str, encoding: str
) -> None:
    table = tmp_path / "patients.csv"
    rows = [["image", "time", "event", "fold", "Größe"]]
    rows += [
        [f"{n}.nii", "1,5" if separator == ";" else "1.5", "1", "train" if n else "test", "é"]
        for n in range(5)
    ]
    table.write_text("".join(separator.join(row) + "\n" for row in rows), encoding=encoding)
    found = decoded_data(train_config("survival", data=str(table), image_size=(16, 16, 16), fold="fold"))
    assert (found.num_volumes, found.basis) == (4, "the rows of the table")


@pytest.mark.parametrize("more", [{}, {"spacing": 1.5}])
def test_of_files_it_is_an_estimate_that_is_near(folder: Path, more: dict[str, Any]) -> None:
    settings = {"data": str(folder), "patch_size": 8, **NETWORK, **more}
    found = decoded_data(train_config("autoencoder", **settings))
    assert found.basis == "the headers of 6 of 6 files and the voxels of 2"
    kept = looks._cached_bytes(train_config("autoencoder", **settings), found, TWO_RANKS, rate=1.0)
    num_volumes, kept_by_ranks = of_ranks("autoencoder", **settings)
    assert found.num_volumes == num_volumes
    assert kept == pytest.approx(kept_by_ranks, rel=0.1)


def test_of_the_template_it_is_near() -> None:
    config = train_config("autoencoder")
    kept = looks._cached_bytes(config, decoded_data(config), TWO_RANKS, rate=1.0)
    assert kept == pytest.approx(of_ranks("autoencoder")[1], rel=0.02)


def test_few_of_many_files_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    load = nibabel.load
    monkeypatch.setattr(nibabel, "load", lambda path: opened.append(path) or load(path))
    monkeypatch.setattr(looks, "MAX_HEADERS", 3)
    monkeypatch.setattr(looks, "MAX_READ", 1)
    found = decoded_data(train_config("autoencoder", data=str(folder), patch_size=8, **NETWORK))
    assert len({*opened}) == 3
    assert found.basis == "the headers of 3 of 6 files and the voxels of 1"


def test_what_cannot_be_known_is_said_with_the_reason(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "cohort.csv"
    table.write_text("image,time,event\na.nii,1,0\n")
    (folder / "3.nii.gz").write_bytes(b"no volume")
    for recipe, settings, reason in (
        ("survival", {"data": str(table)}, "image_size is left out"),
        ("lithography", {"data": str(tmp_path)}, "when the ranks have read them"),
        ("diffusion", {"data": str(tmp_path / "nowhere")}, "there is no folder"),
        ("autoencoder", {"data": str(folder), **NETWORK}, "3.nii.gz: cannot be read as NIfTI"),
    ):
        more = {"pixel_nm": 1.0} if recipe == "lithography" else {}
        with pytest.raises(UnknownError, match=reason):
            decoded_data(train_config(recipe, **settings, **more))


def test_a_damaged_file_is_named_whichever_way_it_is_damaged(folder: Path) -> None:
    config = train_config("autoencoder", data=str(folder), **NETWORK)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    # A block of deflate of a kind that there is not makes zlib.error, in the header or in the voxels.
    for begin in (lambda content: 10, lambda content: len(content) // 2):
        for path, content in whole.items():
            path.write_bytes(content[: begin(content)] + b"\xff" * 4096)
        with pytest.raises(UnknownError, match=r"\d\.nii\.gz: cannot be read"):
            decoded_data(config)
    for path, content in whole.items():
        path.write_bytes(content)
    path = folder / "3.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((9, 9), np.float32), np.eye(4)), path)
    with pytest.raises(UnknownError, match=r"3\.nii\.gz: has 2 dimensions, and a volume needs three"):
        decoded_data(config)


def test_words_say_what_fits() -> None:
    data = DecodedData(num_volumes=100, volume_bytes=0.146 * GIB)

    def said(free_bytes: float, **settings: Any) -> tuple[str, bool]:
        config = train_config("autoencoder", data="phantoms", **settings)
        found = memory_fit(config, data, TWO_RANKS, int(free_bytes))
        return found.words, found.fits

    assert said(20 * GIB) == (
        "fits in memory: all 100 training volumes, 14.6 GiB of the 20.0 GiB that are free",
        True,
    )
    words = "fits in memory: 62 % of the volumes, 9.1 GiB of 14.6 GiB"
    assert said(9.1 * GIB, num_workers=0) == (f"{words}. 1 is too much: take 0.62 or less", False)
    assert said(9.1 * GIB, num_workers=0, cache_rate=0.5) == (words, True)
    # Worker processes read what is cached from a copy of it.
    copied, fits = said(9.1 * GIB, cache_rate=0.5)
    assert copied.startswith("fits in memory: 31 % of the volumes, 9.1 GiB of 29.2 GiB (twice their size: ")
    assert copied.endswith("0.5 is too much: take 0.31 or less")
    assert not fits
    assert said(9.1 * GIB, dataset="plain") == ("dataset='plain' keeps no volumes in memory", True)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = cgroups.free_memory_bytes()
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 8}\n")
    monkeypatch.setattr(cgroups, "_folders", lambda _: [tmp_path])
    assert cgroups.free_memory_bytes() == min(alone, GIB // 2 + GIB // 8) == GIB // 2 + GIB // 8
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroups.free_memory_bytes() > GIB // 2 + GIB // 8
