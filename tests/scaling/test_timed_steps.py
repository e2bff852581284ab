"""The measurement of a training step on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

import nbgpu

SETTINGS = {"data": "phantoms", "patch_size": 16, "batch_size": 2, "channels": (16, 32, 64)}
SUM = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"


@pytest.mark.parametrize("changed", [{}, {"comm_hook": "fp16", "accumulate": 2}])
def test_a_step_is_taken_apart(cluster2: Any, changed: dict[str, Any]) -> None:
    cluster2.execute("kept = rank")
    found = nbgpu.time_step("autoencoder", num_steps=3, **SETTINGS, bucket_mb=0.2, **changed)
    assert found.world_size == 2
    parts_s = found.forward_s + found.backward_s + found.optimizer_s
    assert 0 < parts_s <= 1.5 * found.computing_s
    # Gradients are float32 whatever is sent.
    assert found.num_bytes == cluster2.plan("autoencoder", **SETTINGS).memory["gradients"]
    assert len(found.buckets) > 1
    ready = [bucket.ready_s for bucket in found.buckets]
    assert ready == sorted(ready)
    assert ready[0] > 0
    assert "2 ranks over gloo" in str(found)
    assert cluster2.execute(f"{SUM}\nprint(kept)") == {0: "2\n0\n", 1: "2\n1\n"}


def test_a_step_of_fsdp_is_taken_apart_and_modelled(cluster2: Any) -> None:
    found = nbgpu.time_step("autoencoder", num_steps=3, **SETTINGS, strategy="fsdp")
    assert found.strategy == "fsdp"
    assert sum(block.num_bytes for block in found.blocks) + found.rest_bytes == found.num_bytes
    assert len(found.blocks) > 1
    assert 0 < sum(block.forward_s for block in found.blocks) <= found.forward_s
    modelled = found.predict(link="1Gbit/s,0.2ms", ranks=[1, 2])
    assert "FSDP" in str(modelled)
    # Every block is gathered twice and scattered once, and nothing of it overlaps on CPU ranks.
    exchange = modelled.steps[1].exchange
    assert exchange.exposed_s == pytest.approx(exchange.busy_s)


def test_nccl_s_times_come_from_a_rank(cluster2: Any) -> None:
    times = nbgpu.nccl_times("A100", ranks_per_node=4)
    measured = nbgpu.time_step("autoencoder", num_steps=1, **SETTINGS)
    found = measured.predict(link=times, ranks=[2, 4, 64])
    assert [step.is_beyond for step in found.steps] == [True] * 3
    assert "NCCL on A100s with NVLink, 4 on a node" in str(found)
    with pytest.raises(nbgpu.ConfigError, match="6 ranks do not fill nodes of 4"):
        measured.predict(link=times, ranks=[6])
    with pytest.raises(
        nbgpu.ConfigError, match="gpu='H900' is not known: V100, A100, H100, B200\nranks_per_node = 0"
    ):
        nbgpu.nccl_times("H900", ranks_per_node=0)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("autoencoder", {"strategy": "single", "batch_size": 2}, "strategy='single'"),
        ("autoencoder", {"batch_size": 0}, "batch_size"),
        ("autoencoder", {"num_steps": 0}, "num_steps = 0"),
        ("microstructure", {}, "has no batches"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    cluster2: Any, recipe: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(nbgpu.ConfigError, match=message):
        nbgpu.time_step(recipe, **settings)


def test_a_discriminator_is_refused_on_all_ranks(cluster2: Any) -> None:
    with pytest.raises(nbgpu.RankError, match="set adversarial_weight=0"):
        nbgpu.time_step("autoencoder", **SETTINGS, adversarial_weight=0.1)
    assert cluster2.execute(SUM) == {0: "2\n", 1: "2\n"}
