"""The files of one rank's variables, and a fingerprint of each value for the comparison between ranks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.engine.checkpoints import tensor_files
from nbgpu.engine.checkpoints.tensor_files import StoredTensors
from nbgpu.engine.saved_variables.describing import Block, Describer
from nbgpu.protocol.records import Definition
from nbgpu.saved_folder import PICKLED, TENSORS, VALUES, SavedFile


@dataclass(frozen=True)
class Stored:
    """The content of a rank's files; each tensor is read when it is looked up."""

    variables: Mapping[str, Any]
    random: Any
    nodes: Sequence[Mapping[str, Any]]
    definitions: Sequence[Definition]
    pickles: Sequence[bytes]
    tensors: Mapping[str, Tensor]


def write(
    folder: Path, describer: Describer, random_state: Any
) -> tuple[dict[str, SavedFile], dict[str, str]]:
    """Write the files of a rank through to the disk, into a new folder.

    Args:
        folder: the rank's folder, which does not exist yet.
        describer: all of the rank's variables, described.
        random_state: the description of its generators.

    Returns:
        The files by name, and the fingerprint of each variable by its name.
    """
    folder.mkdir(parents=True)
    blocks = describer.blocks()
    outlines = tensor_files.in_order({name: block.outline() for name, block in blocks.items()})
    digests: dict[str, str] = {}
    files = {TENSORS: _write(folder / TENSORS, _pieces(outlines, blocks, digests))}
    # A cell with several definitions is stored once, and they refer to it by its position.
    cells = list(dict.fromkeys(definition.cell for definition in describer.definitions))
    fields = {
        "variables": describer.variables,
        "random": random_state,
        "nodes": describer.nodes,
        "cells": cells,
        "definitions": [
            {**asdict(definition), "cell": cells.index(definition.cell)}
            for definition in describer.definitions
        ],
        "pickle_sizes_bytes": [len(pickle) for pickle in describer.pickles],
    }
    files[VALUES] = _write(folder / VALUES, [json.dumps(fields).encode()])
    if describer.pickles:
        files[PICKLED] = _write(folder / PICKLED, describer.pickles)
    fingerprint = _Fingerprints(describer, digests)
    return files, {name: fingerprint.of(value) for name, value in describer.variables.items()}


def read(folder: Path) -> Stored:
    """Read the files of a rank, which are known to be whole."""
    fields = json.loads((folder / VALUES).read_text())
    cells = fields["cells"]
    pickled = (folder / PICKLED).read_bytes() if (folder / PICKLED).exists() else b""
    pickles, end = [], 0
    for size_bytes in fields["pickle_sizes_bytes"]:
        pickles.append(pickled[end : end + size_bytes])
        end += size_bytes
    return Stored(
        fields["variables"],
        fields["random"],
        fields["nodes"],
        [Definition(**{**saved, "cell": cells[saved["cell"]]}) for saved in fields["definitions"]],
        pickles,
        StoredTensors(folder / TENSORS),
    )


def _pieces(
    outlines: Mapping[str, Tensor], blocks: Mapping[str, Block], digests: dict[str, str]
) -> Iterator[memoryview]:
    """Yield the content of the tensors' file in pieces.

    Args:
        outlines: an empty tensor of the right shape and type for each name, in the order of the file.
        blocks: the tensors' content by name.
        digests: gets the digest of each tensor when its content has been written.
    """
    names = iter(outlines)

    def next_content() -> Tensor:
        name = next(names)
        content = blocks[name].content()
        digests[name] = hashlib.sha256(content.numpy().data).hexdigest()
        return content

    return tensor_files.pieces(outlines, next_content)


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> SavedFile:
    """Write a new file through to the disk; return its size and digest."""
    size_bytes, digest = 0, hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(size_bytes, digest.hexdigest())


class _Fingerprints:
    """Digests of described values for the comparison between ranks. They do not depend on the numbers of
    nodes and the names of tensors, which differ with the variables that were described before."""

    def __init__(self, describer: Describer, digests: Mapping[str, str]) -> None:
        self._describer = describer
        self._digests = digests

    def of(self, described: Any) -> str:
        """Return the digest of a described value and of all nodes that it refers to, directly or not."""
        digest = hashlib.sha256()
        order: dict[int, int] = {}
        waiting = [described]
        while waiting:
            plain = self._plain(waiting.pop(0), order, waiting)
            digest.update(json.dumps(plain, sort_keys=True).encode())
        return digest.hexdigest()

    def _plain(self, part: Any, order: dict[int, int], waiting: list[Any]) -> Any:
        """Return a described value in a form that is equal on all ranks if the values are equal: nodes get
        new numbers in the order of first use, and digests replace the bytes of tensors and pickles.

        Args:
            part: the described value, or a part of one.
            order: the new number of each node that was met; extended here.
            waiting: nodes that were met and are not in the digest yet; extended here.
        """
        if isinstance(part, list):
            return [self._plain(item, order, waiting) for item in part]
        if not isinstance(part, dict):
            return part
        if "#" in part:
            if part["#"] not in order:
                order[part["#"]] = len(order)
                waiting.append(self._describer.nodes[part["#"]])
            return {"#": order[part["#"]]}
        # `form` (a tensor's shape, stride and block name) is added below with a digest. `path` (the variable
        # path of a DTensor) only locates its parts in the files.
        plain = {
            key: self._plain(item, order, waiting)
            for key, item in part.items()
            if key not in ("form", "path")
        }
        # Buffers that DDP copies from rank 0, and shards, differ between the ranks by design.
        if "form" in part and not part.get("of_rank_0") and not part.get("is_part"):
            block = part["form"]["block"]
            plain["form"] = {**part["form"], "block": None if block is None else self._digests[block]}
        if part.get("is") == "pickle":
            plain["pickle"] = hashlib.sha256(self._describer.pickles[part["pickle"]]).hexdigest()
        if part.get("is") == "definition":
            definition = self._describer.definitions[part["definition"]]
            plain["definition"] = [definition.defines, definition.cell, definition.line]
        return plain
