"""Cold start: from nothing to the first all_reduce, in a fresh process.

python tests/bench/start.py nbgpu | nbgpu16 | ipyparallel      on two ranks, or on 16; prints the seconds from
before the import
"""

import sys
import time

started_s = time.perf_counter()


def with_nbgpu(ranks: int = 2) -> None:
    import nbgpu

    with nbgpu.Cluster(gpus="none", ranks=ranks) as cluster:
        print(time.perf_counter() - started_s)
        assert cluster.running


def with_ipyparallel_defaults() -> None:
    import ipyparallel as ipp

    def all_reduce(rank: int, folder: str) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    import tempfile

    with (
        tempfile.TemporaryDirectory() as folder,
        ipp.Cluster(n=2, profile_dir=f"{folder}/profile", log_level=30) as client,
    ):
        totals = client[:].map_sync(all_reduce, [0, 1], [folder] * 2)
        print(time.perf_counter() - started_s)
        assert totals == [2.0, 2.0]


if __name__ == "__main__":
    {
        "nbgpu": with_nbgpu,
        "nbgpu16": lambda: with_nbgpu(ranks=16),
        "ipyparallel": with_ipyparallel_defaults,
    }[sys.argv[1]]()
