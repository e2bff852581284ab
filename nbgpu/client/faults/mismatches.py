"""Describes, in nbgpu's words, ranks that called different collectives, or the same with different shapes.

torch compares the ranks' calls in debug mode (TORCH_DISTRIBUTED_DEBUG=DETAIL) and says on each rank how its
own call differs from another's. What a rank reports about another can be wrong if one of them has no tensors
(torch 2.13 takes a barrier for a reduce), so only the part about a rank's own call is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbgpu.protocol.records import RankFailure
from nbgpu.text.ranks import named_ranks, ranks_by

_MISMATCH = "Detected mismatch between collectives on ranks."
_FINGERPRINT = re.compile(
    r"CollectiveFingerPrint\(.*?OpType=(?P<kind>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\], TensorDtypes=(?P<dtype>\w+))?"
)
_CELL_LINE = re.compile(r"In\[(\d+)\].*?, line (\d+)")
_IN_COLLECTIVE = re.compile(r"\(in (\w+) of torch\.distributed:")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}
"""torch's names that differ by more than upper case from the function that a person calls."""
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}


def explained(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return a failure for each rank with the calls of all ranks, or nothing if there was no mismatch."""
    if not any(failure.message.startswith(_MISMATCH) for failure in failures):
        return []
    ranks_by_call = ranks_by((_call(failure), failure.rank) for failure in failures)
    text = ", ".join(f"{named_ranks(ranks)} {call}" for call, ranks in ranks_by_call.items())
    return [RankFailure(failure.rank, "CollectiveMismatch", text, text) for failure in failures]


def _call(failure: RankFailure) -> str:
    """Return a rank's call in words, such as 'called all_reduce of float32[4] at cell line 3'."""
    traceback = _ANSI.sub("", failure.traceback)
    name, tensor = "", ""
    if failure.message.startswith(_MISMATCH) and (fingerprint := _FINGERPRINT.search(failure.message)):
        name = _NAMES.get(fingerprint["kind"], fingerprint["kind"].lower())
        if fingerprint["dtype"] is not None:
            tensor = f" of {_DTYPES.get(fingerprint['dtype'], fingerprint['dtype'].lower())}[{fingerprint['shape']}]"
    if called := _IN_COLLECTIVE.search(traceback):
        name = called[1]  # the function that the person wrote: barrier, where torch says all_reduce
    lines = _CELL_LINE.findall(traceback)
    # The outermost lines are the cell's; the lines below them belong to functions from earlier cells.
    in_cell = [line for cell, line in lines if cell == lines[0][0]]
    where = f" at cell line {in_cell[-1]}" if in_cell else ""
    return f"called {name}{tensor}{where}" if name else f"failed{where}"
