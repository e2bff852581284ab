"""Hints for names that a plain cell misses but the ranks have, or that the ranks miss but the notebook has.

The notebook and the ranks have variables of their own, so both kinds of cells fail with a NameError. The hint
below the error says how to copy the name. Only idle ranks are asked, and for 0.3 s at most.
"""

from __future__ import annotations

import ast
import builtins
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from traceback import walk_tb
from types import ModuleType
from typing import Any

from nbgpu.client.engines.ranks import Ranks
from nbgpu.errors import ClusterError
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import GIVEN_NAMES, RankFailure
from nbgpu.serialization.sources import parse_cell
from nbgpu.text.ranks import named_ranges, rank_ranges

_PATIENCE_S = 0.3
"""Ranks that do not answer within this time are left out, so that the hint does not delay the error."""
_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")
_FRAME = re.compile(r"^(Cell In\[|File )", re.MULTILINE)
"""The beginning of a frame in a traceback."""
_LEFT_OUT = "of libraries left out"
"""A part of the sentence in a traceback that says that frames of libraries were left out."""
_COLOR = re.compile(r"\x1b\[[\d;]*m")


def used_in(code: str) -> list[str]:
    """Return the names that a cell reads and does not define, in the order of their first use; none if the
    text is not Python."""
    nodes = list(ast.walk(parse_cell(code)))
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            defined.add(node.name)
    loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    loads.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(n.id for n in loads if n.id not in defined and not hasattr(builtins, n.id)))


def names_on(ranks: Ranks, names: Sequence[str]) -> dict[int, Mapping[str, bool]]:
    """Ask the idle ranks which of these names they have.

    Returns:
        For each rank that answered in time: whether the value is a module, by each name that it has.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    try:
        idle = [rank for rank in range(len(ranks)) if not ranks.owes_answer(rank)]
        replies = ranks.call(Call.FIND_NAMES, list(names), ranks=idle)
        return {
            rank: answer.result()
            for rank, answer in replies.items()
            if answer.wait(max(0.0, give_up_s - time.monotonic())) and answer.exception() is None
        }
    except ClusterError:
        return {}  # a rank is gone, and the next distributed cell reports it


def hint_for_plain_cell(error: NameError, cell: str, variables: Mapping[str, Any], ranks: Ranks) -> str:
    """Return a sentence for a plain cell that has raised a NameError; empty if the ranks do not have the
    name.

    Args:
        error: the error, with its traceback.
        cell: the cell's text, with its magics transformed.
        variables: the variables of the notebook.
        ranks: the ranks that may have the name.
    """
    name = error.name
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # A name that is missing in a module has nothing to do with the ranks.
    if (
        not name
        or isinstance(error, UnboundLocalError)
        or not frames
        or frames[-1].f_globals is not variables
    ):
        return ""
    # Ask the ranks for all names that the cell misses, so that one hint is enough.
    used = [other for other in used_in(cell) if other not in variables]
    names = used if name in used else [name]
    by_rank = names_on(ranks, names)
    owners = [rank for rank, present in by_rank.items() if name in present]
    # Busy ranks do not answer, but have at least the names that every rank is given.
    if not owners and (by_rank or name not in GIVEN_NAMES):
        return ""
    # A function of the notebook misses the name: push the function, or the outermost class or function.
    function = frames[-1].f_code.co_qualname.replace(".<locals>", "")
    if name not in used and not function.startswith("<"):
        return (
            f"{name} is on the ranks, and {function} looked for it in the notebook: %push {function.partition('.')[0]}, "
            "and call it in a cell that begins with %%distributed"
        )
    # The cell itself misses the name: run it on the ranks, or pull the names.
    if by_rank:
        there = [other for other in names if all(other in by_rank[rank] for rank in owners)]
    else:
        there = [other for other in names if other in GIVEN_NAMES]
    be, them = ("is", "it") if len(there) == 1 else ("are", "them")
    if len(owners) == len(by_rank):
        sentence, from_rank = f"{', '.join(there)} {be} on the ranks: begin the cell with %%distributed", ""
    else:
        some = rank_ranges(owners)
        sentence = f"{', '.join(there)} {be} on {named_ranges(owners)}: begin the cell with %%distributed --ranks {some}"
        from_rank = f" --rank {owners[0]}"
    # Modules, and the names that every rank is given, are not to be copied.
    if any(other in GIVEN_NAMES or by_rank[owners[0]][other] for other in there):
        return sentence
    return f"{sentence}, or copy {them} here with %pull {' '.join(there)}{from_rank}"


def hint_for_ranks(
    failed: Iterable[RankFailure], cell: str, variables: Mapping[str, Any], ranks: Ranks
) -> str:
    """Return what to do about names that a distributed cell missed on the ranks, and that the notebook has;
    empty if there are none.

    Args:
        failed: the ranks' failures.
        cell: the cell's text.
        variables: the variables of the notebook.
        ranks: the ranks that ran the cell.
    """
    used = used_in(cell)
    missing = [name for failure in failed if (name := _missing_name(failure, used)) in variables]
    if not missing:
        return ""
    # Add the names that the cell would miss next, so that one hint is enough.
    others = [n for n in used if n in variables and n not in missing and not n.startswith("_")]
    by_rank = names_on(ranks, others) if others else {}
    missing += [name for name in others if any(name not in present for present in by_rank.values())]
    names = list(dict.fromkeys(missing))
    modules = [name for name in names if isinstance(variables[name], ModuleType)]
    nbgpu_objects = [name for name in names if type(variables[name]).__module__.startswith("nbgpu.")]
    values = [name for name in names if name not in (*modules, *nbgpu_objects)]
    lines = []
    if values:
        lines.append(f"The notebook has {', '.join(values)}: %push {' '.join(values)}")
    if modules:
        lines.append(
            f"The notebook has imported {', '.join(modules)}: %nbgpu sync repeats its imports on the ranks"
        )
    if nbgpu_objects:
        be = "belongs" if len(nbgpu_objects) == 1 else "belong"
        lines.append(f"{', '.join(nbgpu_objects)} {be} to the notebook alone: take a plain cell")
    return "\n".join(lines)


def _missing_name(failure: RankFailure, used: Sequence[str]) -> str:
    """Return the name that a cell, or a function defined in a cell, missed. It is empty for another failure,
    and if a library may have missed the name.

    Args:
        failure: a rank's failure.
        used: the names that the cell reads.
    """
    match = _NOT_DEFINED.match(failure.message) if failure.error_type == "NameError" else None
    if match is None or match[1] in used:
        return match[1] if match else ""
    trace = _COLOR.sub("", failure.traceback)
    frames = _FRAME.findall(trace)
    return match[1] if frames and frames[-1].startswith("Cell") and _LEFT_OUT not in trace else ""
