"""The memory of a training step on real ranks, beside what is predicted for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import nbgpu

AUTOENCODER = {"data": "phantoms", "patch_size": 16, "batch_size": 2, "channels": (16, 32, 64)}
SUM = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("autoencoder", AUTOENCODER),
        ("autoencoder", {**AUTOENCODER, "gradient_as_bucket_view": False, "ema_decay": 0.9}),
        pytest.param(
            "autoencoder", {**AUTOENCODER, "strategy": "fsdp", "batch_size": 4}, marks=pytest.mark.long
        ),
        ("autoencoder", {**AUTOENCODER, "adversarial_weight": 0.1, "accumulate": 2}),
        pytest.param(
            "diffusion",
            {"data": "phantoms", "batch_size": 2, "amp": "bf16", "checkpoint_activations": True},
            marks=pytest.mark.long,
        ),
        ("survival", {"batch_size": 8}),
    ],
)
def test_the_prediction_is_within_a_tenth(cluster2: Any, recipe: str, settings: dict[str, Any]) -> None:
    found = nbgpu.memory(recipe, **settings)
    print(found)
    assert found.error is not None
    assert abs(found.error) < 0.1
    for of_rank in found.measured:
        assert of_rank.tensors["parameters"] > 0
        assert of_rank.tensors["optimizer"] > 1.9 * of_rank.tensors["parameters"]
        assert of_rank.before_bytes + of_rank.tensors_bytes + of_rank.rest_bytes == of_rank.peak_bytes
    if settings.get("adversarial_weight"):
        assert found.measured[0].tensors["discriminator"] > 0
    if settings.get("ema_decay"):
        assert found.predicted.tensors is not None
        measured, predicted = found.measured[0].tensors, found.predicted.tensors
        assert measured["average"] == predicted["average"] > 0
        # Numbers that other threads of a rank hold at that moment count as the buckets.
        assert measured["buckets"] == pytest.approx(predicted["buckets"], rel=1e-3)


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_a_plan_counts_the_scores_of_an_attention_that_the_kernel_keeps(cluster2: Any, kernel: str) -> None:
    settings = {"data": "phantoms", "attention_edges": (8,), "sdpa": kernel, "batch_size": 2}
    predicted = nbgpu.memory("diffusion", **settings).predicted.tensors
    assert predicted is not None
    assert cluster2.plan("diffusion", **settings).memory["activations"] == predicted["activations"]


def test_a_plan_counts_what_the_fullest_rank_holds(cluster2: Any) -> None:
    before = cluster2.plan("autoencoder", **AUTOENCODER).memory
    cluster2.execute("held = torch.ones(2**26)", ranks=[1])  # 256 MiB
    try:
        after = cluster2.plan("autoencoder", **AUTOENCODER).memory
    finally:
        cluster2.execute("del held", ranks=[1])
    assert after["before"] - before["before"] > 128 * 2**20
    assert after["peak"] - after["before"] == before["peak"] - before["before"]


def test_the_ranks_keep_what_they_have_and_nothing_else(cluster2: Any) -> None:
    resident = "import psutil; print(psutil.Process().memory_info().rss)"
    cluster2.execute("kept = rank; torch.manual_seed(7); state = torch.get_rng_state()")
    nbgpu.memory("autoencoder", **AUTOENCODER)
    before = {rank: int(text) for rank, text in cluster2.execute(resident).items()}
    nbgpu.memory("autoencoder", **{**AUTOENCODER, "batch_size": 16})
    after = {rank: int(text) for rank, text in cluster2.execute(resident).items()}
    # The larger batch took more than 100 MiB.
    assert all(after[rank] - before[rank] < 60 * 2**20 for rank in before)
    unchanged = f"{SUM}\nprint(kept, torch.equal(state, torch.get_rng_state()))"
    assert cluster2.execute(unchanged) == {0: "2\n0 True\n", 1: "2\n1 True\n"}


@pytest.mark.long
def test_other_settings_and_ranks_are_predicted_without_the_ranks(cluster2: Any) -> None:
    found = nbgpu.memory("autoencoder", **AUTOENCODER)
    plain = found.predicted.tensors
    assert plain is not None
    assert plain["gradients"] == plain["parameters"]
    assert plain["buckets"] == plain["gathered"] == plain["average"] == plain["discriminator"] == 0

    frame = found.predict(batch_size=[2, 4], strategy=["ddp", "fsdp"], ranks=[2, 64]).frame()
    assert len(frame) == 8
    of = frame.set_index(["ranks", "batch_size", "strategy"])
    total = of["total_bytes"]
    assert total[2, 2, "ddp"] == found.predicted.tensors_bytes == total[64, 2, "ddp"]
    assert total[64, 2, "fsdp"] < total[2, 2, "fsdp"] < total[2, 4, "fsdp"] < total[2, 4, "ddp"]
    # The first dimension of each weight is shared out, and rounded up.
    assert plain["parameters"] / 2 <= of["parameters"][2, 2, "fsdp"] < 0.51 * plain["parameters"]
    assert of["batches"][2, 4, "ddp"] == 2 * plain["batches"]

    (copied,) = found.predict(gradient_as_bucket_view=False, ema_decay=0.9).rows
    assert copied.tensors is not None
    assert copied.tensors["buckets"] == copied.tensors["average"] == plain["parameters"]
    for changed in ({"checkpoint_activations": True}, {"amp": "bf16"}):
        (row,) = found.predict(**changed).rows
        assert row.tensors is not None
        assert row.tensors["activations"] < plain["activations"]

    with pytest.raises(nbgpu.ConfigError, match=r"(?s)ranks = 0 is not valid.*amp"):
        found.predict(ranks=[0, 2], amp="fp8")
    with pytest.raises(nbgpu.ConfigError, match="activation_checkpointing"):
        found.predict(activation_checkpointing=True)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("autoencoder", {"batch_size": 0}, "batch_size"),
        ("autoencoder", {"strategy": "single"}, "trains on one rank"),
        ("microstructure", {}, "has no batches"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    cluster2: Any, recipe: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(nbgpu.ConfigError, match=message):
        nbgpu.memory(recipe, **settings)


def test_a_step_that_fails_frees_the_ranks(cluster2: Any) -> None:
    with pytest.raises(nbgpu.RankError, match=r"memory|allocate"):
        nbgpu.memory("autoencoder", data="phantoms", patch_size=128, batch_size=4096)
    assert cluster2.execute(SUM) == {0: "2\n", 1: "2\n"}


@pytest.mark.gpu
def test_a_gpu_says_what_its_allocator_took() -> None:
    with nbgpu.Cluster(ranks=1):
        found = nbgpu.memory("autoencoder", **AUTOENCODER)
        print(found)
        (of_rank,) = found.measured
        assert of_rank.tensors["activations"] > 0
        assert of_rank.peak_bytes >= of_rank.before_bytes + of_rank.tensors_bytes
        assert found.error is not None


def test_the_cache_of_the_data_is_what_the_volumes_take_that_are_kept(cluster2: Any, tmp_path: Path) -> None:
    volumes = tmp_path / "volumes"
    volumes.mkdir()
    for number in range(8):
        voxels = np.random.default_rng(number).normal(size=(24, 24, 24)).astype("float32")
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), volumes / f"{number}.nii.gz")
    settings = {
        "data": str(volumes),
        "patch_size": 16,
        "channels": (4, 8),
        "latent_channels": 2,
        "val_fraction": 0.0,
        "val_every": 0,
    }
    kept = {
        rate: nbgpu.memory("autoencoder", cluster2, with_data=True, cache_rate=rate, **settings)
        for rate in (0.5, 1.0)
    }
    # Each of the two ranks has four of the volumes, in float32, with what it knows of their foreground.
    volumes_bytes = 4 * 4 * 24**3
    for whole, half in zip(kept[1.0].measured, kept[0.5].measured, strict=True):
        assert volumes_bytes <= whole.cached_bytes <= 2 * volumes_bytes
        assert half.cached_bytes == pytest.approx(whole.cached_bytes / 2, rel=0.05)
    assert re.search(r"cache of the data +3\d\d\.\d KiB +3\d\d\.\d KiB", str(kept[1.0]))
    assert "cache of the data" in set(kept[1.0].frame()["category"])
    assert "cache of the data" not in str(nbgpu.memory("autoencoder", cluster2, **settings))
