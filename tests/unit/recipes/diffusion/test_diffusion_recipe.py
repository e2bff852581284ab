"""The diffusion recipe without a cluster: its data, its sampler, its baselines and the settings that come
with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.diffusion.baselines import VoxelwiseQuadratic
from nbgpu.recipes.diffusion.config import DiffusionConfig
from nbgpu.recipes.diffusion.files import MODALITIES
from nbgpu.recipes.diffusion.measures import quality
from nbgpu.recipes.diffusion.recipe import Diffusion, _compare_with_best
from nbgpu.recipes.diffusion.sampling import sample_share
from nbgpu.recipes.diffusion.schedules import Sampler


def _config(**settings: Any) -> DiffusionConfig:
    config = train_config("diffusion", **settings)
    assert isinstance(config, DiffusionConfig)
    return config


def _brats(root: Path, patients: int, visits: int = 2) -> None:
    for patient in range(patients):
        for visit in range(visits):
            name = f"BraTS-GLI-{patient:05}-{visit:03}"
            (root / name).mkdir(parents=True)
            rng = np.random.default_rng((patient, visit))
            for kind in (*MODALITIES, "seg"):
                values = np.zeros((20, 24, 16), dtype=np.float32)
                inside = (slice(4, 18), slice(2, 22), slice(3, 15))
                values[inside] = (
                    rng.integers(0, 4, (14, 20, 12)) if kind == "seg" else rng.uniform(100, 900, (14, 20, 12))
                )
                nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), root / name / f"{name}-{kind}.nii.gz")


def test_a_case_without_a_segmentation_takes_no_measure_from_the_others(tmp_path: Path) -> None:
    _brats(tmp_path, patients=3, visits=1)
    next(tmp_path.rglob("*00001-000-seg.nii.gz")).unlink()
    recipe = Diffusion(_config(data=str(tmp_path), size=8, val_fraction=0.0))
    data = recipe.decoded(recipe.parts().training, with_masks=True)
    rows = quality(torch.zeros_like(data["target"]), data["target"], data["brain"], data["label"])
    assert ["tumour_psnr_db" in row for row in rows] == [True, False, True]


class Knows(nn.Module):
    """Answers without error, because it knows the image."""

    def __init__(self, sampler: Sampler, image: Tensor) -> None:
        super().__init__()
        self.sampler, self.image = sampler, image
        self.num_questions = 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.num_questions += 1
        noise = self.sampler.noise
        _, epsilon = noise.split("x0", self.image, x[:, :1], t)
        return noise.target(self.sampler.config.prediction, self.image, epsilon, t)


class Refuses(nn.Module):
    """Must not be asked."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        raise AssertionError("the network is asked again for what the ranks have sampled")


@pytest.mark.slow
def test_rank_0_samples_nothing_again_for_the_pictures_of_the_result() -> None:
    settings = {"data": "phantoms", "num_phantoms": 40, "val_fraction": 0.2, "size": 8, "sampling_steps": 2}
    recipe = Diffusion(_config(**settings, channels=(4, 8), norm_groups=4, num_res_blocks=1))
    torch.manual_seed(0)
    model, device = recipe.build_model().eval(), torch.device("cpu")
    samples = recipe.samples_of_result()
    assert len(samples) > 6, "there are more cases than pictures"
    evaluated: list[Any] = [None] * len(samples)
    for rank in range(2):
        own = samples[rank::2]
        evaluated[rank::2] = json.loads(json.dumps(recipe.evaluate(model, device, own)))
    assert recipe.result(Refuses(), device, evaluated) == recipe.result(model, device)


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
@pytest.mark.parametrize(
    "how",
    [
        {"spacing": "uniform"},
        {"spacing": "uniform-from-0", "eta": 0.5},
        {"spacing": "non-uniform", "sampler": "posterior"},
        {"spacing": "uniform", "sampling_steps": 5, "sampler": "posterior", "variance": "large"},
    ],
)
def test_a_network_that_knows_the_image_leads_there(prediction: str, how: dict[str, Any]) -> None:
    sampler = Sampler(_config(prediction=prediction, clip=False, **how))
    image = torch.rand(3, 1, 8, 8, 8, dtype=torch.float64) * 2 - 1
    knows = Knows(sampler, image)
    made = sampler(knows, torch.zeros(3, 3, 8, 8, 8, dtype=torch.float64), [0, 1, 2])
    torch.testing.assert_close(made, image, rtol=0, atol=1e-9)
    asked = {"uniform": how.get("sampling_steps", 11)}.get(how["spacing"], 10)
    assert knows.num_questions == len(sampler.times) == asked


