"""The magics of a notebook: `%%distributed`, `%distributed`, `%%scaling`, `%nbgpu`, `%pull`, `%push`,
`%debug`."""

from __future__ import annotations

import re
import shlex
import sys
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import cache
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import MagicArgumentParser, argument, magic_arguments, parse_argstring
from IPython.display import display

from nbgpu.client import presenting
from nbgpu.client.cells.cell import DistributedCell
from nbgpu.client.cluster.cluster import Cluster, attach, current
from nbgpu.client.engines.calls import reference
from nbgpu.client.host import doctor, ps, registry
from nbgpu.client.host.device_cards import DeviceCards
from nbgpu.client.ipykernel import flushing
from nbgpu.client.notebook import completion, head_start, magic_help, plain_cells, sync
from nbgpu.client.scaling import cell_study
from nbgpu.client.variables import table as variables
from nbgpu.config import ClusterConfig, flags
from nbgpu.errors import CellInterrupted, ClusterError, ConfigError, NbgpuError, RankError
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.serialization import unpicklable
from nbgpu.text.ranks import parse_ranges
from nbgpu.text.similar import did_you_mean

_DEBUG = "%debug"
"""The cell that opens pdb on a rank. The questions of its `input()` appear in the notebook."""
_CELL_MAGIC = "%%distributed"


# An interrupt is held back to the places where `show_blocking` looks for it, so that a cell that was sent is
# always waited for. The same holds for the magics below.
@uninterrupted()
def open_debugger(cluster: Cluster, rank: int | None = None) -> None:
    """Open pdb in the frame in which a rank failed, until the user leaves it. The other ranks wait.

    Args:
        cluster: the cluster whose last cell failed.
        rank: the rank to debug; None for the one that failed first.

    Raises:
        ClusterError: there is no failure to debug.
    """
    failures = cluster.apply(reference(Call.KEPT_FAILURE))
    # Each failure is (its time, the error in words).
    failed = [(*failure, r) for r, failure in failures.items() if failure is not None and rank in (None, r)]
    if not failed:
        raise ClusterError(
            f"{'no rank' if rank is None else f'rank {rank}'} has a failure to look at. It is kept until the next cell "
            "runs there, but not where memory ran out or the process ended"
        )
    _, error, first = min(failed)
    print(f"rank {first} failed with {error}; q leaves the debugger")  # noqa: T201 - the magic's output
    DistributedCell(cluster.parts.cells, _DEBUG, [first], None).show_blocking()


@magics_class
class DebugMagics(Magics):
    """IPython's own `%debug`, replaced by `open_debugger` for failures on ranks."""

    shell: InteractiveShell

    @line_cell_magic
    def debug(self, line: str = "", cell: str | None = None) -> None:
        """Open the debugger at the last error: on a rank if a distributed cell raised it, else in the
        notebook."""
        is_rank_error = isinstance(getattr(sys, "last_value", None), RankError | CellInterrupted)
        if is_rank_error and not line.strip() and cell is None:
            open_debugger(current())
        else:
            self.shell.magics_manager.registry["ExecutionMagics"].debug(line, cell)


@cache
def _cell_arguments() -> MagicArgumentParser:
    """Return the parser of the options of `%%distributed`, whose text is also the magic's help."""
    parser = MagicArgumentParser(
        prog=_CELL_MAGIC,
        description="Run this cell on every rank; its last value is shown, and its variables stay on the ranks.",
        epilog=magic_help.EXAMPLES_OF_CELLS,
        formatter_class=RawDescriptionHelpFormatter,
        # argparse's own --help would print and raise SystemExit; `_asks_for_help` answers in its place.
        add_help=False,
    )
    parser.add_argument("--help", action="store_true", help="show this, and run nothing")
    parser.add_argument("--ranks", help="which ranks, such as 0,2-3; left out: all")
    parser.add_argument(
        "--into", metavar="NAME", help="notebook variable that gets the last value of each rank"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds after which the ranks are interrupted"
    )
    parser.add_argument("--full", action="store_true", help="show the libraries' part of tracebacks too")
    parser.add_argument(
        "--timeline", action="store_true", help="show what every rank did in the cell, moment by moment"
    )
    return parser


@cache  # the rest of the magic's line is the same for most cells
def _options(line: str) -> Namespace:
    options: Namespace = _cell_arguments().parse_argstring(line)
    return options


