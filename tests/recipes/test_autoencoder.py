"""The autoencoder: its data sources, its loss, what it says of itself, and that it learns."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import nibabel
import numpy as np
import pytest
import quality
import torch
from monai.metrics import PSNRMetric
from scipy.fft import dctn
from sklearn.decomposition import PCA
from torch.distributions import Normal, kl_divergence

import nbgpu
from nbgpu.config import train_config
from nbgpu.engine.workload.by_name import load
from nbgpu.errors import DataError
from nbgpu.recipes.autoencoder.baselines import lowest_frequencies
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.recipe import Autoencoder
from nbgpu.recipes.image_quality import psnr_db, ssim

SMALL = {"data": "phantoms", "patch_size": 8, "num_phantoms": 20}


def autoencoder(**values: Any) -> Autoencoder:
    # Volumes of files would choose the network by the memory.
    network = {"channels": (8, 16), "latent_channels": 2}
    recipe = load(train_config("autoencoder", **{**network, **values}))
    assert isinstance(recipe, Autoencoder)
    return recipe


def write_brain(path: Path, edge: int, seed: int) -> Path:
    """A bright noisy ball in an empty field."""
    rng = np.random.default_rng(seed)
    grid = np.indices((edge, edge, edge)) - (edge - 1) / 2
    ball = (np.square(grid).sum(axis=0) < (0.4 * edge) ** 2) * (100 + 20 * rng.random((edge,) * 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(ball.astype(np.float32), np.eye(4)), path)
    return path


# ---- data ----------------------------------------------------------------------------------------------


def test_phantoms_are_shared_out_with_none_in_training_and_held_out() -> None:
    held_out, training = set(), set()
    for rank in range(2):
        loaders = autoencoder(**SMALL).build_loaders(rank, 2)
        assert loaders.steps_per_epoch == 16 // 2 // 2
        held_out |= {tuple(v.flatten().tolist()) for b in loaders.val for v in b["image"]}
        training |= {tuple(v.flatten().tolist()) for b in loaders.train for v in b["image"]}
        loaders.close()
    assert len(held_out) == 4
    assert len(training) == 16
    assert not held_out & training


def test_as_much_is_validated_whatever_the_number_of_ranks() -> None:
    recipe = autoencoder(**{**SMALL, "num_phantoms": 40, "val_fraction": 0.5, "patch_size": 64})
    held_out = recipe._parts().validation
    assert len(held_out) == 20
    whole = recipe._held_out_share(held_out, 0, 1)
    shares = [recipe._held_out_share(held_out, rank, 3) for rank in range(3)]
    assert len(whole) == 8
    assert sorted(float(v.mean()) for v in torch.cat(shares)) == sorted(float(v.mean()) for v in whole)


def test_the_template_is_cut_in_two_parts_that_share_no_voxel() -> None:
    loaders = autoencoder(data="mni152", patches_per_volume=8).build_loaders(0, 1)
    batch = next(iter(loaders.train))["image"]
    assert batch.shape == (2, 1, 32, 32, 32)
    assert batch.min() >= 0
    assert batch.max() <= 1
    assert (batch > 0.1).float().mean() > 0.3, "patches are mostly empty"
    loaders.close()

    recipe = autoencoder(data="mni152")
    parts = [recipe._steps()(item)["image"] for item in recipe._parts().everything]
    template = nibabel.as_closest_canonical(nilearn_template()).get_fdata(dtype=np.float32)
    front = int(np.flatnonzero(template.any(axis=(0, 2)))[-1])
    num_slices = [part.shape[2] for part in parts]
    assert num_slices[1] == max(32, round(0.2 * sum(num_slices)))
    # The held-out part ends with the foremost slice of the brain; the training part ends just behind it.
    for part, last in zip(parts, (front - num_slices[1], front), strict=True):
        expected = template[:, last].max() / np.percentile(template, 99.5)
        assert float(part[0, :, -1].max()) == pytest.approx(min(1.0, expected), abs=0.02)


def nilearn_template() -> nibabel.Nifti1Image:
    from nilearn.datasets import load_mni152_template

    return load_mni152_template(resolution=1)


def test_without_nilearn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'nbgpu\[samples\]'"):
        autoencoder(data="mni152").build_loaders(0, 1)


def test_whole_volumes_of_a_folder_are_held_out(tmp_path: Path) -> None:
    for i in range(5):
        write_brain(tmp_path / f"{i}.nii.gz", edge=20, seed=i)
    recipe = autoencoder(data=str(tmp_path), patch_size=8, patches_per_volume=4)
    parts = recipe._parts()
    assert (len(parts.training), len(parts.validation), len(parts.test)) == (4, 1, 0)
    # One held-out volume and two ranks: each takes every other patch of it.
    shares = [recipe.build_loaders(rank, 2) for rank in range(2)]
    counts = [sum(len(batch["image"]) for batch in loaders.val) for loaders in shares]
    assert abs(counts[0] - counts[1]) <= 1
    assert all(len(list(loaders.train)) == 2 * 4 // 2 for loaders in shares)


def test_a_list_may_name_what_is_held_out(tmp_path: Path) -> None:
    for name in "abc":
        write_brain(tmp_path / f"{name}.nii", edge=16, seed=ord(name))
    (tmp_path / "list.json").write_text(json.dumps({"training": ["a.nii", "b.nii"], "validation": ["c.nii"]}))
    held_out = autoencoder(data=str(tmp_path / "list.json"), patch_size=8)._parts().validation
    assert [Path(item["name"]).name for item in held_out] == ["c.nii"]


def test_one_volume_that_cannot_be_cut_in_two_is_named_with_the_ways_out(tmp_path: Path) -> None:
    path = write_brain(tmp_path / "one.nii.gz", edge=20, seed=0)
    with pytest.raises(DataError, match=rf"{path}: is one volume of 1\d voxels .* or set val_fraction=0"):
        autoencoder(data=str(path), patch_size=12).build_loaders(0, 1)
    loaders = autoencoder(data=str(path), patch_size=12, val_fraction=0).build_loaders(0, 1)
    assert list(loaders.val) == []
    assert len(list(loaders.train)) == loaders.steps_per_epoch


def test_one_volume_with_an_empty_part_is_named(tmp_path: Path) -> None:
    voxels = np.full((40, 16, 16), 0.5, np.float32)
    voxels[32:] = np.random.default_rng(0).random((8, 16, 16))
    path = tmp_path / "one.nii.gz"
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
    with pytest.raises(DataError, match=rf"{path}: is one volume, and its training part is empty"):
        autoencoder(data=str(path), patch_size=8).build_loaders(0, 1)


def test_an_awkward_real_volume_gives_patches(shared_data: Path) -> None:
    path = shared_data / "brain" / "anatomical.nii"
    loaders = autoencoder(data=str(path), patch_size=12).build_loaders(1, 2)
    batch = next(iter(loaders.train))["image"]
    assert torch.isfinite(batch).all()
    assert batch.min() >= 0
    assert batch.max() <= 1
    loaders.close()


def test_real_volumes_of_different_size_go_together(shared_data: Path) -> None:
    loaders = autoencoder(data=str(shared_data / "brain"), patch_size=16).build_loaders(0, 2)
    assert next(iter(loaders.train))["image"].shape == (2, 1, 16, 16, 16)
    loaders.close()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_bad_volume_ends_the_run_on_every_rank_by_name(
    cluster2: nbgpu.Cluster, tmp_path: Path, strategy: str
) -> None:
    for i in range(4):
        write_brain(tmp_path / "data" / f"{i}.nii.gz", edge=16, seed=i)
    bad = write_brain(tmp_path / "data" / "bad.nii.gz", edge=16, seed=9)
    voxels = nibabel.load(bad).get_fdata()
    voxels[8, 8, 8] = np.nan
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), bad)
    # Nothing is cached, so only one rank meets the bad volume, in the middle of training; with the seeds
    # below it is not held out.
    settings = {"data": str(tmp_path / "data"), "patch_size": 8, "runs_dir": str(tmp_path / "runs")}
    # fsdp gathers weights in the forward pass, too, and there the rank with no data must not be missed.
    run = cluster2.train(
        "autoencoder", strategy=strategy, steps=50, cache_rate=0.0, val_every=0, seed=1, **settings
    )
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(timeout_s=60)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}
    for failure in caught.value.failures:
        assert failure.error_type == "DataError"
        assert f"{bad}: 1 of 4096 voxels are NaN or infinite" in failure.message
    # The ranks are as good as before.
    bad.unlink()
    assert (
        cluster2.train("autoencoder", steps=3, val_every=0, **settings).wait(timeout_s=60).status
        == "finished"
    )


# ---- model and loss ------------------------------------------------------------------------------------


def test_the_loss_is_reconstruction_plus_weighted_kl() -> None:
    recipe = autoencoder(**SMALL, kl_weight=0.01)
    torch.manual_seed(0)
    model = recipe.build_model()
    image = torch.rand(3, 1, 8, 8, 8)
    torch.manual_seed(1)
    terms = recipe.loss(model, {"image": image})
    torch.manual_seed(1)
    reconstruction, mean, sigma = model(image)
    assert mean.shape == (3, 2, 4, 4, 4)
    kl = kl_divergence(Normal(mean, sigma), Normal(0.0, 1.0)).sum() / 3
    torch.testing.assert_close(terms["kl_loss"], kl)
    torch.testing.assert_close(terms["recon_loss"], torch.nn.functional.mse_loss(reconstruction, image))
    torch.testing.assert_close(terms["loss"], terms["recon_loss"] + 0.01 * kl)


def test_every_weight_learns() -> None:
    recipe = autoencoder(**SMALL, channels=(8, 8, 16), kl_weight=0.0, recon_loss="l1")
    model = recipe.build_model()
    recipe.loss(model, {"image": torch.rand(2, 1, 8, 8, 8)})["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_validation_is_by_sample_and_draws_no_random_numbers() -> None:
    recipe = autoencoder(**SMALL)
    model = recipe.build_model().eval()
    image = torch.rand(3, 1, 8, 8, 8)
    state = torch.get_rng_state()
    values = recipe.validate(model, {"image": image})
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: value.shape for name, value in values.items()} == {"loss": (3,), "psnr_db": (3,)}
    alone = recipe.validate(model, {"image": image[1:2]})
    torch.testing.assert_close(alone["psnr_db"][0], values["psnr_db"][1])


def test_half_precision_gives_finite_losses() -> None:
    recipe = autoencoder(**SMALL)
    model = recipe.build_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = recipe.loss(model, {"image": torch.rand(2, 1, 8, 8, 8)})
    assert all(torch.isfinite(term) and term.dtype == torch.float32 for term in terms.values())


# ---- result --------------------------------------------------------------------------------------------


def test_psnr_agrees_with_monai_and_stays_finite() -> None:
    image, output = torch.rand(2, 1, 8, 8, 8), torch.rand(2, 1, 8, 8, 8)
    for sample in range(2):
        expected = PSNRMetric(max_val=1.0)(output[sample : sample + 1], image[sample : sample + 1])
        torch.testing.assert_close(psnr_db(output, image)[sample], expected.squeeze())
    assert psnr_db(image, image).tolist() == pytest.approx([100.0, 100.0])
    torch.testing.assert_close(ssim(image, image), torch.ones(2))


def test_the_result_compares_with_baselines_that_others_compute_the_same() -> None:
    recipe = autoencoder(**SMALL)
    result = recipe.result(recipe.build_model(), torch.device("cpu"))
    assert json.loads(json.dumps(result)) == result
    table = result["table"]
    assert list(table) == [
        "autoencoder",
        "trilinear, same number of values",
        "DCT, same number of values",
        "PCA, same number of values",
        "mean image",
    ]

    parts = recipe._parts()
    fitted_on = recipe._training_patches(parts.training)
    image = recipe._held_out_patches(parts.validation, len(parts.validation))
    assert (len(fitted_on), len(image)) == (16, 4)
    pca = PCA(n_components=15).fit(fitted_on.flatten(1).double().numpy())
    projected = pca.inverse_transform(pca.transform(image.flatten(1).double().numpy()))
    projected_image = torch.from_numpy(projected).reshape(image.shape).clamp(0, 1)
    assert table["PCA, same number of values"]["psnr_db"] == pytest.approx(
        float(psnr_db(projected_image, image).mean()), abs=0.01
    )
    mean = fitted_on.mean(dim=0).expand_as(image)
    assert table["mean image"]["psnr_db"] == pytest.approx(float(psnr_db(mean, image).mean()), abs=0.01)
    # 2 x 4^3 = 128 numbers: 5^3 = 125 points, and no more components than 16 patches have.
    assert "keep 128 numbers, trilinear sampling 5^3 = 125, PCA 15 (no more, because" in result["note"]


def test_the_lowest_frequencies_are_as_many_as_were_asked_for() -> None:
    rng = np.random.default_rng(0)
    # A patch of these three frequencies only, by the definition of the DCT-II.
    angles = np.pi * (np.arange(8) + 0.5) / 8
    waves = [np.cos(number * angles) for number in range(8)]
    of = [
        0.5 + 0.1 * np.einsum("i,j,k->ijk", waves[a], waves[b], waves[c])
        for a, b, c in ((1, 1, 0), (2, 0, 0), (0, 0, 3))
    ]
    image = torch.from_numpy(np.stack(of)[:, None])
    # 0, three at distance 1, three at sqrt(2), one at sqrt(3), and then those at distance 2.
    kept = lowest_frequencies(image, 11)
    torch.testing.assert_close(kept[:2], image[:2])
    torch.testing.assert_close(kept[2], torch.full_like(kept[2], 0.5))
    torch.testing.assert_close(lowest_frequencies(image[:1], 4)[0], torch.full_like(image[0], 0.5))
    noise = torch.from_numpy(rng.uniform(0.4, 0.6, (2, 1, 8, 8, 8)))
    torch.testing.assert_close(lowest_frequencies(noise, 8**3), noise)
    frequencies = dctn(lowest_frequencies(noise, 128).numpy(), axes=(2, 3, 4), norm="ortho")
    assert [int((np.abs(one) > 1e-9).sum()) for one in frequencies] == [128, 128]


def test_the_note_says_who_is_best() -> None:
    recipe = autoencoder(**SMALL | {"num_phantoms": 48})
    untrained = recipe.result(recipe.build_model(), torch.device("cpu"))
    psnr = {name: row["psnr_db"] for name, row in untrained["table"].items()}
    best = max(psnr, key=lambda name: psnr[name])
    assert best != "autoencoder"
    gap = psnr[best] - psnr["autoencoder"]
    assert untrained["note"].startswith(f"'{best}' is best; the autoencoder is {gap:.1f} dB below it")
    few = autoencoder(**SMALL).result(recipe.build_model(), torch.device("cpu"))
    assert few["note"].startswith("No verdict: 4 held-out patches are too few")


def test_the_pictures_are_small_images_in_a_row() -> None:
    recipe = autoencoder(**SMALL)
    images = recipe.result(recipe.build_model(), torch.device("cpu"))["images"]
    assert len(images) == 3
    for uri in images.values():
        kind, content = uri.split(",", 1)
        assert kind == "data:image/png;base64"
        assert len(content) < 100_000
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(content)), format="png")
        # Each of 16 x 16 voxels as 7 x 7 pixels, four in a row, with room for the axes and the bar.
        height, width = pixels.shape[:2]
        assert height > 112
        assert width > 4 * 112


def test_with_nothing_held_out_there_is_no_result_and_it_says_why() -> None:
    recipe = autoencoder(**SMALL, val_fraction=0)
    result = recipe.result(recipe.build_model(), torch.device("cpu"))
    assert result["table"] == {}
    assert "val_fraction=0" in result["note"]


# ---- learning ------------------------------------------------------------------------------------------


def trained(cluster: nbgpu.Cluster, folder: Path, **values: Any) -> tuple[dict[str, Any], list[float]]:
    """The result of a run on phantoms of 16^3, and the held-out PSNR on the way."""
    config = AutoencoderConfig.checked(
        data="phantoms", patch_size=16, batch_size=4, runs_dir=str(folder), **values
    )
    run = cluster.train("autoencoder", **config.model_dump(exclude={"recipe"})).wait(timeout_s=1100)
    result = run.result()
    assert result is not None
    metrics = run.metrics()
    on_the_way = metrics["val_psnr_db"].dropna().tolist() if config.val_every else []
    return dict(result["table"]), on_the_way


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (20, {}),
        # A GPU's network, in runs so short that a twentieth of their steps would be no warm-up.
        (12, {"channels": (32, 64)}),
        pytest.param(12, {"channels": (64, 128)}, marks=pytest.mark.long),
    ],
)
def test_no_step_of_a_first_training_is_above_its_start(
    cluster2: nbgpu.Cluster, tmp_path: Path, steps: int, settings: dict[str, Any]
) -> None:
    run = cluster2.train(
        "autoencoder",
        **{"data": "phantoms", "num_phantoms": 16, "patch_size": 16, "steps": steps, **settings},
        val_every=0,
        work_out_result=False,
        runs_dir=str(tmp_path),
    ).wait(400)
    losses = run.metrics().pivot_table(index="step", columns="rank", values="loss").mean(axis=1)
    assert losses.max() < 1.2 * losses.iloc[0], list(losses)
    assert losses.iloc[-3:].mean() < losses.iloc[0] / 2, list(losses)


@pytest.mark.long
def test_it_learns_from_the_beginning_on(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    table, on_the_way = trained(cluster2, tmp_path, steps=120, val_every=40)
    assert len(on_the_way) == 3
    assert on_the_way[0] + 1 < on_the_way[-1]
    assert on_the_way[-1] > table["mean image"]["psnr_db"] + 3
    # What it ends with is what the table says.
    assert table["autoencoder"]["psnr_db"] == pytest.approx(on_the_way[-1], abs=0.01)


@pytest.mark.long
def test_it_learns_against_a_discriminator_too(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    contest = {"adversarial_weight": 0.01, "adversarial_after": 40}
    table, on_the_way = trained(cluster2, tmp_path, steps=120, val_every=40, **contest)
    assert on_the_way[0] < on_the_way[-1]
    assert on_the_way[-1] > table["mean image"]["psnr_db"] + 3


@pytest.mark.quality
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_1500_steps_it_beats_baselines_that_keep_as_many_numbers(
    cluster2: nbgpu.Cluster, tmp_path: Path, seed: int
) -> None:
    table, _ = trained(cluster2, tmp_path, steps=1500, val_every=0, seed=seed, split_seed=seed)
    quality.note("Autoencoder, 410 phantoms, 1500 steps", "psnr_db", seed, table)
    own = table.pop("autoencoder")
    assert own["psnr_db"] >= max(row["psnr_db"] for row in table.values()) + 1.5
    assert own["ssim"] >= max(row["ssim"] for row in table.values()) + 0.01
    _require_that_the_phantoms_are_hard(table)


@pytest.mark.quality
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_600_steps_against_a_discriminator_it_beats_a_coarser_grid(
    cluster2: nbgpu.Cluster, tmp_path: Path, seed: int
) -> None:
    contest = {"adversarial_weight": 0.01, "adversarial_after": 200}
    table, _ = trained(cluster2, tmp_path, steps=600, val_every=0, seed=seed, split_seed=seed, **contest)
    quality.note("Autoencoder against a discriminator, 600 steps", "psnr_db", seed, table)
    own = table.pop("autoencoder")["psnr_db"]
    assert own >= 22.5
    # The discriminator raises the squared error, and the frequencies of a cosine transform have the least.
    assert own > max(row["psnr_db"] for name, row in table.items() if not name.startswith("DCT"))
    _require_that_the_phantoms_are_hard(table)


def _require_that_the_phantoms_are_hard(baselines: dict[str, dict[str, float]]) -> None:
    """Easier ones would flatter every method."""
    assert baselines["mean image"]["psnr_db"] < 14.5
    assert baselines["trilinear, same number of values"]["psnr_db"] < 22.5
    assert baselines["DCT, same number of values"]["psnr_db"] < 26
