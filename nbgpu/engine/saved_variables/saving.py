"""The rank's side of `%nbgpu save` and `%nbgpu load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from nbgpu import saved_folder
from nbgpu.engine.group import group, torch_settings
from nbgpu.engine.ipykernel import shell
from nbgpu.engine.saved_variables import rank_files
from nbgpu.engine.saved_variables.describing import Describer
from nbgpu.engine.saved_variables.rank_files import Stored
from nbgpu.engine.saved_variables.rebuilding import (
    NeedsTrust,
    NotRebuilt,
    Rebuilder,
    restore_random_state,
)
from nbgpu.errors import DataError, TransferError
from nbgpu.protocol import served
from nbgpu.saved_folder import RankSaved
from nbgpu.serialization import unpicklable


@dataclass
class Staged:
    """Variables that are rebuilt, and not yet in the person's namespace."""

    values: dict[str, Any] = field(default_factory=dict)
    random_state: Any = None


_staged = Staged()


@torch_settings.as_at_the_beginning()
def save(folder: str, data: str, names: Sequence[str]) -> RankSaved:
    """Write this rank's variables into its folder. Variables that cannot be saved are left out and named.

    Args:
        folder: the folder of the saved variables.
        data: the name of the ranks' folder in it.
        names: the variables; empty for all.

    Raises:
        TransferError: there is no variable of a name.
        DataError: the files cannot be written.
    """
    member = group.membership()
    variables = shell.current().user_ns
    if unknown := unpicklable.unknown(names, variables):
        raise TransferError("\n".join(unknown))
    describer = Describer(member.device)
    refused: list[str] = []
    for name in names or _own_variables():
        refused += describer.add(name, variables[name])
    random_state = describer.add_random_state()
    where = saved_folder.rank_folder(served.here(folder), data, member.rank)
    try:
        files, fingerprints = rank_files.write(where, describer, random_state)
    except OSError as error:
        raise DataError(f"{error.filename or where} cannot be written: {error.strerror}") from error
    return RankSaved(files, fingerprints, [*refused, *describer.notes])


@torch_settings.as_at_the_beginning()
def stage(
    folder: str, data: str, saved_by: int, saved: Sequence[RankSaved], names: Sequence[str], trust: bool
) -> tuple[list[str], dict[str, str], list[str]]:
    """Rebuild variables, and keep them until `take` or `drop`. No variable of the person changes.

    Args:
        folder: the folder of the saved variables.
        data: the name of the ranks' folder in it.
        saved_by: the rank whose variables this rank takes.
        saved: what each rank has written.
        names: the variables.
        trust: whether code of the folder may run.

    Returns:
        The names of the variables that are ready; by name, the code for which others need trust; and a line
        for each that cannot be rebuilt.

    Raises:
        DataError: the files are damaged.
    """
    drop()
    member = group.membership()

    def read_intact(rank: int) -> Stored:
        where = saved_folder.rank_folder(served.here(folder), data, rank)
        if problem := saved_folder.damage(where, saved[rank]):
            raise DataError(problem)
        return rank_files.read(where)

    stored = read_intact(saved_by)

    def all_stored() -> list[Stored]:
        return [stored if rank == saved_by else read_intact(rank) for rank in range(len(saved))]

    # Where as many ranks load as have saved, a rank's own files have its parts of all DTensors.
    rebuilder = Rebuilder(
        stored,
        shell.current().user_ns,
        member.device,
        trust,
        all_stored if len(saved) != member.world_size else None,
    )
    untrusted: dict[str, str] = {}
    failed: list[str] = []
    for name in names:
        try:
            _staged.values[name] = rebuilder.value(stored.variables[name])
        except NeedsTrust as error:
            untrusted[name] = str(error)
        except NotRebuilt as error:
            failed.append(f"{name}: {error}")
    _staged.random_state = rebuilder.value(stored.random)
    return list(_staged.values), untrusted, failed


def take(names: Sequence[str], with_random_state: bool) -> None:
    """Make staged values the person's variables, and set the random number generators to their saved state if
    wanted."""
    variables = shell.current().user_ns
    values, state = _staged.values, _staged.random_state
    drop()
    variables.update({name: values[name] for name in names if name in values})
    if with_random_state:
        restore_random_state(state, group.membership().device)


def drop() -> None:
    """Release the staged values."""
    global _staged
    _staged = Staged()


def _own_variables() -> list[str]:
    """Return the names of the person's variables, and of the modules, functions and classes that they have
    imported."""
    current = shell.current()
    hidden: Mapping[str, Any] = current.user_ns_hidden
    absent = object()
    return [
        name
        for name, value in current.user_ns.items()
        if not name.startswith("_")
        and value is not hidden.get(name, absent)
        # The module of a script that was run, and not imported, cannot be imported by another process.
        and not (isinstance(value, ModuleType) and value.__name__ == "__main__")
    ]
