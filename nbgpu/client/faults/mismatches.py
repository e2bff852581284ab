"""Describes ranks that called different collectives, or the same one with tensors of different shapes.

torch compares the ranks' calls in debug mode (TORCH_DISTRIBUTED_DEBUG=DETAIL). Each rank's error then
describes its own call and another rank's. The description of the other rank can be wrong if one of the calls
has no tensors (torch 2.13 takes a barrier for a reduce), so it is ignored.
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
"""The functions of torch.distributed, by torch's internal name, if the names differ by more than case."""
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
    """Return, for each rank, a failure that describes the calls of all ranks; empty if there was no
    mismatch."""
    if not any(failure.message.startswith(_MISMATCH) for failure in failures):
        return []
    ranks_by_call = ranks_by((_call(failure), failure.rank) for failure in failures)
    text = ", ".join(f"{named_ranks(ranks)} {call}" for call, ranks in ranks_by_call.items())
    return [RankFailure(failure.rank, "CollectiveMismatch", text, text) for failure in failures]


def _call(failure: RankFailure) -> str:
    """Describe a rank's call, such as 'called all_reduce of float32[4] at cell line 3'."""
    traceback = _ANSI.sub("", failure.traceback)
    name, tensor = "", ""
    if failure.message.startswith(_MISMATCH) and (fingerprint := _FINGERPRINT.search(failure.message)):
        name = _NAMES.get(fingerprint["kind"], fingerprint["kind"].lower())
        if fingerprint["dtype"] is not None:
            tensor = f" of {_DTYPES.get(fingerprint['dtype'], fingerprint['dtype'].lower())}[{fingerprint['shape']}]"
    if called := _IN_COLLECTIVE.search(traceback):
        name = called[1]  # the function that the person called: barrier, where torch says all_reduce
    # The outermost frame is the cell's; frames of functions from earlier cells come below.
    places = _CELL_LINE.findall(traceback)
    in_cell = [line for cell, line in places if cell == places[0][0]]
    where = f" at cell line {in_cell[-1]}" if in_cell else ""
    return f"called {name}{tensor}{where}" if name else f"failed{where}"