@pytest.mark.slow
def test_the_noise_of_a_case_is_its_own() -> None:
    """Whatever else is in its batch."""
    sampler = Sampler(_config(eta=1.0))
    recipe = Diffusion(_config())
    torch.manual_seed(0)
    model = recipe.build_model().eval()
    nn.init.normal_(next(p for p in reversed(list(model.parameters())) if p.ndim > 1))
    condition = torch.rand(3, 3, 16, 16, 16) * 2 - 1
    whole = sampler(model, condition, [4, 5, 6])
    alone = sampler(model, condition[1:2], [5])
    torch.testing.assert_close(alone, whole[1:2], rtol=0, atol=1e-4)
    assert not torch.allclose(sampler(model, condition[1:2], [6]), alone, atol=1e-2)


def test_batches_hold_three_modalities_and_the_fourth() -> None:
    recipe = Diffusion(_config(num_phantoms=20, target="t1c"))
    loaders = [recipe.build_loaders(rank, 2) for rank in range(2)]
    batch = next(iter(loaders[0].train))
    assert batch["condition"].shape == (4, 3, 16, 16, 16)
    assert batch["target"].shape == (4, 1, 16, 16, 16)
    assert -1 <= float(batch["target"].min()) < float(batch["target"].max()) <= 1
    numbers = [number for each in loaders for held_out in each.val for number in held_out["number"].tolist()]
    assert sorted(numbers) == [0, 1, 2, 3]
    for each in loaders:
        each.close()


@pytest.mark.parametrize(
    ("ranks", "settings", "is_alone"),
    [(1, {}, True), (2, {}, False), (1, {"accumulate": 2}, False), (1, {"antithetic": False}, False)],
)
def test_a_step_of_one_sample_is_told_that_it_has_no_pairs(
    ranks: int, settings: dict[str, Any], is_alone: bool
) -> None:
    loaders = Diffusion(_config(num_phantoms=20, batch_size=1, **settings)).build_loaders(0, ranks)
    loaders.close()
    assert any("antithetic has no effect" in warning for warning in loaders.warnings) == is_alone


def test_the_network_runs_on_the_device_meta() -> None:
    """There, what a step takes is worked out."""
    recipe = Diffusion(_config(attention_edges=(8,), num_res_blocks=2))
    batch = {name: value.to("meta") for name, value in recipe.example(2).items()}
    loss = recipe.loss(recipe.build_model().to("meta"), batch)["loss"]
    loss.backward()
    assert loss.is_meta
    assert len(recipe.blocks(recipe.build_model())) == 5


@pytest.mark.parametrize("fit", ["resize", "crop"])
def test_files_become_cubes_and_patients_stay_together(tmp_path: Path, fit: str) -> None:
    _brats(tmp_path, patients=5)
    recipe = Diffusion(_config(data=str(tmp_path), size=16, fit=fit, val_fraction=0.4))
    parts = recipe.parts()
    training, held_out = parts.training, parts.validation
    assert (len(training), len(held_out)) == (6, 4)
    patients = [{item["case"][:-4] for item in part} for part in (training, held_out)]
    assert not patients[0] & patients[1]
    data = recipe.decoded(held_out, with_masks=True)
    assert data["condition"].shape == (4, 3, 16, 16, 16)
    assert data["label"].shape == data["target"].shape == (4, 1, 16, 16, 16)
    assert set(data["label"].unique().tolist()) == {0, 1, 2, 3}
    outside = data["label"].sum(dim=0) == 0
    # 'resize' pads 14 x 20 x 12 voxels to a cube first, and 'crop' cuts 20 to 16.
    assert (data["target"][:, outside] == -1).float().mean() > 0.5


