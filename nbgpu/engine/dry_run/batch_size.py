"""Finds the largest batch that fits by trying: all ranks take the same steps, and agree after each try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.dry_run.steps import DryRun, without_exchange
from nbgpu.engine.group import exchange, group, torch_private, torch_settings
from nbgpu.engine.group.consensus import raise_together, together
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory import usage as memory
from nbgpu.engine.memory.budget import SPARE_BYTES
from nbgpu.engine.model import precision, randomness
from nbgpu.engine.model.strategy import Sharded
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.recipe import Recipe
from nbgpu.errors import OutOfMemoryError
from nbgpu.machine import cgroups
from nbgpu.machine.clock import boot_id
from nbgpu.text.sizes import in_words

MAX_BATCH_SIZE = 4096
"""The largest value that the settings allow."""
_NUM_STEPS = 2
"""The optimizer's state is only there after the first step."""
_SHARE_OF_HOST = 0.8
"""The share of the host's free memory for all its CPU ranks together, if no limit was set."""


@torch_settings.as_at_the_beginning()
def find(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Find the largest batch size that fits, by real steps on generated batches: double the size until it
    does not fit, then bisect. A collective: every rank calls it with the same settings.

    Args:
        settings: all fields of a TrainConfig.

    Returns:
        The tries in order, the same on every rank: `batch_size`, `fits`, `peak_bytes` by rank, and `why`, the
        reason why it does not fit, or ''.

    Raises:
        OutOfMemoryError: not even one sample fits.
        DataError: a file is unusable; only on CPU ranks, whose data are in the same memory.
    """
    member = group.membership()
    config = without_exchange(train_config(**settings))
    # As before a run: an import that runs out of memory leaves half a module behind.
    with memory_limit.lifted():
        import_module("torch._dynamo")
    memory_limit.tighten()
    with (
        randomness.seeded_run(config),
        precision.kernels(config),
        _bounded(member.device),
        ExitStack() as held,
    ):
        recipe = by_name.load(config)
        spread = (
            held.enter_context(_sharded(config, recipe, member.device)) if config.strategy == "fsdp" else None
        )
        if member.device.type == "cpu":
            # The data are in the same memory.
            loaders = together(lambda: recipe.build_loaders(member.rank, member.world_size))
            held.callback(loaders.close)
        search = _Search(lambda: DryRun(config, member.device, recipe, spread=spread), member.device)
        held.callback(search.close)
        largest = search.run()
    if largest == 0:
        raise OutOfMemoryError(f"not even batch_size=1 fits: {search.tried[-1]['why']}")
    return search.tried


class _Search:
    """The search for the largest batch size, in which all ranks take the same tries.

    Args:
        make: builds the model and its optimizer; called in the first try, for which there may be too little
            memory as well.
        device: the rank's device.
    """

    def __init__(self, make: Callable[[], DryRun], device: torch.device) -> None:
        self._make = make
        self._dry_run: DryRun | None = None
        self._device = device
        self.tried: list[dict[str, Any]] = []
        self._failure: Exception | None = None
        """An error in a try other than a lack of memory."""

    def run(self) -> int:
        """Return the largest batch size that fitted, to within 1/16; 0 for none."""
        fits, size = 0, 1
        while self._fits_everywhere(size):
            if size == MAX_BATCH_SIZE:
                return size
            fits, size = size, min(2 * size, MAX_BATCH_SIZE)
        too_large = size
        # A gain below 1/16 is not worth more tries.
        while too_large - fits > max(1, fits // 16):
            middle = (fits + too_large) // 2
            if self._fits_everywhere(middle):
                fits = middle
            else:
                too_large = middle
        return fits

    def close(self) -> None:
        """Release the memory of the tries."""
        self._dry_run = None
        memory.free()

    def _fits_everywhere(self, batch_size: int) -> bool:
        """Try a batch size on all ranks, record the try, and return whether it fitted on all of them. A
        collective."""
        tries = exchange.gather(self._try(batch_size))
        raise_together(self._failure)
        reason = next((f"rank {rank}: {t['why']}" for rank, t in enumerate(tries) if t["why"]), "")
        peak_bytes = [t["peak_bytes"] for t in tries]
        self.tried.append(
            {"batch_size": batch_size, "fits": not reason, "peak_bytes": peak_bytes, "why": reason}
        )
        return not reason

    def _try(self, batch_size: int) -> dict[str, Any]:
        """Take steps with a batch size on this rank. No collective, so that the other ranks do not wait for
        one that runs out of memory.

        Returns:
            `why`: the reason if there is too little memory, else ''; any other error is left in `_failure`.
            `peak_bytes`: the most memory that was in use.
        """
        memory_limit.tighten(SPARE_BYTES)
        memory.begin_peak(self._device)
        why = ""
        try:
            if self._dry_run is None:
                self._dry_run = self._make()
                memory.begin_peak(self._device)
            for _ in range(_NUM_STEPS):
                self._dry_run.step(batch_size)
        except Exception as error:  # noqa: BLE001 - all ranks must learn of it
            with memory_limit.lifted():
                if memory.is_exhausted(error):
                    asked = memory.asked_bytes(str(error))
                    why = (
                        f"asked for {in_words(asked)}, which it did not get"
                        if asked
                        else "got no more memory"
                    )
                    # A failed allocation may have left oneDNN unusable; then the note says so.
                    if note := memory.mend_onednn(error, group.membership().rank):
                        why = f"{why}. {note}"
                else:
                    self._failure = error
                # The traceback holds the activations of the step that failed.
                memory.let_go(error)
                if self._dry_run is not None:
                    self._dry_run.zero_grad()
        peak_bytes = memory.peak_bytes(self._device)
        memory.free()
        # `lifted` leaves a reserve above the limit.
        memory_limit.tighten(SPARE_BYTES)
        return {"why": why, "peak_bytes": peak_bytes}


@contextmanager
def _sharded(
    config: TrainConfig, recipe: Recipe, device: torch.device
) -> Iterator[Callable[[nn.Module], Sharded]]:
    """Yield a function that shards a model by FSDP over a group of the backend 'fake'. The model takes the
    same memory as in a run, and nothing is exchanged, so that no rank waits for one that runs out of
    memory."""
    fake_group = torch_private.make_fake_group()
    mesh = DeviceMesh.from_group(fake_group, device.type)
    copies: list[Tensor] = []

    def shard(model: nn.Module) -> Sharded:
        """Shard a model over the fake group; on the CPU also allocate the copies that gloo would make."""
        blocks = list(recipe.blocks(model))
        if device.type == "cpu":
            block_bytes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
            rest_bytes = sum(p.nbytes for p in model.parameters()) - sum(block_bytes)
            # gloo copies the tensors that it gathers, and those that it scatters.
            num_bytes = 2 * max([rest_bytes, *block_bytes])
            copies.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
        return Sharded(config, model, blocks, mesh)

    # DTensor caches layouts, each with its group, and the mesh compares equal to that of a run. A try would
    # take an earlier run's group, and wait for ranks that do not join in, and a later run would take this
    # one.
    torch_private.forget_layouts()
    try:
        yield shard
    finally:
        copies.clear()
        torch_private.forget_layouts()
        dist.destroy_process_group(fake_group)


def _bounded(device: torch.device) -> Any:
    """Return a context in which a CPU rank without a limit uses at most its share of the free memory of its
    host, or of its container. A collective of CPU ranks without a limit."""
    if device.type == "cuda" or memory_limit.left_bytes() is not None:
        return nullcontext()
    own_bytes = psutil.Process().memory_info().rss
    host = boot_id()
    num_ranks = exchange.gather(host).count(host)
    return memory_limit.enforced_meanwhile(
        own_bytes + int(_SHARE_OF_HOST * cgroups.free_memory_bytes() / num_ranks)
    )