def parse_ranks(text: str) -> list[int]:
    """Parse '0,2-3' into [0, 2, 3]; ConfigError for any other text."""
    try:
        return parse_ranges(text)
    except ValueError:
        raise ConfigError(f"--ranks {text}: write ranks as numbers and ranges, such as 0,2-3") from None


def await_distributed_cells(lines: list[str]) -> list[str]:
    """Turn a `%%distributed` cell into an awaited call: an input transformer for kernels.

    A cell magic would block the kernel's event loop until the ranks are back, and no button, panel or page
    reload would be handled before. Below another cell magic, such as %%time, the cell remains a cell magic,
    because %%time runs code that cannot await.
    """
    text = _split_cell(lines)
    if text is None:
        return lines
    if head_start.is_in_a_cell():
        return strip_comments_above(lines)
    # The repr of the tuple is the list of arguments. The notebook may have no variable `nbgpu`, or another
    # one, so the cell imports the package itself.
    return [f"await __import__('nbgpu').run_cell{text!r}\n"]


def strip_comments_above(lines: list[str]) -> list[str]:
    """Remove the comments and empty lines above `%%distributed`, because IPython looks for a cell magic in
    the first line only: an input transformer for terminals."""
    begin = _index_of_magic(lines)
    return lines if begin is None else lines[begin:]


def _index_of_magic(lines: list[str]) -> int | None:
    """Return the index of the line with `%%distributed`, with only comments and empty lines above it; None
    in other cells."""
    for number, line in enumerate(lines):
        first_word = line.split(maxsplit=1)[:1]
        if first_word == [_CELL_MAGIC]:
            return number
        if first_word and not first_word[0].startswith("#"):
            return None
    return None


def _split_cell(lines: list[str]) -> tuple[str, str] | None:
    """Return (the options behind `%%distributed`, the code below it); None in other cells."""
    begin = _index_of_magic(lines)
    if begin is None:
        return None
    return lines[begin].partition(_CELL_MAGIC)[2].strip(), "".join(lines[begin + 1 :])


# With this attribute IPython skips the transformers when a console asks whether a cell is complete. Otherwise
# the magic's first line would count as a complete cell.
await_distributed_cells.has_side_effects = True  # type: ignore[attr-defined]
strip_comments_above.has_side_effects = True  # type: ignore[attr-defined]


async def run_cell(line: str, code: str) -> None:
    """Run a `%%distributed` cell.

    Args:
        line: the options behind the magic.
        code: the code below it.
    """
    if _asks_for_help(line):
        print(_cell_arguments().format_help())  # noqa: T201 - the cell's output
        return
    flushing.arrange(InteractiveShell.instance())
    cell = head_start.claim_cell(line, code) or _send_awaited(line, code)
    await cell.show()
    _assign_values(cell, line)


def _asks_for_help(line: str) -> bool:
    # The parser is not used, because it raises an error if another option is wrong.
    return "--help" in line.split()


def _split_cell_to_send(lines: list[str]) -> tuple[str, str] | None:
    """Return the same as `_split_cell`, but None also for a distributed cell that only asks for help."""
    text = _split_cell(lines)
    return None if text is None or _asks_for_help(text[0]) else text


def _send_awaited(line: str, code: str, number: int | None = None) -> DistributedCell:
    """Send a cell, which will be awaited, to the ranks; `number` is that of the notebook's cell."""
    return _send(line, code, is_awaited=True, number=number)


def _send(line: str, code: str, is_awaited: bool = False, number: int | None = None) -> DistributedCell:
    """Send a cell to the ranks of the current cluster, with the options in the magic's line."""
    options = _options(line)
    ranks = None if options.ranks is None else parse_ranks(options.ranks)
    return DistributedCell(
        current().parts.cells,
        code,
        ranks,
        options.timeout,
        options.full,
        is_awaited=is_awaited,
        number=number,
        timeline=options.timeline,
    )


def _assign_values(cell: DistributedCell, line: str) -> None:
    """Give the notebook variable that `--into` names the last value of each rank."""
    if name := _options(line).into:
        InteractiveShell.instance().user_ns[name] = cell.values()