@pytest.mark.slow
def test_a_case_with_no_target_can_be_sampled(tmp_path: Path) -> None:
    _brats(tmp_path / "data", patients=3, visits=1)
    config = _config(data=str(tmp_path / "data"), size=16, sampling_steps=3)
    recipe = Diffusion(config)
    write_toml(tmp_path / "run.toml", ClusterConfig(), config)
    torch.manual_seed(0)
    # Not as it is built: its last layer would be 0, and every image with it.
    weights = {
        name: tensor + 0.05 * torch.randn_like(tensor)
        for name, tensor in recipe.build_model().state_dict().items()
    }
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    checkpoint.save(tmp_path, 1, tensors, {})
    before = sample_share(tmp_path, 0, 1, data=tmp_path / "data")
    (tmp_path / "data" / "BraTS-GLI-00001-000" / "BraTS-GLI-00001-000-t2f.nii.gz").unlink()
    shares = [sample_share(tmp_path, rank, 2, data=tmp_path / "data") for rank in range(2)]
    assert [case["number"] for share in shares for case in share] == [0, 2, 1]
    (without,) = shares[1]
    assert "psnr_db" in before[1]
    assert "psnr_db" not in without
    torch.testing.assert_close(without["image"], before[1]["image"], rtol=0, atol=1e-6)
    assert float(without["image"].std()) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"dataset": "plain"}])
def test_all_that_is_wrong_with_files_is_told_before_training(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    _brats(tmp_path, patients=4, visits=1)
    empty, no_t2w = tmp_path / "BraTS-GLI-00000-000", tmp_path / "BraTS-GLI-00001-000"
    nibabel.save(
        nibabel.Nifti1Image(np.zeros((20, 24, 16), dtype=np.float32), np.eye(4)),
        empty / f"{empty.name}-t1n.nii.gz",
    )
    (no_t2w / f"{no_t2w.name}-t2w.nii.gz").unlink()
    recipe = Diffusion(_config(data=str(tmp_path), size=16, **settings))
    told = []
    for rank in range(2):
        with pytest.raises(DataError) as error:
            recipe.build_loaders(rank, 2)
        told.append(str(error.value))
    assert all("has no t2w" in text for text in told)
    assert sum("is empty" in text for text in told) == 1


def test_a_quadratic_relation_is_found() -> None:
    condition = torch.rand(4, 3, 5, 5, 5) * 2 - 1
    a, b, c = condition.unbind(dim=1)
    target = (0.1 + 0.3 * a - 0.2 * b * c + 0.2 * c.square())[:, None]
    found = VoxelwiseQuadratic(zip(condition.split(2), target.split(2), strict=True))
    torch.testing.assert_close(found(condition), target, rtol=0, atol=1e-5)


def test_each_verdict_stands_beside_its_interval() -> None:
    """Of eight cases the network is better in PSNR, worse in SSIM, and either in the spectrum."""
    rows = {
        "diffusion": [{"psnr_db": 21.0 + n, "ssim": 0.5, "spectrum_db": n % 2} for n in range(8)],
        "mean image": [{"psnr_db": 20.0 + n, "ssim": 0.75, "spectrum_db": 0.5} for n in range(8)],
        "no change": [{"psnr_db": 10.0, "ssim": 0.25, "spectrum_db": 9.0} for _ in range(8)],
    }
    table = {
        name: {measure: sum(case[measure] for case in cases) / len(cases) for measure in cases[0]}
        for name, cases in rows.items()
    }
    better, worse, open_ = re.split(", (?!9)| and ", _compare_with_best(table, rows))
    assert better == "is 1.0 dB better in PSNR than 'mean image' (95 % interval +1.0 to +1.0)"
    assert worse == "0.250 worse in SSIM than 'mean image' (95 % interval -0.250 to -0.250)"
    assert re.fullmatch(
        r"not to be told in spectrum from 'mean image' \(95 % interval -0\.\d to \+0\.\d dB\)", open_
    )


@pytest.mark.parametrize("name", ["fast_ddpm", "fast_ddpm_64", "fast_ddpm_large"])
def test_the_guides_presets_have_its_numbers(name: str) -> None:
    config = _config(preset=name, data="BraTS2023")
    assert config.prediction == "epsilon"
    assert config.samples_per_step(4) == (32 if config.edge >= 256 or config.edge == 64 else 16)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": 18, "channels": (4, 8, 16)}, "multiple of 4"),
        ({"attention_edges": (4,)}, "not resolutions"),
        ({"channels": (8, 18)}, "norm_groups"),
        ({"spacing": "non-uniform", "sampling_steps": 10}, "counts only with spacing='uniform' or"),
        ({"spacing": "non-uniform", "num_times": 500}, "out of 1000"),
        ({"sampler": "posterior", "eta": 0.5}, "eta=0.5 counts only with sampler='ddim'"),
        ({"variance": "large"}, "only with sampler='posterior'"),
        ({"beta_start": 0.1}, "beta_start"),
        ({"num_times": 8}, "less than the default's"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _config(**settings)
