"""A run from the JSON files of MONAI's tutorial 3d_ldm, on volumes like those of the Decathlon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.feature_networks import ARCHITECTURES
from nbgpu.run_folder import folder as runs

CONFIG = """\
{
    "channel": 1,
    "spacing": [1.25, 1.25, 1.25],
    "spatial_dims": 3,
    "image_channels": 1,
    "latent_channels": 3,
    "autoencoder_def": {
        "_target_": "monai.networks.nets.AutoencoderKL",
        "spatial_dims": "@spatial_dims",
        "in_channels": "$@image_channels",
        "out_channels": "@image_channels",
        "latent_channels": "@latent_channels",
        "channels": [4, 8],
        "num_res_blocks": 1,
        "norm_num_groups": 2,
        "attention_levels": [false, false],
        "with_encoder_nonlocal_attn": false,
        "with_decoder_nonlocal_attn": false
    },
    "autoencoder_train": {
        "batch_size": 1,              // Per-GPU batch size
        "patch_size": [20, 24, 20],
        "lr": 1e-3,                   // Base learning rate (will be scaled)
        "perceptual_weight": 0.001,
        "kl_weight": 1e-7,
        "recon_loss": "l1",
        "lr_scheduler": "warmup_cosine",
        "max_epochs": 2,
        "val_interval": 1
    }
}
"""


@pytest.mark.long
def test_the_tutorials_files_train(tmp_path: Path) -> None:
    images = tmp_path / "data" / "Task01_BrainTumour" / "imagesTr"
    images.mkdir(parents=True)
    for index in range(5):
        values = np.random.default_rng(index).normal(size=(30, 34, 30, 2)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), images / f"BRATS_{index:03}.nii.gz")
    # The labels beside them are no images: they would be constant.
    (labels := images.with_name("labelsTr")).mkdir()
    nibabel.save(
        nibabel.Nifti1Image(np.zeros((30, 34, 30), np.float32), np.eye(4)), labels / "BRATS_000.nii.gz"
    )
    architecture = next(each for each in ARCHITECTURES if each.linear_file == "squeeze")
    torch.save(architecture.build().state_dict(), tmp_path / "squeezenet1_1.pth")
    linear = {
        f"lin{i}.model.1.weight": torch.rand(1, n, 1, 1) for i, n in enumerate(architecture.tapped_channels)
    }
    torch.save(linear, tmp_path / "squeeze.pth")
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "environment.json").write_text('{"data_base_dir": "data", "model_dir": "models"}')

    command = [sys.executable, "-m", "nbgpu.cli", "train", "autoencoder", "--gpus", "none"]
    command += ["--config", "config.json", "--environment-file", "environment.json"]
    command += ["--perceptual-network", "squeezenet1_1.pth", "--no-work-out-result"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "The same here, with nothing to set: " in done.stderr
    assert "features of SqueezeNet 1.1 from squeezenet1_1.pth" in done.stdout
    [run] = (tmp_path / "models").iterdir()
    _, config = runs.read_settings(run)
    assert isinstance(config, AutoencoderConfig)
    assert (config.spacing, config.image_channels) == ((1.25, 1.25, 1.25), (1,))
    assert (config.perceptual, config.perceptual_slices) == ("features", 0.2)
    # Four volumes are trained on, one patch of each, by two ranks.
    assert "finished at step 4" in " ".join(done.stdout.split())
