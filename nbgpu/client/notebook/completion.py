"""Completion (Tab) and inspection (Shift-Tab) in distributed cells, which a rank does because the names are
defined there.

The notebook's kernel gets the requests. If the cursor is in code for the ranks, it forwards the request to a
rank, whose own kernel replies. It does not wait for a busy rank, because the page would freeze while the user
types.
"""

from __future__ import annotations

import asyncio
import builtins
import keyword
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from nbgpu.client.cluster.cluster import Cluster, current_or_none
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.notebook import settings_help
from nbgpu.errors import ClusterError
from nbgpu.protocol.calls import Call

_log = logging.getLogger("nbgpu.cluster")

_BUSY_AFTER_S = 0.2
"""A rank that has not begun to handle a request by then is in a cell or in a run."""
_ANSWER_PATIENCE_S = 1.5
"""The first answer takes a second, as in any kernel, because IPython imports jedi."""

_CELL = re.compile(
    r"(?:[^\S\n]*(?:#[^\n]*|%%(?:time|timeit|capture)\b[^\n]*)?\n)*"
    r"\s*%%distributed(?P<arguments>(?:[^\S\n][^\n]*)?)\n"
)
"""The magic's line, with the comments above it and the magics that run the code below them."""
_LINE = re.compile(r"^[^\S\n]*(?:[\w., ]+=[^\S\n]*)?%distributed[^\S\n]+", re.MULTILINE)
_VARIABLES = re.compile(
    r"[^\S\n]*%(?:pull|nbgpu[^\S\n]+vars)(?P<words>(?:[^\S\n]+\S+)*)[^\S\n]+(?=[^\s-]*\Z)"
)
"""The line of a magic up to the place at which it takes a variable of the ranks."""
_MAGIC_LINE = re.compile(r"[^\S\n]*(?P<command>%%?\w+(?:[^\S\n]+\w+)?)[^\S\n]+(?P<rest>.*)", re.DOTALL)
_RANKS = re.compile(r"--ranks[\s=]+(?P<first>\d+)")


@dataclass(frozen=True)
class NameRequest:
    """A request to complete or inspect the name at the cursor, in code for the ranks."""

    code: str
    cursor: int
    """The cursor's position in `code`, in characters."""
    begin: int
    """The position of `code` in the notebook's cell."""
    rank: int = 0
    """The first rank that the code is for."""
    only_variables: bool = False
    """Whether keywords and builtins are removed from the reply."""


def name_request(cell: str, cursor: int) -> NameRequest | None:
    """Return the request for a cursor in a cell; None if the cursor is not in code for the ranks.

    Args:
        cell: the text of the notebook's cell.
        cursor: the position of the cursor in it, in characters.
    """
    if (found := _CELL.match(cell)) is not None:
        if cursor < found.end():
            return None
        # The whole cell is code for the ranks.
        ranks = _RANKS.search(found["arguments"])
        return NameRequest(
            cell[found.end() :], cursor - found.end(), found.end(), int(ranks["first"]) if ranks else 0
        )
    line_begin = cell.rfind("\n", 0, cursor) + 1
    # The line of `%pull` or `%nbgpu vars` names variables of the ranks.
    found = _VARIABLES.match(cell[line_begin:cursor])
    if found is not None and not _last_word(found["words"]).startswith("--"):
        begin = line_begin + found.end()
        return NameRequest(cell[begin:cursor], cursor - begin, begin, only_variables=True)
    # The rest of a line behind `%distributed` is code for the ranks.
    if (found := _LINE.match(cell, line_begin)) is None or cursor < found.end():
        return None
    line_end = cell.find("\n", cursor)
    code = cell[found.end() : len(cell) if line_end < 0 else line_end]
    return NameRequest(code, cursor - found.end(), found.end())


