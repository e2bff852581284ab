"""Files to batches: what is found, what is refused and how, and that the batches are what they should be."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.transforms import Compose
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.loader import SampleLoader, grid_patches, shard
from nbgpu.engine.data.parts import Parts
from nbgpu.engine.data.sampling import Draw
from nbgpu.engine.data.volumes import check_headers, header_problem, load_volume, scale_intensity
from nbgpu.errors import DataError
from nbgpu.planning.volume_files import find_volumes

EDGE = 12
PATCH = 8


def write_volume(path: Path, voxels: np.ndarray | None = None, seed: int = 0) -> Path:
    """A NIfTI file of random voxels, or of those given."""
    if voxels is None:
        voxels = np.random.default_rng(seed).random((EDGE,) * 3, dtype=np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
    return path


def with_voxel(value: float) -> np.ndarray:
    voxels = np.random.default_rng(0).random((EDGE,) * 3, dtype=np.float32)
    voxels[1, 2, 3] = value
    return voxels


def damaged(path: Path) -> Path:
    """Clears bytes in the middle of a compressed file: its length and its header stay sound."""
    voxels = np.random.default_rng(0).integers(0, 4, (EDGE,) * 3).astype(np.uint8)
    content = bytearray(write_volume(path, voxels).read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    path.write_bytes(bytes(content))
    return path


def decoded(item: Item) -> dict[str, Tensor]:
    image = scale_intensity(load_volume(item["image"]), item["name"])
    return {"image": image, "foreground": torch.arange(image.numel())}


def loader(
    paths: Iterable[Path],
    patches_per_volume: int = 4,
    rank: int = 0,
    world_size: int = 1,
    steps: Callable[[Item], Any] = decoded,
    **settings: Any,
) -> SampleLoader:
    return SampleLoader(
        Parts([{"name": str(p), "image": p} for p in paths], [], []),
        Compose([steps]),
        Draw(patch_size=PATCH, samples_per_volume=patches_per_volume),
        train_config("autoencoder", **{"batch_size": 2, "num_workers": 0, **settings}),
        rank=rank,
        world_size=world_size,
    )


def epoch(loader: Iterable[Mapping[str, Tensor]]) -> Tensor:
    return torch.stack([batch["image"] for batch in loader])


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    return [write_volume(tmp_path / f"{i}.nii.gz", seed=i) for i in range(4)]


# ---- finding -------------------------------------------------------------------------------------------


def test_a_folder_gives_its_volumes_in_order_with_those_in_subfolders(tmp_path: Path) -> None:
    for name in ("b.nii.gz", "sub/deep/c.nii", "a.nii", "notes.txt", "d.NII.GZ"):
        write_volume(tmp_path / "x.nii").rename(tmp_path / "x")
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x").rename(target)
    found = find_volumes(str(tmp_path))
    assert [str(p.relative_to(tmp_path)) for p in found.training] == [
        "a.nii",
        "b.nii.gz",
        "d.NII.GZ",
        "sub/deep/c.nii",
    ]
    assert found.validation == ()


def test_one_file_is_a_list_of_one(volumes: list[Path]) -> None:
    assert find_volumes(str(volumes[0])).training == (volumes[0],)


def test_a_csv_list_is_relative_to_itself_and_counts_a_repeated_file_once(tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    table.write_text("\ufeffsubject, Image \n1,one.nii\n2,sub/two.nii.gz\n1,one.nii\n", encoding="utf-8")
    assert find_volumes(str(table)).training == (tmp_path / "one.nii", tmp_path / "sub/two.nii.gz")


@pytest.mark.parametrize(
    "content",
    [
        ["one.nii", "two.nii"],
        [{"image": "one.nii", "label": 3}, {"image": "two.nii"}],
        {"training": [{"image": "one.nii"}, "two.nii"], "name": "a task", "test": ["three.nii"]},
    ],
)
def test_a_json_list_holds_paths_or_monai_items(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(content))
    assert find_volumes(str(path)).training == (tmp_path / "one.nii", tmp_path / "two.nii")


def test_a_json_list_may_name_the_validation_volumes(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"training": ["one.nii"], "validation": [{"image": "two.nii"}]}))
    assert find_volumes(str(path)).validation == (tmp_path / "two.nii",)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("list.csv", "subject,age\n1,2\n", "no column names the files. Its headings are: subject, age"),
        ("list.csv", "", r"Its headings are: \(none\)"),
        ("list.csv", "image\n", "the list names no volume"),
        ("list.csv", "image,age\n,3\na.nii,4\n,5\n", r"line 2 names no file.*\n.*line 4 names no file"),
        ("list.json", "[", "cannot be read as JSON"),
        ("list.json", "[]", "the list names no volume"),
        ("list.json", '{"image": "a.nii"}', "neither a list nor an object"),
        ("list.json", '["a.nii", {"label": "b.nii"}]', r"training\[1\] names no file"),
        (
            "list.json",
            '{"training": ["a.nii"], "validation": ["a.nii"]}',
            "is listed for training and for validation",
        ),
        ("list.txt", "a.nii", "not a list that can be read"),
    ],
)
def test_a_bad_list_is_named_with_what_is_wrong(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        find_volumes(str(path))
    assert str(tmp_path) in str(caught.value)


def test_a_list_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_bytes(b"image\n\x81\xfe.nii\n")
    with pytest.raises(DataError, match=r"list\.csv: cannot be read as CSV"):
        find_volumes(str(path))


def test_what_a_mac_and_a_scanner_leave_in_a_folder_is_no_volume(tmp_path: Path) -> None:
    write_volume(tmp_path / "one.nii.gz")
    (tmp_path / "._one.nii.gz").write_bytes(b"left by a Mac")
    (tmp_path / ".cache").mkdir()
    write_volume(tmp_path / ".cache" / "one.nii.gz")
    assert find_volumes(str(tmp_path)).passed_over == ""
    (tmp_path / "scan").mkdir()
    (tmp_path / "scan" / "IM0001").write_bytes(bytes(128) + b"DICM" + bytes(8))
    (tmp_path / "brain.mgz").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    found = find_volumes(str(tmp_path))
    assert found.training == (tmp_path / "one.nii.gz",)
    assert "2 file(s) are images of other formats" in found.passed_over
    (tmp_path / "one.nii.gz").unlink()
    with pytest.raises(DataError, match=r"no \.nii or \.nii\.gz file\. 2 file\(s\).*DICOM with dcm2niix"):
        find_volumes(str(tmp_path))


@pytest.mark.parametrize(("unit", "size"), [("meter", 0.001), ("mm", 0.0)])
def test_voxel_sizes_that_are_not_in_mm_are_not_taken_for_mm(tmp_path: Path, unit: str, size: float) -> None:
    image = nibabel.Nifti1Image(np.zeros((8, 8, 8), np.int16), None)
    image.header.set_xyzt_units(unit)
    image.header["pixdim"][1:4] = size
    image.header["sform_code"] = image.header["qform_code"] = 0
    path = tmp_path / "a.nii.gz"
    nibabel.save(image, path)
    assert header_problem(path) is None
    assert "in its header" in str(header_problem(path, spacing_mm=(1, 1, 1)))


def test_an_empty_folder_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: the folder has no .nii or .nii.gz file"):
        find_volumes(str(tmp_path))
    with pytest.raises(DataError, match=r"nowhere: there is no such folder or file"):
        find_volumes(str(tmp_path / "nowhere"))


# ---- checking headers ----------------------------------------------------------------------------------


def test_every_bad_file_is_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    good = write_volume(tmp_path / "good.nii.gz")
    missing = tmp_path / "missing.nii"
    text = tmp_path / "text.nii"
    text.write_text("not an image")
    empty = tmp_path / "empty.nii.gz"
    empty.write_bytes(b"")
    unpacked = tmp_path / "unpacked.nii.gz"  # a plain file that is called .gz
    unpacked.write_bytes(write_volume(tmp_path / "plain.nii").read_bytes())
    cut = tmp_path / "cut.nii"
    cut.write_bytes((tmp_path / "plain.nii").read_bytes()[:-1])
    cut_gz = tmp_path / "cut.nii.gz"
    cut_gz.write_bytes(good.read_bytes()[:-1000])
    cut_header = tmp_path / "cut_header.nii.gz"
    cut_header.write_bytes(good.read_bytes()[:40])
    small = write_volume(tmp_path / "small.nii", np.ones((12, 7, 12), np.float32))
    flat = write_volume(tmp_path / "flat.nii", np.ones((12, 12), np.float32))
    series = write_volume(tmp_path / "series.nii", np.ones((12, 12, 12, 3), np.float32))
    colour = write_volume(
        tmp_path / "colour.nii", np.ones((12,) * 3, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]))
    )
    other = tmp_path / "slice.dcm"
    other.write_bytes(b"DICM")

    said = {
        missing: "there is no such file. Correct the path",
        text: "cannot be read as NIfTI",
        empty: "cannot be read as NIfTI",
        unpacked: "cannot be read as NIfTI",
        cut: "is truncated: it ends before its last voxel. Copy it again",
        cut_gz: "is truncated: it ends before its last voxel. Copy it again",
        cut_header: "cannot be read as NIfTI",
        small: "has 12 x 7 x 12 voxels, which is smaller than the patch. Set patch_size to at most 7",
        flat: "has 2 dimensions, 12 x 12: it is no volume",
        series: "has 4 dimensions, 12 x 12 x 12 x 3. Take one 3D volume out of it",
        colour: "Convert it to one number for each voxel",
        other: "not a NIfTI file by its name",
    }
    with pytest.raises(DataError) as caught:
        check_headers([good, *said], PATCH)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(said)
    for line, (path, words) in zip(lines, said.items(), strict=True):
        assert line.startswith(f"{path}: ")
        assert words in line


def test_sound_files_that_look_odd_are_taken(tmp_path: Path) -> None:
    plain = write_volume(tmp_path / "plain.nii")
    content = plain.read_bytes()
    two_members = tmp_path / "members.nii.gz"
    two_members.write_bytes(gzip.compress(content[:5000]) + gzip.compress(content[5000:]))
    longer = tmp_path / "longer.nii"
    longer.write_bytes(content + b"more")
    longer_gz = tmp_path / "longer.nii.gz"
    longer_gz.write_bytes(gzip.compress(content + b"more"))
    one_channel = write_volume(tmp_path / "channel.nii", np.ones((12, 12, 12, 1), np.float32))
    nifti2 = tmp_path / "two.nii"
    nibabel.save(nibabel.Nifti2Image(np.ones((12,) * 3, np.float32), np.eye(4)), nifti2)
    check_headers([two_members, longer, longer_gz, one_channel, nifti2], PATCH)


def test_real_files_pass_their_check(shared_data: Path) -> None:
    found = find_volumes(str(shared_data / "brain"))
    assert len(found.training) == 3
    check_headers(found.training, 25)
    with pytest.raises(DataError, match=r"anatomical\.nii: has 33 x 41 x 25 voxels"):
        check_headers(found.training, 26)


# ---- decoding ------------------------------------------------------------------------------------------


def bad_volumes(folder: Path) -> dict[Path, str]:
    """Files whose header is sound, and what is to be said of each."""
    return {
        write_volume(folder / "nan.nii.gz", with_voxel(np.nan)): "1 of 1728 voxels are NaN or infinite",
        write_volume(folder / "inf.nii.gz", with_voxel(np.inf)): "1 of 1728 voxels are NaN or infinite",
        write_volume(folder / "flat.nii.gz", np.full((EDGE,) * 3, 7, np.float32)): "is constant",
        damaged(folder / "damaged.nii.gz"): "cannot be decoded",
    }


def test_all_bad_volumes_of_the_cache_are_told_before_training(tmp_path: Path, volumes: list[Path]) -> None:
    bad = bad_volumes(tmp_path)
    check_headers([*volumes, *bad], PATCH)
    with pytest.raises(DataError) as caught:
        loader([*volumes, *bad])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(bad)
    for path, words in bad.items():
        assert any(line.startswith(f"{path}: ") and words in line for line in lines)
    assert "transform" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", range(4))
def test_a_volume_that_turns_out_bad_in_training_ends_its_step_by_name(tmp_path: Path, kind: int) -> None:
    path, words = list(bad_volumes(tmp_path).items())[kind]
    batches = loader([path], cache_rate=0.0)
    with pytest.raises(DataError) as caught:
        next(iter(batches))
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    batches.close()


@pytest.mark.timeout(60)
def test_a_file_that_goes_away_in_training_is_named(volumes: list[Path]) -> None:
    batches = loader(volumes, cache_rate=0.0)
    epoch(batches)
    volumes[2].unlink()
    with pytest.raises(DataError, match=f"{volumes[2].name}: cannot be decoded"):
        epoch(batches)


@pytest.mark.timeout(60)
def test_a_bad_volume_that_only_the_replacing_thread_meets_is_named(tmp_path: Path) -> None:
    sound = [write_volume(tmp_path / f"{i}.nii.gz", seed=i) for i in range(5)]
    bad = write_volume(tmp_path / "bad.nii.gz", with_voxel(np.nan))
    # Whichever two the shuffle puts into the first cache, one of these seeds leaves the bad one out of it.
    for seed in range(10):
        try:
            batches = loader([*sound, bad], cache_rate=1 / 3, replace_rate=0.5, seed=seed)
            break
        except DataError:
            continue

    def train() -> None:
        for _ in range(12):
            epoch(batches)
            batches.next_epoch()

    with pytest.raises(DataError, match=r"bad\.nii\.gz: 1 of 1728 voxels"):
        train()
    batches.close()


@pytest.mark.timeout(60)
def test_a_defect_in_the_recipe_keeps_its_own_error(volumes: list[Path]) -> None:
    def prepare(item: Item) -> dict[str, Tensor]:
        raise KeyError("a typing mistake")

    with pytest.raises(RuntimeError) as caught:
        loader(volumes, steps=prepare)
    assert isinstance(caught.value.__cause__, KeyError)


def test_scaling_takes_the_smallest_value_to_0_and_the_upper_percentile_to_1() -> None:
    image = torch.arange(-500.0, 500.0).reshape(1, 10, 10, 10)
    scaled = scale_intensity(image, "x")
    expected = (image.numpy() + 500) / (np.percentile(image.numpy(), 99.5) + 500)
    np.testing.assert_allclose(scaled.numpy(), expected.clip(0, 1), rtol=1e-5)


# ---- sharing out ---------------------------------------------------------------------------------------


def named(count: int) -> list[Item]:
    return [{"name": str(i)} for i in range(count)]


@pytest.mark.parametrize(("count", "world_size"), [(1, 1), (8, 2), (7, 2), (5, 4), (4, 4)])
def test_every_rank_gets_as_many_volumes_and_together_they_get_all(count: int, world_size: int) -> None:
    shards = [shard(named(count), rank, world_size, seed=3, padded=True) for rank in range(world_size)]
    assert len({len(s) for s in shards}) == 1
    assert {item["name"] for s in shards for item in s} == {item["name"] for item in named(count)}


def test_with_fewer_volumes_than_ranks_each_takes_all() -> None:
    assert shard(named(2), 2, 3, seed=0, padded=True) == named(2)


# ---- batches -------------------------------------------------------------------------------------------


def test_batches_are_plain_patches_of_their_volumes(volumes: list[Path]) -> None:
    batches = list(loader(volumes, batch_size=3))
    assert len(batches) == 6  # 16 patches, and 2 more
    for batch in batches:
        assert type(batch["image"]) is torch.Tensor
        assert batch["image"].shape == (3, 1, PATCH, PATCH, PATCH)
        assert batch["image"].dtype == torch.float32
    whole = scale_intensity(load_volume(volumes[0]), "x")[0]
    corners = whole.unfold(0, PATCH, 1).unfold(1, PATCH, 1).unfold(2, PATCH, 1)[..., 0, 0, 0].flatten()
    firsts = torch.cat([batch["image"][:, 0, 0, 0, 0] for batch in batches])
    assert torch.isin(firsts, corners).sum() in (4, 6)  # four of each volume, and two of some other visit


@pytest.mark.parametrize("num_volumes", [1, 3])
def test_an_epoch_has_the_same_number_of_batches_on_every_rank(volumes: list[Path], num_volumes: int) -> None:
    for shards, num_steps in (("padded", 2 if num_volumes == 3 else 1), ("uneven", 1)):
        counts = set()
        for rank in range(2):
            batches = loader(
                volumes[:num_volumes], rank=rank, world_size=2, batch_size=3, accumulate=2, shards=shards
            )
            counts.add((len(list(batches)), batches.steps_per_epoch * 2))
        assert counts == {(2 * num_steps, 2 * num_steps)}


def test_few_patches_are_drawn_again_for_one_large_batch(volumes: list[Path]) -> None:
    batches = loader(volumes[:1], patches_per_volume=2, batch_size=5, accumulate=3)
    assert batches.steps_per_epoch == 1
    assert epoch(batches).shape[:2] == (3, 5)


@pytest.mark.parametrize("cache", [{}, {"cache_rate": 0.0}, {"cache_rate": 0.5, "replace_rate": 0.5}])
def test_the_same_settings_give_the_same_batches_to_the_last_bit(
    volumes: list[Path], cache: dict[str, float]
) -> None:
    def two_epochs(disturb: bool) -> Tensor:
        batches = loader(volumes, **cache)
        seen = []
        for _ in range(2):
            for batch in batches:
                if disturb:
                    torch.rand(3)
                    np.random.rand(3)
                    time.sleep(0.005)
                seen.append(batch["image"])
            batches.next_epoch()
        batches.close()
        return torch.stack(seen)

    torch.manual_seed(1)
    first = two_epochs(disturb=False)
    torch.manual_seed(2)
    np.random.seed(5)
    assert torch.equal(first, two_epochs(disturb=True))


@pytest.mark.parametrize("step", [0, 1, 3, 5])
@pytest.mark.parametrize("cache", [{}, {"cache_rate": 0.5, "replace_rate": 0.5}])
def test_a_step_that_is_sought_has_the_batches_that_it_always_had(
    volumes: list[Path], cache: dict[str, float], step: int
) -> None:
    def from_step(start: int) -> list[Tensor]:
        batches = loader(volumes, accumulate=2, **cache)
        batches.seek(start)
        seen = []
        for _ in range(3):
            seen += [batch["image"] for batch in batches]
            batches.next_epoch()
        batches.close()
        return seen

    straight, sought = from_step(0), from_step(step)
    assert len(straight) > 2 * step
    for expected, found in zip(straight[2 * step :], sought, strict=False):
        assert torch.equal(expected, found)


def test_epochs_ranks_and_seeds_differ(volumes: list[Path]) -> None:
    batches = loader(volumes)
    first, second = epoch(batches), epoch(batches)
    assert not torch.equal(first, second)
    ranks = [epoch(loader(volumes[:1], rank=rank, world_size=2)) for rank in range(2)]
    assert not torch.equal(*ranks)
    assert not torch.equal(first, epoch(loader(volumes, seed=1)))


def test_an_epoch_does_not_depend_on_how_far_the_one_before_went(volumes: list[Path]) -> None:
    left, complete = loader(volumes), loader(volumes)
    list(islice(left, 2))
    epoch(complete)
    assert torch.equal(epoch(left), epoch(complete))


def test_the_global_random_states_are_left_alone(volumes: list[Path]) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    batches = loader(volumes, cache_rate=0.5, replace_rate=0.5)
    epoch(batches)
    batches.next_epoch()
    batches.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_the_smart_cache_moves_on_to_other_volumes(tmp_path: Path) -> None:
    # Each volume has a checkerboard of its own brightness: the patches tell where they come from.
    paths = []
    for i in range(4):
        voxels = np.zeros((EDGE,) * 3, np.float32)
        voxels[::2] = 1.0
        voxels[1::2] = 0.1 * (i + 1)
        voxels[0, 0, 0] = 0.0
        paths.append(write_volume(tmp_path / f"{i}.nii", voxels))
    batches = loader(paths, cache_rate=0.5, replace_rate=1.0)
    seen = []
    for _ in range(2):
        seen.append({round(float(v), 1) for v in epoch(batches).unique() if 0 < v < 1})
        batches.next_epoch()
    batches.close()
    assert all(len(values) == 2 for values in seen)
    assert seen[0].isdisjoint(seen[1])


def test_no_thread_is_left_when_an_epoch_is_left_in_the_middle(volumes: list[Path]) -> None:
    before = threading.active_count()
    batches = loader(volumes)
    for _ in batches:
        break
    assert threading.active_count() == before
    held = iter(batches)
    next(held)
    assert threading.active_count() == before + 1
    batches.close()
    batches.close()
    assert threading.active_count() == before


# ---- held-out patches ----------------------------------------------------------------------------------


def test_grid_patches_lie_on_a_centred_grid_in_the_foreground() -> None:
    image = torch.zeros(1, 18, 16, 16)
    image[:, 9:] = torch.rand(1, 9, 16, 16) + 1
    patches = grid_patches(image, 8, max_patches=100)
    # Along the first axis cells start at 1, 5 and 9, and hold 0, 4 and 8 bright layers.
    assert patches.shape == (2 * 3 * 3, 1, 8, 8, 8)
    assert torch.equal(patches[0, 0], image[0, 5:13, :8, :8])
    assert torch.equal(patches[-1, 0], image[0, 9:17, 8:, 8:])


def test_grid_patches_are_thinned_evenly_and_never_none() -> None:
    image = torch.rand(1, 16, 16, 16)
    assert len(grid_patches(image, 8, max_patches=5, min_foreground=0.0)) == 5
    assert len(grid_patches(image, 16, max_patches=5, min_foreground=1.0)) == 1
