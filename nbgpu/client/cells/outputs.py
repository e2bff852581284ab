"""Merge what the ranks of one cell print and display into one live output."""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Protocol, TextIO

from IPython.display import publish_display_data, update_display

from nbgpu.client import presenting
from nbgpu.client.cells.merging import DISPLAY_HOLD_S, Block, Item, Merger, merged
from nbgpu.client.cells.terminal_text import Screen
from nbgpu.client.engines.cell_replies import Arrivals, Message
from nbgpu.config import TrainConfig
from nbgpu.config.conditions import default_of
from nbgpu.text.palette import rank_color
from nbgpu.text.ranks import named_ranks, rank_ranges

_UPDATE_PERIOD_S = 0.1
"""The least time between two updates of the output."""
_QUIET_S = 1.0
"""Late output counts as complete after this time without a message."""
_OUTPUT_PATIENCE_S = 5.0
"""The longest time without a further message while output of a rank is still missing."""
_CHARS_PER_LINE = 100
"""A cell may show this many characters for each line of its limit."""
_MAX_PARTS = 6
"""An update is written to stdout and stderr in at most so many parts, because each part is a message."""
_VIEW_AFTER_S = 0.4
"""A cell that runs longer than this gets a live view of its text. A shorter one is shown at its end."""
_FEW_LINES = 10
"""Up to this many lines of a cell that is over are shown as plain text, without a choice of the rank."""
_TAIL_LINES = 10
"""The last lines of a rank that are shown once the full text goes to files."""
_STREAMS = ("stdout", "stderr")
NOTE = "note"
"""The kind of a block of text by nbgpu itself."""
FILE = "file"
"""The kind of a block that names a rank's file."""


class TextView(Protocol):
    """A view of the text of a cell up to its end, or up to a display."""

    def add(self, blocks: Sequence[Block]) -> None:
        """Append lines."""

    def show_rows(self, rows: Sequence[Block]) -> None:
        """Show these rows below the lines, in place of the previous rows."""

    def close(self) -> None:
        """End the view. The lines stay, and the rows are removed."""


