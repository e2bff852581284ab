"""Two ranks on one GPU, over gloo: their group, their shares of the memory, and what a person is shown."""

from __future__ import annotations

from typing import Any

from checks import Place, check


@check(
    "two ranks share one GPU over gloo: the sums are right, and DDP trains with equal weights",
    slice=2,
    page="devices",
    shows=("engine/group", "machine/transports.py"),
    budget_s=15,
    seldom=False,
)
def two_ranks_with_gloo(place: Place) -> None:
    with place.cluster(ranks=2) as cluster:
        place.figure("cluster", cluster.describe())
        assert cluster.parts.state.transport.name == "gloo"
        said = cluster.execute(
            "total = torch.full((4,), float(rank + 1), device=device); dist.all_reduce(total)\n"
            "parts = [torch.empty(2, device=device) for _ in range(2)]\n"
            "dist.all_gather(parts, torch.full((2,), float(rank), device=device))\n"
            "print(total.tolist(), [p[0].item() for p in parts], total.device.type)"
        )
        kind = place.device.partition(":")[0]
        assert set(said.values()) == {f"[3.0, 3.0, 3.0, 3.0] [0.0, 1.0] {kind}\n"}, said
        said = cluster.execute(
            "torch.manual_seed(rank)\n"
            "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device))\n"
            "ddp(torch.randn(8, 64, device=device)).square().sum().backward()\n"
            "print(float(ddp.module.weight.grad.double().sum()))"
        )
        assert said[0] == said[1], f"the gradients differ: {said}"


@check(
    "memory_limit='0.5' gives each of two ranks on a GPU a quarter of its memory, and refuses more",
    slice=2,
    page="devices",
    shows=("engine/memory/limit.py", "machine/devices.py"),
    budget_s=12,
    seldom=False,
)
def memory_shares(place: Place) -> None:
    import pytest

    import nbgpu

    share = place.size("0.5", "0.2")
    with place.cluster(ranks=2, memory_limit=share) as cluster:
        of_rank_bytes = int(float(share) * cluster.devices[0].memory_bytes / 2)
        place.figure("share of each rank", of_rank_bytes / 2**30, "GiB")
        if place.on_gpu:
            # NVML counts more memory of a GPU than CUDA, whose share torch is told.
            said = cluster.execute(
                "total_bytes = torch.cuda.get_device_properties(device).total_memory\n"
                "print(torch.cuda.get_per_process_memory_fraction() * total_bytes)"
            )
            assert all(abs(float(text) - of_rank_bytes) < 2**20 for text in said.values()), said
        cluster.execute(f"x = torch.empty({of_rank_bytes // 2}, dtype=torch.uint8, device=device)")
        with pytest.raises(nbgpu.RankError, match="OutOfMemoryError") as caught:
            cluster.execute(f"y = torch.ones({of_rank_bytes * 6 // 10}, dtype=torch.uint8, device=device)")
        assert {failure.rank for failure in caught.value.failures} == {0, 1}
        cluster.execute(
            f"del x; y = torch.ones({of_rank_bytes * 6 // 10}, dtype=torch.uint8, device=device); del y"
        )


@check(
    "the panel, the table and the report show two ranks on one device, each with its own memory",
    slice=2,
    page="devices",
    shows=("ui/run", "run_folder/recorder.py"),
    budget_s=20,
    seldom=False,
)
def panel_with_two_ranks_on_one_device(place: Place) -> None:
    from nbgpu.ui.run.snapshot import bundle

    settings: dict[str, Any] = {
        "data": "phantoms",
        "patch_size": 16,
        "num_phantoms": 8,
        "steps": 12,
        "val_every": 0,
        "work_out_result": False,
        "runs_dir": str(place.folder),
    }
    with place.cluster(ranks=2, backend="gloo") as cluster:
        # The two take different amounts, which the panel must not mix up.
        cluster.execute("held = torch.ones((1 + 3 * rank) * 2**26, dtype=torch.uint8, device=device)")
        run = cluster.train("autoencoder", **settings).wait(place.bound_s(90))
        name = "memory_reserved_bytes" if place.on_gpu else "memory_rss_bytes"
        held = [status.values[name] for status in run.statuses()]
        status = cluster.status()
        print(status)
        statuses = run.statuses()
    labels = {device.label() for device in run.info.devices}
    place.figure("devices of the two ranks", ", ".join(sorted(labels)))
    for rank, num_bytes in enumerate(held):
        place.figure(f"memory of rank {rank}, in the panel", num_bytes / 2**20, "MiB")
    if place.on_gpu:
        assert len({device.uuid for device in run.info.devices}) == 1
        assert run.info.devices[0].uuid.startswith("GPU-")
        assert labels.pop() in status
    assert held[1] - held[0] > 100 * 2**20, "rank 1 holds 192 MiB more, and the panel does not show it"
    assert [s.state for s in statuses] == ["finished", "finished"]
    shown = bundle(run)
    assert "rank 1" in shown["text/html"]
    report = (run.folder / "report.html").read_text()
    assert report.count(run.info.devices[0].name) >= 2
