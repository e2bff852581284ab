"""Moves the person's DistributedDataParallel objects, with their hooks and settings, to the next generation
of the group, and gives their parameters and optimizers the same state on all ranks.

`DistributedDataParallel._update_process_group` is not enough: ranks that failed before DDP first rebuilt its
buckets disagree on the buckets' sizes, and gloo aborts the process. So every object is initialised again, in
place and with its own arguments. The key of an object, by which the ranks match their objects, is the name of
its variable, or the number of objects made before it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbgpu.engine.group import ddp_objects, exchange, torch_private, torch_settings
from nbgpu.engine.ipykernel import ended_groups, kept_failure
from nbgpu.engine.model import optimizers
from nbgpu.engine.model.optimizers import OptimizerState
from nbgpu.engine.variables import persons_objects, user_groups
from nbgpu.engine.variables.persons_objects import is_a, run_limited, walk_parameters
from nbgpu.errors import ConfigError
from nbgpu.text.ranks import named_ranks

_ELEMENTS_PER_S = 2e7
"""How many elements a slow processor sums or copies in a second."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by the size of an element in bytes."""
_MAX_ELEMENTS_AT_ONCE = 2**20
"""How many elements of a tensor are summed at once."""
_reported: set[tuple[str | int, ...]] = set()
"""Problems that were reported, so that each is reported once: (key, the ranks without the object), or (name
of an optimizer, the error)."""


_OF_EVERY_MODULE = tuple(vars(nn.Module()))
"""The attributes in which torch keeps the hooks, children, buffers, parameters and mode of a module."""
_SWITCHES = ("require_backward_grad_sync", "require_forward_param_sync")
"""Attributes of DDP that loops set by hand to accumulate gradients."""
_STEPS_TO_SETTLE = 2
"""After so many steps DDP has put its buckets into their last order."""


class _CannotMoveError(Exception):
    """A DDP object cannot be moved to the new group. The message completes a sentence about the object."""


def report_again() -> None:
    """Forget which missing objects were reported, so that they are reported once more: the group has other
    ranks now."""
    _reported.clear()


@torch_settings.as_at_the_beginning()
def move(variables: Mapping[str, Any], healthy: Sequence[int], before: Any) -> list[str]:
    """Initialise every DDP object again on the group, with the same parameters and optimizer state on all
    ranks, and with the person's hooks and settings.

    A collective: every rank calls it, right after the group was formed.

    Args:
        variables: the person's variables, by name.
        healthy: the ranks whose state is trusted. Where the ranks differ, all get the state of the lowest of
            these.
        before: the default group that has ended; None where there was none.

    Returns:
        A line for each object that could not be moved, and for each whose state differed.
    """
    if ddp_objects.are_there():
        # So that no object that only waits for the collector is taken for a living one.
        run_limited(None, gc.collect)
        _drop_debugger_objects()
    # Agree on the objects that exist on all ranks, and on their groups.
    mine = _by_key(variables)
    arguments_of = {ddp: arguments for ddp, (_, arguments) in ddp_objects.all_made().items()}
    # The largest count of all ranks: no object of a new rank gets the number of one that only others have.
    ddp_objects.set_next_number(max(exchange.gather(ddp_objects.next_number())))
    source = min(healthy, default=0)
    everywhere, lines = _on_every_rank(mine, source, "DistributedDataParallel object")
    groups_by_rank = exchange.gather({key: _ranks_of_group(arguments_of[mine[key]]) for key in everywhere})
    for value in variables.values():
        if is_a(value, Optimizer):
            on_new_group(value, before)
    moved = set()
    on_default_group: list[DistributedDataParallel] = []
    for key in everywhere:
        ddp = mine[key]
        groups = [groups_of_rank[key] for groups_of_rank in groups_by_rank]
        if not all(groups):
            lines.append(f"{key}, a DistributedDataParallel object on a group of your own: make it again")
            continue
        # No rank may leave the others waiting, so each step below ends with an exchange of the ranks' errors.
        try:
            difference = _make_equal(ddp, groups, healthy)
        except _CannotMoveError as error:
            lines.append(f"{key}, {error}: make it again")
            continue
        if difference:
            lines.append(f"the parameters of {key} {difference}")
        order_here, _ = run_limited(ddp, functools.partial(torch_private.bucket_order, ddp))
        order = exchange.gather(order_here or [])[source]
        problem, hook = _initialise_again(ddp, arguments_of[ddp], order)
        problems, hook_names = zip(*exchange.gather([problem, _hook_name(hook)]), strict=True)
        if any(problems):
            lines.append(f"{key}: {next(filter(None, problems))}. Make it again on all ranks")
            continue
        # Put the communication hook back.
        if len(set(hook_names)) > 1:
            lines.append(f"{key} had a communication hook on some ranks only: it has none now")
        elif hook is not None:
            message, problem = run_limited(ddp, functools.partial(_register_hook, ddp, hook, before))
            if problem:
                name = _hook_name(hook)
                message = f"its communication hook {name} could not be registered again ({problem})"
            if message:
                lines.append(f"{key}: {message}")
        moved.add(key)
        if all(len(ranks) == dist.get_world_size() for ranks in groups):
            on_default_group.append(ddp)
    for key in mine.keys() - moved:
        ended_groups.note(key, mine[key], f"{key} = DistributedDataParallel(...) on all ranks")
    return lines + _share_optimizers(variables, on_default_group, source)