class CellOutput:
    """Shows what the ranks print and display, as it arrives.

    Args:
        arrivals: the messages from the ranks.
        ranks: the ranks that run the cell.
        max_lines: the number of lines to show. When there are more, the full text goes to files.
        has_view: whether text may be shown in a `TextView`; otherwise it goes to the notebook's streams.
    """

    def __init__(
        self, arrivals: Arrivals, ranks: Collection[int], max_lines: int, has_view: bool = True
    ) -> None:
        """Prepare an empty output; the first text appears with `show_new`, `finish` or `close`."""
        self._arrivals = arrivals
        self._has_view = has_view
        self._ranks = tuple(sorted(ranks))
        self._ended: set[int] = set()
        """The ranks whose last output was passed to the merger."""
        self._values: dict[int, Item] = {}
        """The value of the cell's last expression, by rank."""
        self._view: TextView | None = None
        self._shown: list[Block] = []
        self._max_lines = max_lines
        self._lines_left = max_lines
        self._chars_left = max_lines * _CHARS_PER_LINE
        self._transcript: Transcript | None = None
        self._updated_s = 0.0
        self._waiting: list[Block] = []
        """Text for which no view is open yet, because a short cell gets none."""
        self._waiting_since_s = 0.0
        """When the first of this text came, by the monotonic clock; 0 if there is none."""
        self._has_received_output = False
        self._incomplete: set[int] = set()
        """The ranks whose last output has not come."""
        self._closed = False

    # The screens and the merger are made with the first output. For many ranks that takes longer than a cell
    # without output.
    @cached_property
    def _screens(self) -> dict[int, dict[str, Screen]]:
        return {rank: {name: Screen() for name in _STREAMS} for rank in self._ranks}

    @cached_property
    def _merger(self) -> Merger:
        return Merger(self._ranks)

    def show_new(self) -> None:
        """Show what arrived since the last update. May be called at any rate; updates at most ten times a
        second."""
        now_s = time.monotonic()
        if now_s - self._updated_s >= _UPDATE_PERIOD_S:
            self._updated_s = now_s
            self._update(now_s, now_s - _VIEW_AFTER_S)

    def show_above_question(self, rank: int) -> None:
        """Show the output so far, so that a question of this rank appears below it, and later output below
        the question."""
        self._receive([rank for rank in self._ranks if self._arrivals.has_ended(rank)])
        self._queue(rank, self._screen_lines(rank, "finish"))
        # With this time in the future, no item waits for other ranks any longer.
        self._show(self._cut_to_limit(self._merger.take(time.monotonic() + DISPLAY_HOLD_S)))
        self._close_view()

    def _update(self, now_s: float, view_since_s: float) -> None:
        """Show the lines that are ready, and open a view for text that has been waiting since
        `view_since_s`."""
        # The list of ended ranks is made before the messages are read, so their last messages are among them.
        self._receive([rank for rank in self._ranks if self._arrivals.has_ended(rank)])
        self._show(self._cut_to_limit(self._merger.take(now_s)))
        if self._transcript is not None:
            self._transcript.flush()
        rows = self._rows()
        if self._view is None and (rows or self._waiting):
            self._waiting_since_s = self._waiting_since_s or time.monotonic()
            if self._waiting_since_s <= view_since_s:
                self._open_view(live=True)
        if self._view is not None:
            self._view.show_rows(rows)

    def finish(self, without: Collection[int] = ()) -> None:
        """Show the rest once the ranks are done, ending with the value of the cell's last expression.

        Args:
            without: ranks that will not end the cell, so that their output is not waited for.
        """
        self._incomplete = self._arrivals.wait_for_ends(
            [rank for rank in self._ranks if rank not in without], _OUTPUT_PATIENCE_S
        )
        self.close()

    def close(self) -> None:
        """Show the output that has arrived, then the value of the cell's last expression, and end the
        output."""
        if self._closed:
            return
        self._closed = True
        self._arrivals.close()
        if not self._has_received_output and not self._incomplete and self._arrivals.are_empty:
            return  # no rank has printed or displayed anything
        self._receive(ended=self._ranks)
        values = _as_lines(merged({rank: [value] for rank, value in self._values.items()}))
        blocks = self._cut_to_limit(self._merger.take(time.monotonic()))
        # A short value is shown below text that was cut, where people look for it. A long one is text, too.
        is_short = sum(len(block.texts) for block in values) <= _TAIL_LINES
        if self._transcript is None or not is_short:
            blocks, values = blocks + self._cut_to_limit(values), []
        if self._transcript is not None:
            self._transcript.close()
            blocks += self._closing_note(self._transcript)
        missing = [self._missing_note()] if self._incomplete else []
        self._show([*blocks, *values, *missing])
        self._close_view()

    # From the messages of the ranks to the merger.

    def _receive(self, ended: Collection[int]) -> None:
        """Pass new messages to the merger, in the order in which each rank sent them.

        Args:
            ended: ranks that send no more messages, so that their unfinished lines are complete.
        """
        self._has_received_output = True
        sent_by_rank: dict[int, list[tuple[str, str]]] = {rank: [] for rank in self._ranks}
        for rank, message in self._arrivals.take():
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "execute_result":
                self._values[rank] = _value(content)
            elif kind == "stream":
                sent_by_rank[rank].append((content["name"], content["text"]))
            else:
                sent_by_rank[rank].append(_display(rank, message))
        for rank, sent in sent_by_rank.items():
            items: list[Item] = []
            # Consecutive texts in one stream are joined, so that the screen interprets them at once.
            for kind, part in groupby(sent, key=lambda item: item[0]):
                items += self._items(rank, kind, [text for _, text in part])
            items += self._screen_lines(rank, "settle")
            if rank in ended and rank not in self._ended:
                items += self._screen_lines(rank, "finish")
                self._ended.add(rank)
                self._merger.end(rank)
            self._queue(rank, items)

    def _items(self, rank: int, kind: str, texts: list[str]) -> list[Item]:
        """Return the lines that are complete after a rank has written texts to a stream, or its displays."""
        if kind in _STREAMS:
            (other,) = {*_STREAMS} - {kind}
            screens = self._screens[rank]
            above = [(other, line) for line in screens[other].pass_by()]
            return above + [(kind, line) for line in screens[kind].write("".join(texts))]
        # An unfinished line comes before the displays that follow it.
        return [*self._screen_lines(rank, "finish"), *((kind, text) for text in texts)]

    def _screen_lines(self, rank: int, how: str) -> list[Item]:
        """Return the lines that a rank's screens release by the method `how`: settle or finish."""
        lines_by_name = {name: getattr(screen, how)() for name, screen in self._screens[rank].items()}
        return [(name, line) for name, lines in lines_by_name.items() for line in lines]

    def _queue(self, rank: int, items: list[Item]) -> None:
        """Pass items to the merger; lines beyond the limit go to the rank's file."""
        if self._transcript is not None:
            self._transcript.write(rank, [item for item in items if item[0] in _STREAMS])
            items = [item for item in items if item[0] not in _STREAMS]
        self._merger.add(rank, items, time.monotonic())

    # From the merger to the page.

    def _rows(self) -> list[Block]:
        """Return the rows below the text: the newest line of each rank's file, and rows that may still
        change, such as progress bars."""
        newest = [] if self._transcript is None else self._transcript.newest()
        rows = {
            rank: [(name, row) for name, screen in screens.items() for row in screen.rows()]
            for rank, screens in self._screens.items()
        }
        return newest + merged(rows)

    def _cut_to_limit(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks that still fit into the limit of the cell. Text beyond the limit goes to
        files."""
        shown = []
        had_files = self._transcript is not None
        for block in blocks:
            if block.kind not in _STREAMS:
                shown.append(block)
            elif self._transcript is not None:
                self._transcript.write_block(block)
            else:
                num_shown = self._reserve_lines(block.texts)
                part = Block(block.ranks, block.kind, block.texts[:num_shown])
                rest = Block(block.ranks, block.kind, block.texts[num_shown:])
                if part.texts:
                    self._shown.append(part)
                    shown.append(part)
                if rest.texts:
                    self._transcript = Transcript(self._ranks, self._shown)
                    self._transcript.write_block(rest)
                    shown += self._continuation_note(self._transcript)
        if self._transcript is not None and not had_files:
            # Items that wait in the merger are beyond the limit, too.
            self._shown = []
            for rank, items in self._merger.drain().items():
                self._queue(rank, items)
        return shown

    def _reserve_lines(self, texts: Sequence[str]) -> int:
        """Count how many of the lines fit into the limit, and reserve room for them."""
        num_shown = 0
        for text in texts:
            if self._lines_left == 0 or len(text) > self._chars_left:
                self._lines_left = 0
                break
            self._lines_left -= 1
            self._chars_left -= len(text)
            num_shown += 1
        return num_shown

    def _continuation_note(self, transcript: Transcript) -> list[Block]:
        note = f"this cell prints more than the {self._max_lines:,} lines that are shown (max_output_lines). "
        if transcript.problem:
            return [Block((), NOTE, [f"{note}The rest is lost: {transcript.problem}"])]
        files = [Block((rank,), FILE, [path]) for rank, path in transcript.paths().items()]
        return [Block((), NOTE, [f"{note}All of it is in"]), *files]

    def _closing_note(self, transcript: Transcript) -> list[Block]:
        counts = transcript.num_lines.values()
        lowest_and_highest = sorted({min(counts), max(counts)})
        notes = [f"lines are missing in the files: {transcript.problem}"] if transcript.problem else []
        notes.append(f"the last of {' to '.join(f'{count:,}' for count in lowest_and_highest)} lines:")
        return [Block((), NOTE, notes), *transcript.tail()]

    def _missing_note(self) -> Block:
        note = f"the last output of {named_ranks(sorted(self._incomplete))} is missing: nothing more has come for {_OUTPUT_PATIENCE_S:.0f} s"
        return Block((), NOTE, [note])

    def _show(self, blocks: Sequence[Block]) -> None:
        """Show blocks. Text is added to the view or, if none is open, waits for one. A display closes the
        view of the text before it, but the update of a display does not."""
        updates = [block for block in blocks if block.kind == "update_display_data"]
        added = [block for block in blocks if block.kind != "update_display_data"]
        for is_display, run in groupby(added, lambda block: block.kind == "display_data"):
            if is_display:
                self._close_view()
                for block in run:
                    _publish(block)
            elif self._view is not None:
                self._view.add(list(run))
            else:
                self._waiting += run
        for block in updates:
            _publish(block)

    def _open_view(self, live: bool) -> None:
        """Open a view and show in it the text that has waited: a `TextView`, in which the person can choose a
        rank, or else the notebook's streams.

        Args:
            live: whether the cell is still running and more text may come.
        """
        blocks, self._waiting, self._waiting_since_s = self._waiting, [], 0.0
        # Plain text is best for a few lines, and for lines that all come from the same ranks.
        is_plain = not live and (
            len({block.ranks for block in blocks}) == 1
            or sum(len(block.texts) for block in blocks) <= _FEW_LINES
        )
        views = presenting.cell_presenter
        view: TextView | None = None
        if views is not None and self._has_view and not is_plain:
            view = views.open_text(self._ranks, live)
        self._view = view or Streams()
        self._view.add(blocks)

    def _close_view(self) -> None:
        """Show the text that still waits for a view, and end the view."""
        if self._waiting:
            self._open_view(live=False)
        if self._view is not None:
            self._view.close()
            self._view = None


class Streams:
    """A view that writes to the notebook's own streams, each line with its ranks. It is used without a page
    and for short text."""

    def add(self, blocks: Sequence[Block]) -> None:
        """Write the blocks in their order; if they switch often between the streams, stdout before stderr."""
        if len(list(groupby(blocks, _stream_of))) > _MAX_PARTS:
            blocks = sorted(blocks, key=_stream_of, reverse=True)
        for name, part in groupby(blocks, _stream_of):
            stream = getattr(sys, name)
            stream.write("".join(_as_stream(block) for block in part))
            stream.flush()

    def show_rows(self, rows: Sequence[Block]) -> None:
        """Do nothing, because text that is written to a stream cannot be replaced."""

    def close(self) -> None:
        """Do nothing, because all text has been written."""


def _stream_of(block: Block) -> str:
    return "stdout" if block.kind == "stdout" else "stderr"


def _as_stream(block: Block) -> str:
    if block.kind == NOTE:
        return "".join(f"{text}\n" for text in block.texts)
    label = f"{_label(block.ranks)} "
    return label + f"\n{label}".join(block.texts) + "\n"


def _label(ranks: Sequence[int]) -> str:
    """Return the label of a line: '[0]' in the rank's colour, or '[0-3]'."""
    color = ""
    if len(ranks) == 1:
        red, green, blue = bytes.fromhex(rank_color(ranks[0])[1:])
        color = f";38;2;{red};{green};{blue}"
    return f"\x1b[1{color}m[{rank_ranges(ranks)}]\x1b[0m"


# Displays become items, whose texts are equal if the displays are.


def _display(rank: int, message: Message) -> tuple[str, str]:
    """Return a display as an item: its message type, and its content as text that merging can compare."""
    content = message["content"]
    display_id = content.get("transient", {}).get("display_id")
    # Displays of different ranks may have the same id, so the rank becomes part of it.
    unique_id = None if display_id is None else f"nbgpu-rank{rank}-{display_id}"
    return message["header"]["msg_type"], _as_json(content, unique_id)


def _value(content: Message) -> Item:
    """Return the value of a cell's last expression as an item: a text if the value has no other MIME type,
    else a display."""
    if set(content["data"]) <= {"text/plain"}:
        return "stdout", content["data"].get("text/plain", "")
    return "display_data", _as_json(content, None)


def _as_json(content: Message, display_id: str | None) -> str:
    return json.dumps([content["data"], content.get("metadata", {}), display_id], sort_keys=True)


def _as_lines(blocks: Iterable[Block]) -> list[Block]:
    """Split the texts of stdout and stderr into lines, which views and limits expect; keep displays whole."""
    return [
        Block(block.ranks, block.kind, [line for text in block.texts for line in text.splitlines()])
        if block.kind in _STREAMS
        else block
        for block in blocks
    ]


def _publish(block: Block) -> None:
    """Show or update the displays of a block; a new one appears below the label of its ranks."""
    for text in block.texts:
        data, metadata, display_id = json.loads(text)
        if block.kind == "update_display_data":
            update_display(data, metadata=metadata, raw=True, display_id=display_id)
            continue
        sys.stdout.write(f"{_label(block.ranks)}\n")
        sys.stdout.flush()
        transient = {} if display_id is None else {"display_id": display_id}
        publish_display_data(data=data, metadata=metadata, transient=transient)


class Transcript:
    """Files that get the lines of a cell that prints more than is shown, one file for each rank.

    The files are in the folder of the runs, in a subfolder that only the user can enter. If they cannot be
    written, the cell goes on, and only its last lines are kept.

    Args:
        ranks: the ranks.
        shown: the text that the cell has shown so far, with which the files begin.
    """

    def __init__(self, ranks: Sequence[int], shown: Iterable[Block]) -> None:
        """Make the folder and the files."""
        runs_dir = Path(default_of(TrainConfig, "runs_dir")).absolute()
        self.folder = runs_dir / f"{time.strftime('%Y%m%d-%H%M%S')}-output-{secrets.token_hex(2)}"
        self.problem = ""
        """Why lines could not be written; empty while all are."""
        self._files: dict[int, TextIO] = {}
        with self._noting_problem():
            self.folder.mkdir(parents=True, mode=0o700)
            for rank in ranks:
                self._files[rank] = (self.folder / f"rank{rank}.txt").open("w", encoding="utf-8")
        self.num_lines = dict.fromkeys(ranks, 0)
        self._tails: dict[int, deque[Item]] = {rank: deque(maxlen=_TAIL_LINES) for rank in ranks}
        for block in shown:
            for rank in block.ranks:
                self._append(rank, block.texts)

    @contextmanager
    def _noting_problem(self) -> Iterator[None]:
        """Note an error of the files, such as a full disk, in `problem` instead of raising it."""
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{self.folder} cannot be written ({error.strerror})"

    def write_block(self, block: Block) -> None:
        for rank in block.ranks:
            self.write(rank, [(block.kind, text) for text in block.texts])

    def write(self, rank: int, items: Sequence[Item]) -> None:
        """Append lines that are not shown."""
        self._append(rank, [text for _, text in items])
        self._tails[rank].extend(items)

    def flush(self) -> None:
        """Flush the files, so that the text can be read."""
        if not self.problem:
            with self._noting_problem():
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

    def close(self) -> None:
        for file in self._files.values():
            with self._noting_problem():
                file.close()

    def _append(self, rank: int, texts: Sequence[str]) -> None:
        self.num_lines[rank] += len(texts)
        if texts and not self.problem:
            with self._noting_problem():
                self._files[rank].write("\n".join(texts) + "\n")


class LateOutput:
    """Shows messages that come after the end of their cell, below that cell.

    As in a plain kernel they are shown at once, also while another cell runs. Therefore a thread shows them,
    which lives as long as messages come. Make the object while the cell runs: ipykernel keeps the cell to
    which an output belongs in a context variable (before version 6.29 it is always the running cell).

    Args:
        max_lines: the number of lines to show, as in `CellOutput`.
    """

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._context = copy_context()
        self._lock = threading.Lock()
        self._arrivals: Arrivals | None = None
        """The messages that have come; None while no thread shows any."""

    def show(self, rank: int, ranks: Collection[int], message: Message) -> None:
        """Show a message that a rank has sent after its cell; start the thread if there is none."""
        with self._lock:
            if self._arrivals is None:
                self._arrivals = Arrivals()
                arguments = (self._show_until_quiet, ranks, self._arrivals)
                threading.Thread(target=self._context.copy().run, args=arguments, daemon=True).start()
            self._arrivals.add(rank, message)

    def _show_until_quiet(self, ranks: Collection[int], arrivals: Arrivals) -> None:
        """Show messages as they arrive, until none has come for `_QUIET_S`."""
        # A widget cannot be made on this thread, so the text goes to the streams.
        output = CellOutput(arrivals, ranks, self._max_lines, has_view=False)
        newest_s = time.monotonic()
        while True:
            with self._lock:
                if not arrivals.are_empty:
                    newest_s = time.monotonic()
                elif time.monotonic() - newest_s > _QUIET_S:
                    self._arrivals = None
                    break
            output.show_new()
            time.sleep(_UPDATE_PERIOD_S)
        output.close()
