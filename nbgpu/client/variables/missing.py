"""Hints for names that are missing where a cell ran, and defined on the other side.

The notebook and the ranks have variables of their own. A plain cell that uses a name of the ranks fails, and
so does a distributed cell that uses one of the notebook; the hint below the error says how to get the name
across. Only ranks that owe no answer are asked, and for a third of a second at most.
"""

from __future__ import annotations

import ast
import builtins
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from nbgpu.client.engines.ranks import Ranks
from nbgpu.errors import ClusterError
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import GIVEN_NAMES, RankFailure
from nbgpu.serialization.sources import parse_cell
from nbgpu.text.ranks import named_ranges, rank_ranges

_PATIENCE_S = 0.3
"""The hint must not hold up the error, so ranks that do not answer within this time are left out."""
_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")
_PLACE = re.compile(r"^(Cell In\[|File )", re.MULTILINE)
_LEFT_OUT = "of libraries left out"
"""A part of the sentence that tracebacks of cells have if frames of libraries were left out."""
_COLOR = re.compile(r"\x1b\[[\d;]*m")


def used_in(code: str) -> list[str]:
    """The names that a cell uses and does not define, in the order in which they stand there; none where the
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
    """Ask the ranks that are idle which of these names they have; wait a moment at most.

    Returns:
        By rank, for those that answered: the names that it has, and whether each is a module.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    try:
        idle = [rank for rank in range(len(ranks)) if not ranks.owes_answer(rank)]
        asked = ranks.call(Call.FIND_NAMES, list(names), ranks=idle)
        return {
            rank: answer.result()
            for rank, answer in asked.items()
            if answer.wait(max(0.0, give_up_s - time.monotonic())) and answer.exception() is None
        }
    except ClusterError:
        return {}  # a rank is gone, and the next distributed cell says so


def hint_for_plain_cell(error: NameError, cell: str, variables: Mapping[str, Any], ranks: Ranks) -> str:
    """Return a sentence for a plain cell that has raised a NameError; empty where the ranks do not have the
    name.

    Args:
        error: the error, with its traceback.
        cell: the cell's text, with its magics transformed.
        variables: the notebook's.
        ranks: the ranks that may have the name.
    """
    name, frame = error.name, _innermost_frame(error)
    # What a module looks for in vain among its own names has nothing to do with the ranks.
    if not name or isinstance(error, UnboundLocalError) or frame is None or frame.f_globals is not variables:
        return ""
    used = [each for each in used_in(cell) if each not in variables]
    names = used if name in used else [name]
    by_rank = names_on(ranks, names)
    has_it = [rank for rank, theirs in by_rank.items() if name in theirs]
    # Ranks that are busy have at least what every rank is given.
    if not has_it and (by_rank or name not in GIVEN_NAMES):
        return ""
    function = frame.f_code.co_qualname.replace(".<locals>", "")
    if name not in used and not function.startswith("<"):
        # Of a method or an inner function the notebook has the class or the outer function.
        pushed = function.partition(".")[0]
        return (
            f"{name} is on the ranks, and {function} looked for it in the notebook: %push {pushed}, and call it in a cell "
            "that begins with %%distributed"
        )
    if by_rank:
        there = [each for each in names if all(each in by_rank[rank] for rank in has_it)]
    else:
        there = [each for each in names if each in GIVEN_NAMES]
    be = "is" if len(there) == 1 else "are"
    if len(has_it) == len(by_rank):
        sentence, from_rank = f"{', '.join(there)} {be} on the ranks: begin the cell with %%distributed", ""
    else:
        some = rank_ranges(has_it)
        sentence = f"{', '.join(there)} {be} on {named_ranges(has_it)}: begin the cell with %%distributed --ranks {some}"
        from_rank = f" --rank {has_it[0]}"
    # No copy is offered of modules, nor of what every rank is given.
    if any(each in GIVEN_NAMES or by_rank[has_it[0]][each] for each in there):
        return sentence
    them = "it" if len(there) == 1 else "them"
    return f"{sentence}, or copy {them} here with %pull {' '.join(there)}{from_rank}"


def _innermost_frame(error: BaseException) -> FrameType | None:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


def hint_for_ranks(
    failed: Iterable[RankFailure], cell: str, variables: Mapping[str, Any], ranks: Ranks
) -> str:
    """Return what to do about names that a distributed cell did not find on the ranks, and that the notebook
    has; empty where there are none.

    Args:
        failed: the ranks' failures.
        cell: the cell's text.
        variables: the notebook's.
        ranks: the ranks that ran the cell.
    """
    used = used_in(cell)
    missing = [name for failure in failed if (name := _not_defined(failure, used)) in variables]
    if not missing:
        return ""
    # What else the cell would miss, one failure after the other.
    beside = [n for n in used if n in variables and n not in missing and not n.startswith("_")]
    by_rank = names_on(ranks, beside) if beside else {}
    lacking = [name for name in beside if any(name not in theirs for theirs in by_rank.values())]
    names = list(dict.fromkeys([*missing, *lacking]))
    modules = [name for name in names if isinstance(variables[name], ModuleType)]
    ours = [name for name in names if type(variables[name]).__module__.startswith("nbgpu.")]
    values = [name for name in names if name not in (*modules, *ours)]
    lines = []
    if values:
        lines.append(f"The notebook has {', '.join(values)}: %push {' '.join(values)}")
    if modules:
        lines.append(
            f"The notebook has imported {', '.join(modules)}: %nbgpu sync repeats its imports on the ranks"
        )
    if ours:
        be = "belongs" if len(ours) == 1 else "belong"
        lines.append(f"{', '.join(ours)} {be} to the notebook alone: take a plain cell")
    return "\n".join(lines)


def _not_defined(failure: RankFailure, used: Sequence[str]) -> str:
    """Return the name that a cell, or a function of a cell, did not find; empty for another failure, and for
    one in which a library may have missed a name of its own."""
    found = _NOT_DEFINED.match(failure.message) if failure.error_type == "NameError" else None
    if found is None or found[1] in used:
        return found[1] if found else ""
    trace = _COLOR.sub("", failure.traceback)
    places = _PLACE.findall(trace)
    return found[1] if places and places[-1].startswith("Cell") and _LEFT_OUT not in trace else ""
