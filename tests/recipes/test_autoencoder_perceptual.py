"""A perceptual distance with a network from a file, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import nbgpu
from nbgpu.recipes.autoencoder.feature_networks import ARCHITECTURES
from nbgpu.recipes.trained import load_trained
from nbgpu.run_folder import checkpoint_files


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """SqueezeNet with random weights, and linear layers for LPIPS, as the published files have them."""
    architecture = next(each for each in ARCHITECTURES if each.linear_file == "squeeze")
    torch.save(architecture.build().state_dict(), path := tmp_path / "squeezenet1_1.pth")
    linear = {
        f"lin{i}.model.1.weight": torch.rand(1, n, 1, 1) for i, n in enumerate(architecture.tapped_channels)
    }
    torch.save(linear, tmp_path / "squeeze.pth")
    return path


def test_every_rank_has_the_network_and_no_checkpoint_has_it(
    cluster2: nbgpu.Cluster, tmp_path: Path, network: Path
) -> None:
    settings = {
        "data": "phantoms", "patch_size": 20, "num_phantoms": 12, "batch_size": 1, "steps": 3, "val_every": 0,
        "perceptual": "features", "perceptual_network": str(network), "perceptual_slices": 0.1,
        "perceptual_weight": 0.001, "runs_dir": str(tmp_path / "runs"), "work_out_result": False,
    }  # fmt: skip
    run = cluster2.train("autoencoder", **settings).wait(400)
    assert run.status == "finished"
    metrics = run.metrics().dropna(subset=["perceptual_loss"])
    assert set(metrics["rank"]) == {0, 1}
    assert (metrics["perceptual_loss"] > 0).all()
    added = metrics["loss"] - metrics["recon_loss"] - 1e-7 * metrics["kl_loss"]
    assert added.to_numpy() == pytest.approx(0.001 * metrics["perceptual_loss"].to_numpy(), rel=1e-3)
    assert f"perceptual distance: features of SqueezeNet 1.1 from {network}" in "\n".join(run.info.data)
    newest = checkpoint_files.newest_whole(Path(run.folder)).checkpoint
    assert newest is not None
    for file in newest.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert not [name for name in tensors.keys() if "squeeze" in name or "features" in name]  # noqa: SIM118
    # The trained model needs the file no more.
    network.unlink()
    load_trained(run.folder)