def fitting_options(cell: str, cursor: int, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words that complete the one at the cursor in the line of a magic.

    Args:
        cell: the text of the notebook's cell.
        cursor: the position of the cursor in it, in characters.
        options: the options and subcommands by command, such as '%push' and '%nbgpu start'.
    """
    line = _MAGIC_LINE.fullmatch(cell[cell.rfind("\n", 0, cursor) + 1 : cursor])
    if line is None:
        return []
    magic, *subcommand = line["command"].split()
    candidates = options.get(" ".join([magic, *subcommand]), options.get(magic, ()))
    begun = _last_word(line["rest"])
    return [word for word in candidates if word.startswith(begun)]


def _last_word(text: str) -> str:
    return re.split(r"\s", text)[-1]


class NamesOnRanks:
    """Handles requests for completion and inspection in place of the notebook's kernel.

    ipykernel calls `do_complete` and `do_inspect`. Both may return an awaitable, so that the kernel is never
    blocked.

    Args:
        kernel: the notebook's kernel.
        options: the options and subcommands by command of a magic, such as '%nbgpu start'.
    """

    def __init__(self, kernel: Any, options: Mapping[str, Sequence[str]]) -> None:
        """Replace the kernel's own handlers, which are still called for code of the notebook itself."""
        self._kernel = kernel
        self._options = options
        self._complete_here: Callable[..., Any] = kernel.do_complete
        self._inspect_here: Callable[..., Any] = kernel.do_inspect
        self._unanswered: WeakKeyDictionary[Ranks, dict[int, Reply]] = WeakKeyDictionary()
        """The pending reply of each rank, which gets no other request meanwhile. The keys are weak, because
        ranks that were stopped never reply."""
        kernel.do_complete = self._complete
        kernel.do_inspect = self._inspect

    def close(self) -> None:
        """Restore the kernel's own handlers, unless other code has replaced these by now."""
        for name, handler in (("do_complete", self._complete), ("do_inspect", self._inspect)):
            if vars(self._kernel).get(name) == handler:
                delattr(self._kernel, name)

    def _complete(self, code: str, cursor_pos: int | None) -> Any:
        """Reply to Tab with the options of a magic, the settings in a call of nbgpu, or the names of a rank;
        otherwise as IPython does. ipykernel accepts a reply or an awaitable."""
        _note_use()
        cursor = len(code) if cursor_pos is None else cursor_pos
        request = name_request(code, cursor)
        if request is None and (fitting := fitting_options(code, cursor, self._options)):
            return _reply(fitting, cursor - len(_last_word(code[:cursor])), cursor)
        if request is None and not settings_help.has_matchers():
            begun, settings = settings_help.completed(code[:cursor], self._kernel.shell.user_ns)
            if settings:
                return _reply(settings, cursor - len(begun), cursor)
        cluster = current_or_none() if request else None
        if request is None or cluster is None:
            return self._complete_here(code, cursor_pos)
        return self._complete_there(cluster, request, cursor)

    def _inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Reply to Shift-Tab with a rank's help for a name, or the help for a setting in a call of nbgpu;
        otherwise as IPython does."""
        _note_use()
        request = name_request(code, cursor_pos)
        cluster = current_or_none() if request else None
        if request is None or cluster is None:
            variables = self._kernel.shell.user_ns
            if text := settings_help.help_at(code[:cursor_pos], code[cursor_pos:], variables):
                return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
            return self._inspect_here(code, cursor_pos, detail_level, omit_sections)
        return self._inspect_there(cluster, request, detail_level, list(omit_sections))

    async def _complete_there(self, cluster: Cluster, request: NameRequest, cursor: int) -> Mapping[str, Any]:
        """Have a rank complete code, and shift the positions in its reply to those in the notebook's cell. If
        the rank is busy, the reply has no names."""
        reply = await self._ask(cluster, request.rank, Call.COMPLETE_NAME, request.code, request.cursor)
        if reply is None:
            return _reply([], cursor, cursor)
        if request.only_variables:
            variables = [name for name in reply["matches"] if not _is_built_in(name)]
            return _reply(variables, request.begin + reply["cursor_start"], cursor)
        shifted = _shift(reply, request.begin, "cursor_start", "cursor_end")
        metadata = dict(reply["metadata"])
        if types := metadata.get("_jupyter_types_experimental"):
            metadata["_jupyter_types_experimental"] = [
                _shift(match, request.begin, "start", "end") for match in types
            ]
        return {**shifted, "metadata": metadata}

    async def _inspect_there(
        self, cluster: Cluster, request: NameRequest, detail_level: int, omit_sections: list[str]
    ) -> Mapping[str, Any]:
        """Have a rank look up the name at the cursor. If the rank is busy, the reply says that there is no
        such name."""
        arguments = (request.code, request.cursor, detail_level, omit_sections)
        reply = await self._ask(cluster, request.rank, Call.INSPECT_NAME, *arguments)
        return reply or {"status": "ok", "found": False, "data": {}, "metadata": {}}

    async def _ask(
        self, cluster: Cluster, rank: int, function: Call, *arguments: Any
    ) -> Mapping[str, Any] | None:
        """Call a function on a rank, and return its answer; None if the rank is busy or gone."""
        rank = min(rank, cluster.world_size - 1)
        ranks = cluster.ranks
        unanswered = self._unanswered.setdefault(ranks, {}).get(rank)
        if (unanswered is not None and not unanswered.ready()) or (
            cluster.run is not None and not cluster.run.over
        ):
            return None
        try:
            # A rank handles calls in order, and an idle one answers the first call at once. So a short wait
            # for that answer detects a busy rank, and the second call may take longer.
            begun = ranks.call(Call.MONOTONIC_S, ranks=[rank])[rank]
            self._unanswered[ranks][rank] = answer = ranks.call(function, *arguments, ranks=[rank])[rank]
        except ClusterError as error:
            _log.info("no names from rank %d: %s", rank, error)
            return None
        if not (await _within(begun, _BUSY_AFTER_S) and await _within(answer, _ANSWER_PATIENCE_S)):
            return None
        if (failure := answer.exception()) is not None:
            _log.info("no names from rank %d: %s", rank, failure)
            return None
        reply: Mapping[str, Any] | None = answer.result()
        return reply


def _note_use() -> None:
    """Note a use of the cluster for `release_after_s`: a request for names shows that somebody is typing."""
    if (cluster := current_or_none()) is not None:
        cluster.parts.state.note_use()


def _is_built_in(name: str) -> bool:
    """Whether a match is a keyword, a builtin, or no name at all, such as a magic."""
    return keyword.iskeyword(name) or hasattr(builtins, name) or not name.isidentifier()


def _reply(matches: Sequence[str], begin: int, end: int) -> dict[str, Any]:
    return {
        "status": "ok",
        "matches": list(matches),
        "cursor_start": begin,
        "cursor_end": end,
        "metadata": {},
    }


def _shift(reply: Mapping[str, Any], offset: int, *positions: str) -> dict[str, Any]:
    """Return a reply with `offset` added to the values of these keys."""
    return {key: value + offset if key in positions else value for key, value in reply.items()}


async def _within(reply: Reply, patience_s: float) -> bool:
    """Wait for a reply, at most `patience_s`, without blocking the event loop; return whether it came."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()

    def on_reply(_: Reply) -> None:
        # The loop may be closed by the time a busy rank answers.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(came.set)

    reply.add_done_callback(on_reply)
    with suppress(TimeoutError):
        await asyncio.wait_for(came.wait(), patience_s)
    return bool(reply.ready())


_installed: NamesOnRanks | None = None


def install(shell: Any, options: Mapping[str, Sequence[str]]) -> None:
    """Handle the requests of this shell's kernel. A repeated call, or a shell without a kernel, does no
    harm."""
    global _installed
    settings_help.install(shell)
    kernel = getattr(shell, "kernel", None)
    if _installed is None and hasattr(kernel, "do_complete") and hasattr(kernel, "do_inspect"):
        _installed = NamesOnRanks(kernel, options)


def uninstall(shell: Any) -> None:
    """Let the kernel answer all requests itself again."""
    global _installed
    settings_help.uninstall(shell)
    if _installed is not None:
        _installed.close()
        _installed = None
