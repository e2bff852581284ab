"""How the output of several ranks is shown under one cell: live, in whole lines, each with its rank's colour."""

from __future__ import annotations

import html
import sys
from collections.abc import Collection, Mapping
from typing import Any

import ipyparallel as ipp
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, publish_display_data

from nbgpu.palette import rank_color

_OUTPUT_PATIENCE_S = 2.0


class CellOutput:
    """Shows what the ranks print and display, as it comes.

    Args:
        results: one for each rank, of a cell that was sent to it.
    """

    def __init__(self, results: Mapping[int, ipp.AsyncResult]) -> None:
        self._results = results
        self._shown_chars = {(rank, name): 0 for rank in results for name in ("stdout", "stderr")}
        self._shown_displays = dict.fromkeys(results, 0)

    def show_new(self) -> None:
        """Shows the whole lines and displays that arrived since the last call."""
        for rank, result in self._results.items():
            self._show_text(rank, result, only_whole_lines=True)
            self._show_displays(rank, result)

    def finish(self, gone: Collection[int] = ()) -> None:
        """Shows what is left once the ranks are done, ending with the value of the cell's last expression.

        Args:
            gone: ranks whose processes have ended, so that no more output is waited for.
        """
        for rank, result in self._results.items():
            if rank not in gone:
                # The result may overtake the output, which takes another socket.
                result.wait_for_output(_OUTPUT_PATIENCE_S)
            self._show_text(rank, result, only_whole_lines=False)
            self._show_displays(rank, result)
        for rank, result in self._results.items():
            value = result.metadata["execute_result"]
            if value:
                self._show_value(rank, value)

    def _show_text(self, rank: int, result: ipp.AsyncResult, *, only_whole_lines: bool) -> None:
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            text: str = result.metadata[name]
            start = self._shown_chars[rank, name]
            end = text.rfind("\n", start) + 1 if only_whole_lines else len(text)
            if end > start:
                self._shown_chars[rank, name] = end
                lines = text[start:end].splitlines()
                stream.write("".join(f"{_label(rank)} {line}\n" for line in lines))
        sys.stdout.flush()
        sys.stderr.flush()

    def _show_displays(self, rank: int, result: ipp.AsyncResult) -> None:
        displays = result.metadata["outputs"]
        for content in displays[self._shown_displays[rank] :]:
            self._show_bundle(rank, content["data"], content.get("metadata", {}))
        self._shown_displays[rank] = len(displays)

    def _show_value(self, rank: int, content: Mapping[str, Any]) -> None:
        data = content["data"]
        if set(data) <= {"text/plain"}:
            lines = data.get("text/plain", "").splitlines()
            sys.stdout.write("".join(f"{_label(rank)} {line}\n" for line in lines))
        else:
            self._show_bundle(rank, data, content.get("metadata", {}))

    def _show_bundle(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        sys.stdout.write(f"{_label(rank)}\n")
        sys.stdout.flush()
        publish_display_data(data=data, metadata=metadata)


class Notice:
    """A line below a cell's output that changes in place, and can go away again.

    A display can be changed where a page or a notebook file keeps it, so that no notice of something that is
    over stays in a saved notebook. Outside of a kernel what is printed stays, and a line is printed once.
    """

    def __init__(self) -> None:
        self._text = ""
        self._handle: DisplayHandle | None = None

    def show(self, text: str) -> None:
        """Shows the text in place of the one before; takes that away where the text is empty."""
        if text == self._text:
            return
        is_new, self._text = not self._text, text
        if not hasattr(get_ipython(), "kernel"):
            if is_new:
                sys.stderr.write(f"{text}\n")
            return
        # HTML as well: an empty plain text would still take up a line of the page.
        data = {"text/plain": text, "text/html": f"<b>{html.escape(text)}</b>" if text else ""}
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


def _label(rank: int) -> str:
    """'[0]' in the rank's colour."""
    red, green, blue = bytes.fromhex(rank_color(rank)[1:])
    return f"\x1b[1;38;2;{red};{green};{blue}m[{rank}]\x1b[0m"
