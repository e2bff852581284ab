"""The settings of a cluster: its devices, the number of ranks, and how the ranks communicate."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, field_validator

from nbgpu.config.settings import Settings, control
from nbgpu.text.sizes import parse_size


class ClusterConfig(Settings):
    """Which devices get an engine, and how the engines talk."""

    gpus: str = Field(
        "auto",
        description="GPUs to use: 'auto' for all, 'none' for CPU ranks, or numbers and UUIDs separated by commas",
        json_schema_extra=control("Devices"),
    )
    ranks: int | None = Field(
        None,
        ge=1,
        le=64,
        description="number of ranks; left out: one for each GPU, or 2 CPU ranks where there is none",
        json_schema_extra=control("Devices"),
    )
    backend: Literal["auto", "nccl", "gloo", "hierarchical_copy"] = Field(
        "auto",
        description="how the ranks talk; 'auto' tries nccl (on GPUs), nccl in safe mode, gloo, and a rank alone, takes "
        "the first that works, and says so; one that is named is the only one; 'hierarchical_copy' is another name for gloo",
    )
    nccl_safe: bool = Field(
        False,
        description="NCCL without direct access between GPUs, InfiniBand and CUDA's host memory, for containers where it "
        "hangs or fails; slower. Variables that you have set stay",
    )
    probe_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="how long a first all_reduce over nccl may take before backend='auto' tries the next way, in seconds",
    )
    collective_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=30 * 86_400,
        description="how long a collective may take before torch gives it up, in seconds; a rank that fails or dies is "
        "noticed long before",
    )
    memory_limit: str = Field(
        "",
        description="the most that a rank may take, as bytes ('4294967296'), a size ('4096MiB', '4GiB'), or a share of its "
        "device ('0.5'), which ranks on one device divide among them; on a GPU what torch allocates, on the CPU the "
        "rank's own memory; empty for no limit",
        json_schema_extra=control("Devices"),
    )
    allocator: str = Field(
        "",
        pattern=r"^$|^[a-z0-9_]+:[^,:\s]+(,[a-z0-9_]+:[^,:\s]+)*$",
        description="settings of torch's GPU allocator, such as 'expandable_segments:True' against fragmentation, as "
        "PYTORCH_ALLOC_CONF takes them; that variable stays where you have set it",
    )
    threads_per_rank: int | None = Field(
        None, ge=1, le=512, description="CPU threads for each rank; left out: the host's cores / ranks"
    )
    cell_seed: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="seed of the random numbers that cells draw from torch, NumPy and random: each rank gets one of its own, "
        "made of this and its number, so that cells can be repeated; left out: other numbers on each rank and at each "
        "start, as under torchrun. A run has its own `seed`",
    )
    keep: bool = Field(
        False,
        description="let the cluster and its run go on when the notebook's kernel ends; nbgpu.attach() rejoins",
    )
    release_after_s: float | None = Field(
        None,
        ge=1,
        le=365 * 86_400,
        description="end the cluster, and free its GPUs, after so many seconds without any cell, run or typing in the "
        "notebook that has it; left out: never. What the ranks hold is lost then; the next cell says so",
        json_schema_extra=control("Devices"),
    )
    share_gpus: bool = Field(False, description="take GPUs even where another cluster has them already")
    spare: int = Field(
        0,
        ge=0,
        le=16,
        description="engines that wait to take the place of a rank that dies; each holds memory, and no GPU until then",
    )
    start_timeout_s: float = Field(
        120.0, gt=0, le=3600, description="how long the engines may take to start, in seconds"
    )
    notice_after_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="seconds that ranks wait in a collective before a notice, under the cell or in a run's panel, names "
        "who waits where; 0 for never",
    )
    max_output_lines: int = Field(
        25_000,
        ge=10,
        le=1_000_000,
        description="lines of text, of 100 characters on average, that a cell shows; the full text of a cell that prints "
        "more is in a file for each rank, beside the runs",
    )
    debug: bool = Field(
        False,
        description="torch compares the ranks' collectives before each one (TORCH_DISTRIBUTED_DEBUG=DETAIL), so that "
        "different calls or shapes are named; slows every collective",
    )

    @field_validator("gpus", mode="before")
    @classmethod
    def _join_names(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _check_amount(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value:
            parse_size(value)
        return value

    def threads_for(self, local_world_size: int) -> int:
        """The number of CPU threads for each of `local_world_size` ranks on this host."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // local_world_size)