@magics_class
class NbgpuMagics(Magics):
    """The magics. Each calls a method of a Cluster, which programs can call as well."""

    shell: InteractiveShell

    @cell_magic
    @uninterrupted()
    def distributed(self, line: str, cell: str) -> None:
        """Run a cell on the ranks and block until it is over. IPython calls this in a terminal, and below
        another cell magic such as %%time."""
        if _asks_for_help(line):
            print(_cell_arguments().format_help())  # noqa: T201 - the magic's output
            return
        running = _send(line, cell)
        running.show_blocking()
        _assign_values(running, line)

    @magic_arguments()
    @argument("--ranks", default="1,2", help="numbers of ranks, such as 1,2,4; left out: 1,2")
    @argument(
        "--mode", default="weak", help="'weak': step() is the same work on each rank; 'strong': all share it"
    )
    @argument("--repeats", type=int, default=3, help="how often each number of ranks is measured, in turns")
    @argument("--steps", type=int, default=20, help="calls of step() that are measured in each repeat")
    @argument("--warm-up", type=int, default=5, help="calls before them that are not measured")
    @argument("--into", metavar="NAME", help="notebook variable that gets the study, with its frame()")
    @cell_magic
    def scaling(self, line: str, cell: str) -> None:
        """Run the cell on growing groups of ranks, and time the function step() that it defines.

        New ranks are empty, so the cell has to define everything that it needs. Ranks that stay keep their
        variables. If a number of ranks is below the cluster's, the last ranks leave, and their variables are
        gone.
        """
        arguments: Namespace = parse_argstring(self.scaling, line)
        cluster = current()
        study = cell_study.prepared(
            cluster,
            parse_ranks(arguments.ranks),
            arguments.mode,
            arguments.repeats,
            arguments.steps,
            arguments.warm_up,
        )
        shown = display(study, display_id=True)
        try:
            study.measure(cluster, cell, lambda: shown.update(study))
        finally:
            if arguments.into:
                self.shell.user_ns[arguments.into] = study
        cluster.parts.state.tell_news()

    @no_var_expand  # braces are the code's own
    @line_magic("distributed")  # type: ignore[arg-type]
    @uninterrupted()
    def distributed_line(self, line: str) -> None:
        """Run one line on every rank: %distributed x.shape"""
        if not line.strip():
            raise UsageError("%distributed CODE runs one line on every rank; %%distributed runs a cell")
        DistributedCell(current().parts.cells, line, ranks=None, timeout_s=None).show_blocking()

    @line_magic
    def nbgpu(self, line: str) -> None:
        """Run a command of `%nbgpu`; without one show the cluster's status."""
        command, *arguments = shlex.split(line) or ["status"]
        command = "help" if command in ("--help", "-h") else command
        if command not in magic_help.COMMANDS:
            raise UsageError(
                f"%nbgpu {command}: there is no such command.{did_you_mean(command, magic_help.COMMANDS)} Commands: "
                f"{', '.join(magic_help.COMMANDS)}"
            )
        # The method `_status` runs the command 'status', and so on.
        getattr(self, f"_{command}")(arguments)

    def _status(self, _: list[str]) -> None:
        print(current().status())  # noqa: T201 - the magic's output

    def _stop(self, _: list[str]) -> None:
        current().stop()
        print("stopped")  # noqa: T201

    def _ps(self, _: list[str]) -> None:
        print(ps.table())  # noqa: T201

    def _vars(self, arguments: list[str]) -> None:
        display(variables.table(current().apply, " ".join(arguments) or "*"))

    def _sync(self, _: list[str]) -> None:
        print(sync.sync(current(), self.shell))  # noqa: T201

    def _help(self, _: list[str]) -> None:
        print(magic_help.HELP)  # noqa: T201

    @magic_arguments()
    @argument("--rank", type=int, help="which rank; left out: the whole cluster")
    @argument("--replay", action="store_true", help="run the lost rank's cells again on the new one")
    def _restart(self, arguments: list[str]) -> None:
        """End a rank and start a new process for it, or end the whole cluster and start it again."""
        options: Namespace = self._restart.parser.parse_args(arguments)
        if options.replay and options.rank is None:
            raise UsageError(
                "%nbgpu restart --replay runs the cells of one rank again: name it with --rank K"
            )
        print(current().restart(options.rank, options.replay))  # noqa: T201 - the magic's output

    def _resize(self, arguments: list[str]) -> None:
        if len(arguments) != 1 or not arguments[0].isdigit():
            raise UsageError("%nbgpu resize N: say how many ranks you want")
        cluster = current()
        print(cluster.resize(int(arguments[0])))  # noqa: T201 - the magic's output
        cluster.parts.state.tell_news()

    @magic_arguments()
    @argument("--rank", type=int, help="which rank; left out: the one that failed first")
    def _debug(self, arguments: list[str]) -> None:
        """Look with pdb at the variables of the functions that the last cell failed in."""
        open_debugger(current(), self._debug.parser.parse_args(arguments).rank)

    @magic_arguments()
    @argument("folder", help="a new folder, or one with variables that were saved earlier")
    @argument("names", nargs="*", metavar="NAME", help="variables; all of them where none is named")
    def _save(self, arguments: list[str]) -> None:
        """Write the ranks' variables into a folder."""
        options: Namespace = self._save.parser.parse_args(arguments)
        print(current().save(options.folder, options.names))  # noqa: T201 - the magic's output

    @magic_arguments()
    @argument("folder", help="a folder that %%nbgpu save has written")
    @argument("names", nargs="*", metavar="NAME", help="variables; all of them where none is named")
    @argument(
        "--trust",
        action="store_true",
        help="open pickles and run definitions of cells, which can do anything",
    )
    def _load(self, arguments: list[str]) -> None:
        """Give the ranks the variables of a folder."""
        options: Namespace = self._load.parser.parse_args(arguments)
        print(current().load(options.folder, options.names, trust=options.trust))  # noqa: T201

    def _doctor(self, _: list[str]) -> None:
        """Look at this machine: what works, what does not, what to do."""
        if (views := presenting.cell_presenter) is not None:
            print(views.text_of_devices())  # noqa: T201 - the magic's output
        with DeviceCards() as cards:
            devices = cards.read()
        findings = []
        for finding in doctor.examine(doctor.runs_dir(), devices):
            findings.append(finding)
            print(doctor.line(finding), flush=True)  # noqa: T201 - the magic's output
        print(doctor.summary(findings))  # noqa: T201

    def _autoreload(self, arguments: list[str]) -> None:
        to = " ".join(arguments)
        if to not in ("", "on", "off"):
            raise UsageError(f"%nbgpu autoreload {to}: say on, off, or nothing to see which it is")
        print(current().parts.cells.reloading.switch(current().ranks, to))  # noqa: T201 - the magic's output

    def _attach(self, arguments: list[str]) -> None:
        if len(arguments) > 1:
            raise UsageError("%nbgpu attach [ID]: %nbgpu ps lists the clusters with their ids")
        cluster = attach(*arguments)
        print(cluster.describe())  # noqa: T201
        if cluster.run is not None:
            print(f"its run: {cluster.run.folder.name}, {cluster.run.status}. nbgpu.current().run has it")  # noqa: T201

    def _start(self, arguments: list[str]) -> None:
        """Start a cluster with the settings that the flags name, and name the clusters that earlier kernels
        of this notebook have left running."""
        try:
            settings = flags.parse([ClusterConfig], arguments, prog="%nbgpu start")
        except SystemExit as end:
            # The error, or the help, has been printed.
            if end.code:
                raise UsageError("no cluster was started") from None
            return
        kept = registry.kept_of_this_notebook()
        try:
            # Only the given flags are passed, because the others have the site's defaults.
            given = {name: settings[name] for name in flags.given(arguments, settings)}
            cluster = Cluster(**given).start()
        except NbgpuError:
            # A kept cluster may hold the GPUs.
            _report_kept(kept, "")
            raise
        print(cluster.describe())  # noqa: T201
        _report_kept(kept, "%nbgpu stop, then ")

    @magic_arguments()
    @argument("names", nargs="+", metavar="NAME", help="variables on the rank, or expressions without spaces")
    @argument("--rank", type=int, help="which rank; left out: 0")
    @argument("--as", dest="target", metavar="NAME", help="its name in the notebook; left out: the same")
    @argument(
        "--into", metavar="NAME", help="notebook variable that gets a dict: the value of each rank, by rank"
    )
    @argument("--ranks", help="which ranks for --into, such as 0,2-3; left out: all")
    @line_magic
    def pull(self, line: str) -> None:
        """Copy variables from a rank, or from all ranks, into the notebook."""
        self.shell.user_ns.update(pull_values(current(), parse_argstring(self.pull, line)))

    @magic_arguments()
    @argument("names", nargs="+", metavar="NAME", help="variables of the notebook")
    @argument("--ranks", help="which ranks, such as 0,2-3; left out: all")
    @line_magic
    def push(self, line: str) -> None:
        """Copy variables from the notebook to every rank, or to some."""
        arguments: Namespace = parse_argstring(self.push, line)
        if unknown := unpicklable.unknown(arguments.names, self.shell.user_ns):
            raise UsageError("\n".join([*unknown, "nothing was sent"]))
        ranks = None if arguments.ranks is None else parse_ranks(arguments.ranks)
        cluster = current()
        cluster.push(ranks, **{name: self.shell.user_ns[name] for name in arguments.names})
        cluster.parts.state.tell_news()