def _ranks_of_group(arguments: Mapping[str, Any]) -> list[int]:
    """Return the ranks of the group for which a DDP object was made, in ascending order; none if that group
    has ended.

    Args:
        arguments: those of the object's constructor.
    """
    mesh = arguments.get("device_mesh")
    if mesh is not None and torch_private.root_mesh(mesh) is not None:
        return []  # DDP has changed the module's parameters for the larger mesh
    try:
        group = arguments.get("process_group") if mesh is None else mesh.get_group()
        return sorted(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):  # torch no longer has the group
        return []


def _make_equal(ddp: DistributedDataParallel, groups: Sequence[list[int]], healthy: Sequence[int]) -> str:
    """Give all ranks of an object's group the same parameters. A collective over all ranks.

    Args:
        ddp: the object.
        groups: groups[r] lists the ranks in the process group of rank r's object.
        healthy: the ranks whose state is trusted.

    Returns:
        A sentence about the parameters that differed, without its subject; empty if none did.

    Raises:
        _CannotMoveError: the parameters cannot be made the same. All ranks raise.
    """

    def read() -> tuple[list[Tensor], list[Any]]:
        parameters = list(ddp.module.parameters())
        return parameters, _shapes_and_sums(parameters)

    # Compare the parameters over all ranks.
    answer, problem = run_limited(ddp, read)
    parameters, sums_here = answer or ([], [])
    problems, sums_by_rank = zip(*exchange.gather([problem, sums_here]), strict=True)
    for rank, problem in enumerate(problems):
        if problem:
            raise _CannotMoveError(f"whose parameters cannot be read on rank {rank} ({problem})")
    # Maps each group whose parameters differ to the rank that broadcasts.
    source_of_group = {}
    for ranks in map(tuple, groups):
        difference = _difference([sums_by_rank[rank] for rank in ranks])
        if difference == "in shape":
            raise _CannotMoveError("whose parameters differ in shape between the ranks")
        if difference:
            source_of_group[ranks] = min([rank for rank in healthy if rank in ranks] or ranks)
    ranks = tuple(groups[dist.get_rank()])
    if ranks in source_of_group:
        group = None if len(ranks) == len(groups) else ddp.process_group
        for parameter in parameters:
            dist.broadcast(parameter.detach(), source_of_group[ranks], group)
    if not source_of_group:
        return ""
    if len(ranks) == len(groups):
        return f"differed between the ranks: all have those of rank {source_of_group[ranks]} now"
    named = "; ".join(
        f"{named_ranks(members)} have those of rank {source} now"
        for members, source in source_of_group.items()
    )
    return f"differed between the ranks of its group: {named}. Make its optimizer again"


def _initialise_again(
    ddp: DistributedDataParallel, arguments: Mapping[str, Any], order: Sequence[int]
) -> tuple[str, tuple[Any, Any] | None]:
    """Initialise a DDP object on the present group, in place and with its buckets in the given order, and
    with the module hooks and switches that it had.

    Returns:
        (the error, or '' for none; the (state, communication hook) of the person, to be registered again, or
        None if there is none).
    """
    attributes = {name: vars(ddp)[name] for name in (*_OF_EVERY_MODULE, *_SWITCHES)}
    hook = ddp_objects.registered_hook(ddp)

    def initialise() -> None:
        # The ranks agree by now; DDP's own synchronisation would only copy rank 0's buffers.
        torch_private.initialise_ddp(ddp, ddp.module, order, **{**arguments, "init_sync": False})

    _, problem = run_limited(ddp, initialise)
    if not problem:
        # The very dicts of before: the handles with which a person removes a hook refer to them.
        vars(ddp).update(attributes)
    return problem, hook


