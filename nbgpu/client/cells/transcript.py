"""The full text of a cell that prints more than is shown: one file for each rank, from the first line on."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from nbgpu.client.cells.merging import Block, Item, merged
from nbgpu.config import TrainConfig
from nbgpu.config.conditions import default_of

_TAIL_LINES = 10


class Transcript:
    """Files to which the lines of each rank are appended.

    They are in the folder of the runs, in a subfolder that only the user can enter.

    Args:
        ranks: the ranks, each of which gets a file.
        shown: the text of the ranks so far.
    """

    def __init__(self, ranks: Iterable[int], shown: Iterable[Block]) -> None:
        runs_dir = Path(default_of(TrainConfig, "runs_dir")).absolute()
        self.folder = runs_dir / f"{time.strftime('%Y%m%d-%H%M%S')}-output-{secrets.token_hex(2)}"
        self.folder.mkdir(parents=True, mode=0o700)
        self._files = {rank: (self.folder / f"rank{rank}.txt").open("w", encoding="utf-8") for rank in ranks}
        self._num_lines = dict.fromkeys(self._files, 0)
        self._tails: dict[int, deque[Item]] = {rank: deque(maxlen=_TAIL_LINES) for rank in self._files}
        for block in shown:
            for rank in block.ranks:
                self._append(rank, block.texts)

    def write_block(self, block: Block) -> None:
        for rank in block.ranks:
            self.write(rank, [(block.kind, text) for text in block.texts])

    def write(self, rank: int, items: Sequence[Item]) -> None:
        """Append lines that are not shown."""
        self._append(rank, [text for _, text in items])
        self._tails[rank].extend(items)

    def flush(self) -> None:
        """Flush the files, so that the text can be read."""
        for file in self._files.values():
            file.flush()

    def newest(self) -> list[Block]:
        """The last line of each rank."""
        return merged({rank: list(tail)[-1:] for rank, tail in self._tails.items()})

    def tail(self) -> list[Block]:
        """The last lines of each rank among those that were not shown."""
        return merged({rank: list(tail) for rank, tail in self._tails.items()})

    def paths(self) -> dict[int, str]:
        """The paths of the files relative to the notebook's folder."""
        return {rank: os.path.relpath(file.name) for rank, file in self._files.items()}

    def num_lines(self) -> dict[int, int]:
        return dict(self._num_lines)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, rank: int, texts: Sequence[str]) -> None:
        if texts:
            self._files[rank].write("\n".join(texts) + "\n")
            self._num_lines[rank] += len(texts)