# What `%nbgpu?` and `%%distributed?` show.
NbgpuMagics.nbgpu.__doc__ = magic_help.HELP
NbgpuMagics.distributed.__doc__ = _cell_arguments().format_help()


def _report_kept(kept: Sequence[registry.ClusterRecord], before: str) -> None:
    """Print which clusters earlier kernels of this notebook have left running, and how to attach to them or
    end them; `before` are the commands that have to come before."""
    for entry in kept:
        started = time.strftime("%H:%M on %d %B", time.localtime(entry.started_s))
        run = f", with the run {entry.run.name}" if entry.run is not None else ""
        text = (
            f"cluster {entry.id} of this notebook has gone on since {started}{run}, because it was started with --keep. "
            f"To connect to it: {before}%nbgpu attach {entry.id}. To end it: nbgpu stop {entry.id}"
        )
        print(text, file=sys.stderr)  # noqa: T201


def pull_values(cluster: Cluster, arguments: Namespace) -> dict[str, Any]:
    """Copy the variables of a `%pull` from the ranks, and return the values by their names in the notebook;
    UsageError if options exclude each other."""
    names = list(dict.fromkeys(arguments.names))
    if arguments.ranks is not None and arguments.into is None:
        raise UsageError("%pull --ranks needs --into NAME, which gets the value of each rank")
    if arguments.into is not None and (arguments.rank is not None or arguments.target):
        raise UsageError("%pull --into takes the value of each rank: leave --rank and --as out, or --into")
    if arguments.target and len(names) > 1:
        raise UsageError("%pull --as renames one variable: name one")
    if arguments.into is None:
        if not arguments.target and (unnamed := [name for name in names if not name.isidentifier()]):
            raise UsageError(f"give the value a name in the notebook: %pull {unnamed[0]} --as NAME")
        values: dict[str, Any] = cluster.pull(names, arguments.rank or 0)
        return {arguments.target or name: value for name, value in values.items()}
    ranks: Any = "all" if arguments.ranks is None else parse_ranks(arguments.ranks)
    return {arguments.into: cluster.pull(names[0] if len(names) == 1 else names, ranks=ranks)}