def _drop_debugger_objects() -> None:
    """Drop the DDP objects to which only the frames kept for `%debug` refer: they are not used any more."""
    frames = {id(frame) for frame in kept_failure.kept_frames()}
    for ddp_ref in ddp_objects.references() if frames else ():
        ddp = ddp_ref()
        if ddp is not None and _is_held_by_frames_only(ddp, frames):
            ddp_objects.forget(ddp)


def _is_held_by_frames_only(ddp: DistributedDataParallel, frames: Collection[int]) -> bool:
    """Return whether only these frames, given by their ids, refer to a DDP object."""
    holders = gc.get_referrers(ddp)
    for holder in holders:
        if id(holder) in frames:
            continue
        if not isinstance(holder, dict):
            return False
        # A frame whose f_locals was read has its variables a second time, in a dict, to which the list
        # `holders` refers, too.
        if not all(other is holders or id(other) in frames for other in gc.get_referrers(holder)):
            return False
    # Without a holder that the collector sees, something that it does not see holds the object.
    return bool(holders)


def _by_key(variables: Mapping[str, Any]) -> dict[str, DistributedDataParallel]:
    """Return the DDP objects of this process by the name of their variable, or by their number if they have
    none, in the order in which they were made."""
    names = {id(v): name for name, v in reversed(list(variables.items())) if is_a(v, DistributedDataParallel)}
    made = ddp_objects.all_made()
    return {names.get(id(ddp), f"DDP object {number}"): ddp for ddp, (number, _) in made.items()}


def _on_every_rank(mine: Iterable[str], source: int, what: str) -> tuple[list[str], list[str]]:
    """Return which keys all ranks have. A collective.

    Args:
        mine: the keys of this rank.
        source: the rank whose order counts.
        what: the kind of object that the keys stand for, for messages.

    Returns:
        The keys that all ranks have, in order, and a line for each key that only some have and that was not
        yet reported for these ranks.
    """
    keys_by_rank = exchange.gather(list(mine))
    everywhere = [key for key in keys_by_rank[source] if all(key in keys for keys in keys_by_rank)]
    lines = []
    for key in dict.fromkeys(itertools.chain.from_iterable(keys_by_rank)):
        without = [rank for rank, keys in enumerate(keys_by_rank) if key not in keys]
        if without and (key, *without) not in _reported:
            _reported.add((key, *without))
            lacks = f"{named_ranks(without)} {'does' if len(without) == 1 else 'do'} not have"
            lines.append(f"{key}, a {what} that {lacks}: make it again on all ranks")
    return everywhere, lines


def _shapes_and_sums(tensors: Sequence[Tensor]) -> list[Any]:
    """Return [the shape of each tensor, the fingerprint of each tensor], as JSON."""
    _allow_time(tensors)
    return [[list(t.shape) for t in tensors], [_fingerprint(t) for t in tensors]]


def _allow_time(tensors: Iterable[Tensor]) -> None:
    """Extend the time limit of the running `run_limited` by the time to read these tensors."""
    persons_objects.allow(sum(tensor.numel() for tensor in tensors) / _ELEMENTS_PER_S)


def _difference(gathered: Sequence[Any]) -> str:
    """Return how the tensors of ranks differ: 'in shape', 'in value', or '' if they are equal.

    Args:
        gathered: the `_shapes_and_sums` of these ranks.
    """
    first_shapes, first_sums = gathered[0]
    if any(shapes != first_shapes for shapes, _ in gathered):
        return "in shape"
    return "in value" if any(sums != first_sums for _, sums in gathered) else ""


