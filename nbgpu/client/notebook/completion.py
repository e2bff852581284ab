"""Tab and Shift-Tab in distributed cells: a rank answers, because the names are defined on the ranks.

The notebook's kernel gets the requests. It passes those whose cursor is in code for the ranks on to a rank,
whose kernel replies as it would in a notebook of its own. The kernel does not wait for a busy rank, because
the page would stand still while the user types.
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
"""A rank that has not begun with a request by then is in a cell or in a run."""
_ANSWER_PATIENCE_S = 1.5
"""The first answer takes a second, as in any kernel, because IPython loads jedi. JupyterLab waits for one."""

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
_OWN_LINE = re.compile(r"[^\S\n]*(?P<command>%%?\w+(?:[^\S\n]+\w+)?)[^\S\n]+(?P<rest>.*)", re.DOTALL)
_RANKS = re.compile(r"--ranks[\s=]+(?P<first>\d+)")


@dataclass(frozen=True)
class NameRequest:
    """A request for names in code for the ranks, at the position of the cursor."""

    code: str
    cursor: int
    """The cursor's position in `code`, in characters."""
    begin: int
    """The position of `code` in the notebook's cell."""
    rank: int = 0
    """The rank to ask: the first that the code is for."""
    only_variables: bool = False
    """Whether keywords and builtins are left out of the answer."""


def name_request(cell: str, cursor: int) -> NameRequest | None:
    """The request to the ranks for a cursor in a cell; None where the cursor is in code for the notebook
    itself."""
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


def words_that_fit(cell: str, cursor: int, words: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that may follow in the line of a magic. `words` has them by command, such as '%nbgpu
    start'."""
    found = _OWN_LINE.fullmatch(cell[cell.rfind("\n", 0, cursor) + 1 : cursor])
    if found is None:
        return []
    commands = (" ".join(found["command"].split()), found["command"].split()[0])
    known = next((words[command] for command in commands if command in words), ())
    begun = _last_word(found["rest"])
    return [word for word in known if word.startswith(begun)]


def _last_word(text: str) -> str:
    return re.split(r"\s", text)[-1]


class NamesOnRanks:
    """Handles requests for completion and inspection in place of the notebook's kernel.

    ipykernel calls `do_complete` and `do_inspect`. Both may return an awaitable, so that the kernel is never
    blocked.

    Args:
        kernel: the notebook's kernel.
        words: the words that may follow the beginning of a magic's line, such as '%nbgpu start'.
    """

    def __init__(self, kernel: Any, words: Mapping[str, Sequence[str]]) -> None:
        """Take the place of the kernel's own handlers, which still answer for code of the notebook itself."""
        self._kernel = kernel
        self._words = words
        self._complete_here: Callable[..., Any] = kernel.do_complete
        self._inspect_here: Callable[..., Any] = kernel.do_inspect
        self._unanswered: WeakKeyDictionary[Ranks, dict[int, Reply]] = WeakKeyDictionary()
        """The unanswered request of each rank, which gets no other one meanwhile. Stopped ranks never
        answer."""
        kernel.do_complete = self._complete
        kernel.do_inspect = self._inspect

    def close(self) -> None:
        """Restore the kernel's own functions, unless other code has replaced them by now."""
        for name, own in (("do_complete", self._complete), ("do_inspect", self._inspect)):
            if self._kernel.__dict__.get(name) == own:
                delattr(self._kernel, name)

    def _complete(self, code: str, cursor_pos: int | None) -> Any:
        """Reply to Tab: with the words of a magic's line, the settings of a call of nbgpu, the names of a
        rank, or else what IPython completes. ipykernel takes a reply and an awaitable alike."""
        _note_use()
        cursor = len(code) if cursor_pos is None else cursor_pos
        request = name_request(code, cursor)
        if request is None and (fitting := words_that_fit(code, cursor, self._words)):
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
        """Reply to Shift-Tab: with the help for settings of a call of nbgpu, with what a rank says of a name
        in its code, or else with IPython's help."""
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
        """Have a rank complete code, and move the positions in its reply to those of the notebook's cell. A
        rank that is busy gives no names."""
        reply = await self._ask(cluster, request.rank, Call.COMPLETE_NAME, request.code, request.cursor)
        if reply is None:
            return _reply([], cursor, cursor)
        if request.only_variables:
            variables = [name for name in reply["matches"] if not _is_of_the_language(name)]
            return _reply(variables, request.begin + reply["cursor_start"], cursor)
        metadata = {
            key: [_moved(match, request.begin, "start", "end") for match in matches]
            if key == "_jupyter_types_experimental"
            else matches
            for key, matches in reply["metadata"].items()
        }
        return {**_moved(reply, request.begin, "cursor_start", "cursor_end"), "metadata": metadata}

    async def _inspect_there(
        self, cluster: Cluster, request: NameRequest, detail_level: int, omit_sections: list[str]
    ) -> Mapping[str, Any]:
        """Have a rank look up the name at the cursor; a rank that is busy finds none."""
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
            # A rank handles calls one after the other and answers this one at once, unless it is in a cell.
            # So the short wait for it finds busy ranks, and the answer itself may take longer.
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
    """Note a use of the cluster, because a request for names shows that somebody is typing, in whatever
    cell."""
    if (cluster := current_or_none()) is not None:
        cluster.parts.state.note_use()


def _is_of_the_language(name: str) -> bool:
    return keyword.iskeyword(name) or hasattr(builtins, name) or not name.isidentifier()


def _reply(matches: Sequence[str], begin: int, end: int) -> dict[str, Any]:
    return {
        "status": "ok",
        "matches": list(matches),
        "cursor_start": begin,
        "cursor_end": end,
        "metadata": {},
    }


def _moved(reply: Mapping[str, Any], by: int, *places: str) -> dict[str, Any]:
    return {key: value + by if key in places else value for key, value in reply.items()}


async def _within(result: Reply, patience_s: float) -> bool:
    """Wait a limited time for a result without blocking the event loop; return whether it came."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()

    def tell(_: Reply) -> None:
        # The loop may be gone by the time a busy rank answers.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(came.set)

    result.add_done_callback(tell)
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await came.wait()
    return bool(result.ready())


_installed: NamesOnRanks | None = None


def install(shell: Any, words: Mapping[str, Sequence[str]]) -> None:
    """Handle the requests of this shell's kernel. Harmless when repeated, and in a shell without a kernel."""
    global _installed
    settings_help.install(shell)
    kernel = getattr(shell, "kernel", None)
    if _installed is None and hasattr(kernel, "do_complete") and hasattr(kernel, "do_inspect"):
        _installed = NamesOnRanks(kernel, words)


def uninstall(shell: Any) -> None:
    """Let the kernel answer all requests itself again."""
    global _installed
    settings_help.uninstall(shell)
    if _installed is not None:
        _installed.close()
        _installed = None
