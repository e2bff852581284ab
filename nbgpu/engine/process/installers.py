"""The functions that make an engine a rank, in order: they apply the rank's spec, and change torch and the
shell. `RankKernel` (`engine/ipykernel/kernel.py`) changes how the engine answers requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbgpu.engine.group import ddp_objects, diagnosis, group, simulated_link, torch_settings
from nbgpu.engine.ipykernel import (
    awaiting,
    clear_output,
    debugger,
    input_requests,
    interrupts,
    kernel,
    out_of_memory,
    remains,
    script_lines,
    streams,
    tracebacks,
)
from nbgpu.engine.ipykernel.shell import take_over_defaults
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory import other_gpus
from nbgpu.engine.model import randomness
from nbgpu.engine.process import torchrun_variables
from nbgpu.engine.process.rank_spec import RankSpec
from nbgpu.engine.variables import import_times, library_objects
from nbgpu.machine import clock, numa
from nbgpu.machine.links import Link
from nbgpu.protocol.short_cuts import are_plain

Installer = Callable[[RankSpec, Any], None]
"""Called with the rank's spec and the engine's shell."""


def _unless_plain(install: Callable[[Any], None]) -> Installer:
    """Return an installer that does nothing if the short cuts of cells are switched off
    (`protocol/short_cuts.py`)."""
    return lambda _, shell: None if are_plain() else install(shell)


def _timeline() -> AbstractContextManager[None]:
    # Few cells have a timeline.
    from nbgpu.engine.scaling import cell_timeline

    return cell_timeline.noted()


def _limit_memory(spec: RankSpec, _: Any) -> None:
    if spec.memory_limit_bytes is not None:
        memory_limit.enforce(spec.memory_limit_bytes, torch.device(spec.device))


def _define_variables(spec: RankSpec, shell: Any) -> None:
    """Define the variables that nbgpu gives the cells of each rank, such as `rank` and `device`."""
    names = {
        "rank": spec.rank,
        "local_rank": spec.local_rank,
        "world_size": spec.world_size,
        "device": torch.device(spec.device),
        "torch": torch,
        "dist": dist,
    }
    # Not interactive: `%who` and `%nbgpu vars` leave them out, because they are not the person's.
    shell.push(names, interactive=False)


INSTALLERS: tuple[Installer, ...] = (
    # First, because the others may note the time.
    lambda spec, _: clock.keep_time_with(spec.clock_ahead_s),
    # Before torch starts threads of its own, which inherit the cores.
    lambda spec, _: numa.bind(spec.binding),
    # Before torch's settings are noted, because the number of threads is one of them.
    lambda spec, _: torch.set_num_threads(spec.threads),
    # Before any code that may change torch's settings, because runs begin with these.
    lambda *_: torch_settings.note_beginning(),
    # In any order, before the first group and the first cell.
    lambda spec, _: randomness.seed_cells(spec.cell_seed, spec.rank),
    lambda *_: diagnosis.mend_ddp(),
    lambda *_: import_times.note(),
    lambda *_: group.note_connections(),
    lambda spec, _: simulated_link.install(
        None if spec.link is None else Link(**spec.link), spec.slow_factor
    ),
    # After the simulated link, whose own hooks are none of the person's.
    lambda *_: ddp_objects.note(),
    # The first with work after a cell, because the others take the error that it puts in place of torch's.
    lambda _, shell: tracebacks.install(shell),
    # In any order, before the first cell.
    lambda spec, shell: script_lines.install(shell, spec.device),
    lambda _, shell: torchrun_variables.install(shell),
    lambda _, shell: take_over_defaults(shell),
    lambda _, shell: clear_output.clear_only_own_displays(shell),
    lambda spec, shell: input_requests.install(shell.kernel, Path(spec.folder), spec.rank),
    lambda _, shell: kernel.prepare_shell(shell, _timeline),
    _unless_plain(awaiting.install),
    _unless_plain(kernel.publish_less),
    lambda *_: interrupts.install(),
    lambda spec, shell: other_gpus.warn_of_memory_on_other_gpus(shell, torch.device(spec.device)),
    # Before forked children have streams, because the order holds for their text, too.
    lambda _, shell: streams.keep_in_order_with_lines(shell),
    # After all else that replaces the `write` of a stream, because the text of children takes the same way.
    lambda _, shell: streams.install(shell),
    # Before the debugger, which would keep the variables of the functions that ran out of memory.
    lambda spec, shell: out_of_memory.explain_failed_cells(shell, torch.device(spec.device)),
    # After those that replace the error of a cell, because it keeps that error.
    lambda _, shell: debugger.install(shell),
    # After the others have taken their memory.
    _limit_memory,
    # The last with work before a cell, because the traffic that it begins to count is the cell's.
    lambda _, shell: shell.events.register("pre_run_cell", lambda _: group.prepare_cell()),
    # In any order, before the first cell.
    lambda _, shell: remains.install(shell),
    lambda _, shell: library_objects.install(shell),
    _define_variables,
)
"""The installers in the order in which they are called; the comments give the reasons for the order."""