def _fingerprint(tensor: Tensor) -> list[int]:
    """Return the sum of the bit patterns of a tensor's elements, and the sum of their squares, as 64-bit
    integers.

    Sums of integers do not depend on the order of the additions, which differs with the number of threads and
    the processor; sums of floats would. The squares reveal changes that cancel each other in the first sum.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.view(_INTEGERS[values.element_size()])
    if bits.numel() <= _MAX_ELEMENTS_AT_ONCE:
        return _sums(bits).tolist()
    # In parts, because each is copied, and memory may be short after a failure.
    longest = max(range(bits.ndim), key=bits.shape.__getitem__)
    parts = bits.split(max(1, bits.shape[longest] * _MAX_ELEMENTS_AT_ONCE // bits.numel()), longest)
    return functools.reduce(torch.add, map(_sums, parts)).tolist()


def _sums(bits: Tensor) -> Tensor:
    """Return the sum of integers and the sum of their squares, modulo 2^64."""
    wide = bits.to(torch.int64)
    return torch.stack((wide.sum(), (wide * wide).sum()))


def _optimizer_state(optimizer: Optimizer) -> tuple[OptimizerState, list[Any], str]:
    """Return an optimizer's state, and a fingerprint of it.

    Returns:
        (the state; a list, as JSON, that is equal on two ranks if their states are; the reason why the state
        cannot be sent, or '' if it can).
    """
    nothing = OptimizerState({}, {}, [])

    def read() -> tuple[OptimizerState, list[Any], str]:
        """Read the state through the optimizer's own code, and compute the sums of its tensors."""
        try:
            state = optimizers.state_of(optimizer)
        except ConfigError as error:
            return nothing, [], f"{error}. Make it again on all ranks"
        names = sorted(state.tensors)
        sums = _shapes_and_sums([state.tensors[name] for name in names])
        return state, [names, str(_settings(state)), str(sorted(state.values.items())), sums], ""

    # The optimizer may be of the person's own class, whose code may fail or never end.
    answer, failure = run_limited(optimizer, read)
    return answer or (nothing, [], f"its state could not be compared over the ranks ({failure})")


