"""What collectives cost by the models: between measured sizes, and by torch's model of NCCL."""

from __future__ import annotations

import pytest

from nbgpu.engine.group import torch_private
from nbgpu.engine.scaling import link_timing
from nbgpu.errors import ConfigError
from nbgpu.performance.costs import MAX_RANKS, NcclTimes, interpolated, ranks_of

MIB = 2**20


def test_between_and_beyond_measured_sizes() -> None:
    sizes, seconds = [1.0, 2.0, 4.0], [10.0, 12.0, 20.0]
    assert [interpolated(sizes, seconds, size) for size in sizes] == seconds
    assert interpolated(sizes, seconds, 3) == 16
    assert interpolated(sizes, seconds, 8) == 36
    assert interpolated(sizes, seconds, 0.5) == 9
    # What is noise at the end is not continued.
    assert interpolated(sizes, [10.0, 12.0, 11.0], 8) == 11


@pytest.fixture(scope="module")
def h100() -> NcclTimes:
    return NcclTimes("H100", 8, True, link_timing.nccl_seconds("H100", 8, True))


def cost_s(times: NcclTimes, operation: str, ranks: int, num_bytes: float) -> float:
    return sum(times.timing(operation, ranks)(num_bytes))


def test_nccl_is_as_torch_models_it(h100: NcclTimes) -> None:
    from torch._inductor import comm_analysis

    before = (comm_analysis.get_gpu_type, comm_analysis.torch)
    model = torch_private.nccl_model("A100", 8, True)
    assert model is not None
    # Without a GPU torch takes it for an A100 with eight on a node.
    expected_ms = comm_analysis.estimate_nccl_collective_runtime_impl(
        25 * MIB, 16, comm_analysis.NCCL_COLL.ALL_REDUCE
    )
    assert model("all_reduce", 25 * MIB, 16) == pytest.approx(expected_ms / 1000)
    # torch's own model is left as it was.
    assert (comm_analysis.get_gpu_type, comm_analysis.torch) == before
    # The link's rate bounds it: NVLink 4 carries 450 GB/s each way.
    assert cost_s(h100, "all_reduce", 8, 1024 * MIB) > 1.75 * 1024 * MIB / 450e9


def test_nccl_s_times_follow_the_hardware(h100: NcclTimes) -> None:
    on_one, on_two = (cost_s(h100, "all_reduce", ranks, 64 * MIB) for ranks in (8, 16))
    assert on_two > 2 * on_one, "InfiniBand is slower than NVLink"
    assert cost_s(h100, "all_gather", 8, 64 * MIB) < on_one
    pcie = NcclTimes("H100", 8, False, link_timing.nccl_seconds("H100", 8, False))
    assert cost_s(pcie, "all_reduce", 8, 64 * MIB) > 5 * on_one
    assert "InfiniBand" in str(h100)
    least, most = (sum(h100.timing("all_reduce", 8, end)(MIB)) for end in ("least", "most"))
    assert least < cost_s(h100, "all_reduce", 8, MIB) < most
    assert set(h100.frame()["ranks"]) == set(ranks_of(8))


def test_ranks_that_do_not_fill_the_nodes_are_refused(h100: NcclTimes) -> None:
    with pytest.raises(ConfigError, match="12 ranks do not fill nodes of 8"):
        h100.timing("all_reduce", 12)
    assert ranks_of(8)[:9] == [2, 3, 4, 5, 6, 7, 8, 16, 24]
    assert ranks_of(1)[-1] == ranks_of(8)[-1] == MAX_RANKS