def _completions() -> dict[str, list[str]]:
    """Return the options and subcommands that Tab offers in a magic's line, by the beginning of the line."""

    def options(parser: MagicArgumentParser) -> list[str]:
        return re.findall(r"--[\w-]+", parser.format_usage())

    return {
        _CELL_MAGIC: options(_cell_arguments()),
        "%nbgpu": list(magic_help.COMMANDS),
        "%nbgpu start": [f"--{name.replace('_', '-')}" for name in ClusterConfig.model_fields],
        "%nbgpu autoreload": ["on", "off"],
        "%nbgpu restart": options(NbgpuMagics._restart.parser),
        "%nbgpu debug": options(NbgpuMagics._debug.parser),
        "%nbgpu load": options(NbgpuMagics._load.parser),
        "%%scaling": options(NbgpuMagics.scaling.parser),
        "%pull": options(NbgpuMagics.pull.parser),
        "%push": options(NbgpuMagics.push.parser),
    }


def load(shell: Any) -> None:
    """Register the magics and the transformer with an IPython shell. Harmless when repeated."""
    shell.register_magics(NbgpuMagics(shell), DebugMagics(shell))
    transformers = shell.input_transformer_manager.cleanup_transforms
    # In a terminal there is no event loop to keep free, and Ctrl-C does not interrupt an awaited call, so the
    # cell magic runs there.
    has_kernel = getattr(shell, "kernel", None) is not None
    if has_kernel and await_distributed_cells not in transformers:
        flushing.install(shell)
        head_start.install(shell, _CELL_MAGIC, _split_cell_to_send, _send_awaited)
        transformers.append(await_distributed_cells)  # after the one that removes empty lines at the top
    if not has_kernel and strip_comments_above not in transformers:
        transformers.append(strip_comments_above)
    completion.install(shell, _completions())
    plain_cells.install(shell)


def unload(shell: Any) -> None:
    """Remove the transformer. A running cluster goes on until it is stopped."""
    transformers = shell.input_transformer_manager.cleanup_transforms
    if await_distributed_cells in transformers:
        transformers.remove(await_distributed_cells)
        flushing.uninstall(shell)
        head_start.uninstall(shell)
    if strip_comments_above in transformers:
        transformers.remove(strip_comments_above)
    completion.uninstall(shell)
    plain_cells.uninstall(shell)