def _load_state(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    values: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Give an optimizer the state of another rank.

    Args:
        optimizer: this rank's.
        groups: this rank's parameter groups.
        settings: the settings of the other rank's parameter groups.
        values, tensors: the rest of the other rank's state.

    Raises:
        ConfigError: the two ranks have different numbers of parameter groups, as after a cell that added a
            group on one of them and raised on the other.
    """
    if len(groups) != len(settings):
        raise ConfigError(f"it has {len(groups)} parameter group(s) here and {len(settings)} there")
    # The parameters stay this rank's own; only settings such as the learning rate come from the other rank.
    merged = [
        group | {name: _convert_like(group.get(name), value) for name, value in sent.items()}
        for group, sent in zip(groups, settings, strict=True)
    ]
    _allow_time(tensors.values())
    optimizers.load_state(optimizer, OptimizerState(tensors, values, merged))


def _settings(state: OptimizerState) -> list[dict[str, Any]]:
    """Return the settings of each parameter group as JSON: numbers, texts, and tuples of them such as Adam's
    betas, which schedulers change. A rate in a tensor becomes a number."""
    return [
        {name: _as_json(value) for name, value in group.items() if name != "params" and _is_setting(value)}
        for group in state.groups
    ]


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return isinstance(value, bool | float | int | str) or (isinstance(value, Tensor) and value.numel() == 1)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(part) for part in value]
    return value.item() if isinstance(value, Tensor) else value


def _convert_like(setting: Any, value: Any) -> Any:
    """Convert a setting of another rank, which came as JSON, to the types of this rank's: tuples and
    tensors."""
    if isinstance(setting, tuple):
        return tuple(_convert_like(*pair) for pair in zip(setting, value, strict=True))
    return torch.full_like(setting, value) if isinstance(setting, Tensor) else value


def _optimizer_parameters(variables: Mapping[str, Any]) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the parameters of each optimizer by the name of its variable, and a line for each whose
    parameters cannot be read."""
    by_name, lines = {}, []
    for name, value in variables.items():
        # An optimizer that holds a group has a part of the state on each rank, as ZeroRedundancyOptimizer
        # has.
        if is_a(value, Optimizer) and not [*_held_groups(value)]:
            parameters, problem = user_groups.optimizer_parameters(value)
            if parameters is not None:
                by_name[name] = parameters
            elif (name, problem) not in _reported:
                _reported.add((name, problem))
                lines.append(f"{name}: its parameters could not be read ({problem})")
    return by_name, lines


def _share_optimizers(
    variables: Mapping[str, Any], moved: Sequence[DistributedDataParallel], source: int
) -> list[str]:
    """Give the optimizers of moved DDP objects the same state on all ranks; leave other optimizers alone. A
    collective.

    Args:
        variables: the person's variables, by name.
        moved: the DDP objects that have moved to the new default group.
        source: the rank whose state all get where the ranks differ.

    Returns:
        A line for each optimizer whose state differed, or could not be made equal.
    """
    # Only an optimizer whose parameters are all those of moved objects can have one state on all ranks.
    shared = {id(parameter) for ddp in moved for parameter in walk_parameters(ddp)}
    parameters_by_name, lines = _optimizer_parameters(variables)
    mine = {
        name: variables[name]
        for name, parameters in parameters_by_name.items()
        if parameters and all(id(parameter) in shared for parameter in parameters)
    }
    everywhere, only_some = _on_every_rank(mine, source, "optimizer")
    lines += only_some
    for name in everywhere:
        state, fingerprint, problem = _optimizer_state(mine[name])
        problems, fingerprints = zip(*exchange.gather([problem, fingerprint]), strict=True)
        if any(problems):
            lines.append(f"{name}: {next(filter(None, problems))}")
            continue
        if all(other == fingerprints[0] for other in fingerprints):
            continue
        # They differ: send the state of `source` to the others.
        tensors = dict(exchange.broadcast_tensors(state.tensors, source, moved[0].device))
        settings, values = exchange.broadcast([_settings(state), state.values], source)
        problem = ""
        if dist.get_rank() != source:
            load = functools.partial(_load_state, mine[name], state.groups, settings, values, tensors)
            _, problem = run_limited(mine[name], load)
        if raised := next(filter(None, exchange.gather(problem)), ""):
            lines.append(
                f"the state of {name} differs between the ranks ({raised}). Make it again on all ranks"
            )
            continue
        lines.append(f"the state of {name} differed between the ranks: all have that of rank {source} now")
    return lines


def _hook_name(state_and_hook: tuple[Any, Any] | None) -> str:
    """Return the name of a communication hook, given with its state; empty for None."""
    if state_and_hook is None:
        return ""
    _, hook = state_and_hook
    is_function = is_a(hook, (FunctionType, MethodType, BuiltinFunctionType))
    return hook.__qualname__ if is_function else type(hook).__name__


def _register_hook(ddp: DistributedDataParallel, state_and_hook: tuple[Any, Any], before: Any) -> str:
    """Register a DDP object's communication hook again, on the new group.

    Args:
        ddp: the object.
        state_and_hook: the hook's state, and the hook.
        before: the default group that has ended.

    Returns:
        A sentence for the person; empty if nothing has changed for them.
    """
    name = _hook_name(state_and_hook)
    state, hook = on_new_group(state_and_hook[0], before), state_and_hook[1]
    if any(group not in torch_private.living_groups() for group in _held_groups(state)):
        return f"its communication hook {name} is on a group of your own: make it and register the hook again"
    note = ""
    if _begin_compression_again(state):
        note = f"its communication hook {name} begins again: {_STEPS_TO_SETTLE} steps without compression, no error kept"
    ddp.register_comm_hook(state, hook)
    return note


def on_new_group(thing: Any, before: Any) -> Any:
    """Replace the default group that has ended by the new one if an object is that group or has it as an
    attribute. Return the object, or the new group in its place.

    Args:
        thing: the object.
        before: the group that has ended; None where there was none.
    """
    if before is None:
        return thing
    if thing is before:
        return dist.group.WORLD
    held = persons_objects.attributes(thing)
    held.update({name: dist.group.WORLD for name, value in held.items() if value is before})
    return thing


def _held_groups(thing: Any) -> Iterator[dist.ProcessGroup]:
    """Yield the object if it is a process group, and the process groups among its attributes."""
    for value in [thing, *persons_objects.attributes(thing).values()]:
        if is_a(value, dist.ProcessGroup):
            yield value


def _begin_compression_again(state: Any) -> bool:
    """Clear PowerSGD's error feedback and its low-rank matrices, which belong to buckets that the new DDP
    object has not built yet; return whether there were any."""
    power_sgd = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    if power_sgd is None or not is_a(state, power_sgd.PowerSGDState):
        return False
    memories = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
    had_any = any(memories)
    for memory in memories:
        memory.clear()
    # PowerSGD must not start before DDP has built its final buckets.
    state.iter = min(state.iter, state.start_powerSGD_iter - _STEPS_TO_SETTLE)
    return had_any
