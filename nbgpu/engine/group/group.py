"""The process group of the ranks, and its generations.

A generation is one forming of the group. Each has a store of its own in which the ranks meet (`meeting.py`),
so that nothing left over from an earlier group can be mistaken for a part of this one.

After a failure `give_up`, on a thread, frees the rank from the collective in which it waits, and `form_again`
makes the next generation; `replicas.py` moves the person's DistributedDataParallel objects to it. `give_up`
takes the number of a generation, so that a repeated, late or early call does no harm.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from nbgpu.engine.group import (
    collective_timeout,
    diagnosis,
    meeting,
    own_groups,
    simulated_link,
    sockets,
    torch_private,
    torch_settings,
)
from nbgpu.protocol.cluster_processes import ABORT_HUNG
from nbgpu.protocol.records import Device

_log = logging.getLogger("nbgpu.engine")


@dataclass(frozen=True)
class Membership:
    """This process's place in the group."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    transport: str = ""
    """The transport that was found to work, as `nbgpu.machine.transports` names it."""
    timeout_s: float = 1800.0
    """How long a collective may take."""
    described: Device | None = None
    """The device's description, if the cluster has given one."""
    simulated: str = ""
    """The simulated link and slow ranks of the cluster in words; empty for none."""

    @property
    def timeout(self) -> timedelta:
        """Return the time that a collective may take."""
        return timedelta(seconds=self.timeout_s)


_CONNECT_TIMEOUT_S = 4.0
"""The time for gloo to connect ranks that have all arrived, which takes a few milliseconds. gloo waits five
times as long for a peer's connection (gloo/transport/tcp/pair.cc, waitUntil)."""
_CONNECT_TIMEOUT_S_PER_RANK = 0.1
_LONGEST_WAIT_S = 30 * 86_400.0
_ABORT_PATIENCE_S = 10.0
"""How long the abort of NCCL may take. A GPU that is lost, or another rank that is, can keep it for ever
(https://github.com/NVIDIA/nccl/issues/1013)."""
_PROOF_ELEMENTS = 2**20
_PROOF_ELEMENTS_ON_CPU = 64
_PROOF_PERIOD = 251
"""Prime, so that no piece of a transfer ends where the pattern does, and small, so that float32 holds the
sums of thousands of ranks exactly."""
_MAKING_PATIENCE_S = 0.1
"""How long the cut of a rank's connections waits while the rank still connects to its peers. A rank that is
cut off halfway would keep its peers waiting."""

_RELEASE_EVERY_S = 1.0
"""How often the references to a group that has ended are counted, until no other code holds the group."""
IN_PLACE_VARIABLE = "NBGPU_REFORM_IN_PLACE"
"""In the environment of the kernel. With torch 2.14 groups of gloo are formed again in place, unless it is 0;
with 1, groups of nccl2 as well, which was written without a GPU to try it on."""

_membership: Membership | None = None
_formed: tuple[Any, Any] | None = None
"""The default group that `form` has made, and its store."""
_number = 0
"""The number that torch gave the default group, which is also its name."""
_next_number = 0
"""A number that is greater than that of every group so far."""
_bytes_before_cell = 0
"""The bytes that the groups' connections had moved when the cell began."""
_ended: SimpleQueue[Any] = SimpleQueue()
"""Groups that have ended, for the thread that destroys them."""
_alone: Membership | None = None
"""The membership of a rank that is alone in its group, until that group ends."""

_cutting = threading.Lock()
"""Held while a generation's connections are cut, and to change the variables below."""
_generation = -1
"""The generation that this process formed last, or is forming; -1 before the first."""
_is_cut = True
"""Whether the connections of `_generation` were cut."""
_given_up = -1
"""The newest generation that was given up; all earlier ones count as given up too."""
_store: dist.Store | None = None  # type: ignore[name-defined]
"""The store in which the ranks of `_generation` meet."""


def membership() -> Membership:
    """Return this process's place in the group that it formed last, or in its 'fake' group (`form_alone`)."""
    member = _membership if _alone is None else _alone
    assert member is not None, "no group was formed in this process"
    return member


def has_ended() -> bool:
    """Return whether this process had a group and no longer has one, as after torch's
    `destroy_process_group`."""
    return _membership is not None and not dist.is_initialized()


def is_cut_off() -> bool:
    """Return whether this process's connections to the group that it formed last have been cut."""
    return _membership is not None and _is_cut


@torch_settings.as_at_the_beginning()
def form(member: Membership, store: dist.Store | None, generation: int = 0) -> None:  # type: ignore[name-defined]
    """Form the default process group and prove it with a real all_reduce on the rank's device.

    Args:
        member: this process's place.
        store: where the ranks of this generation, and nobody else, meet. With None they meet in the store
            that torchrun's environment names (`meeting.torchrun_store`).
        generation: the number of this forming of the group.

    Raises:
        RuntimeError: the all_reduce gave a wrong sum, a peer did not come within `member.timeout_s`, or the
            generation was given up meanwhile (DistBackendError).
        ConnectionError: a process of another user, or on another host one that is no rank, took a rank's
            place.
    """
    global _membership, _formed
    # Enter the generation, and settle what torch reads when a group is made.
    _begin(generation, store)
    if store is not None:
        stay_on_loopback()
        diagnosis.keep_nccl_from_ending_the_process()
    if member.device.type == "cuda":
        torch.cuda.set_device(member.device)
    # Meet the other ranks, and make the group: the same object once more where all ranks can, else a new one.
    number = next_number = 0
    with sockets.group_in_the_making():
        if store is not None:
            number, next_number, is_in_place = _meet(store, member)
            meets_in = store
        else:
            is_in_place = False
            meets_in = meeting.torchrun_store(member.rank, member.world_size, member.timeout)
        if is_in_place:
            _form_in_place(member, meets_in)
        else:
            _end_group()
            torch_private.set_group_count(number)
            connects_afterwards = store is not None and _connects_afterwards()
            afterwards: dict[str, Any] = {"enable_reconfigure": True} if connects_afterwards else {}
            dist.init_process_group(
                # CPU tensors go over gloo beside NCCL, as control messages do.
                "cpu:gloo,cuda:nccl" if member.backend == "nccl" else member.backend,
                store=meets_in,
                rank=member.rank,
                world_size=member.world_size,
                timeout=member.timeout if store is None else _connect_timeout(member),
                **afterwards,
            )
            if store is not None and afterwards:
                _connect(dist.group.WORLD, store, "default", range(member.world_size), member)
            _formed = (dist.group.WORLD, meets_in)
    # Number later groups alike on all ranks, and give no number twice: a mesh may still look for a group that
    # has ended by its name. After a forming in place torch's own count does not serve, because it may include
    # groups that were not formed on all ranks.
    num_made = 0 if is_in_place else torch_private.group_count()
    torch_private.set_group_count(max(next_number, num_made))
    # The group is connected: from here on collectives get their own timeout.
    if store is not None:
        abandon = functools.partial(_abandon_late_collective, generation)
        collective_timeout.begin(collective_timeout.Watchdog(member.timeout_s, member.rank, store, abandon))
        _set_collective_timeout(member.timeout_s)
    # Before the first tensor is sent, look who is at the other ends.
    _raise_if_abandoned()
    sockets.refuse_other_users()
    if store is not None:
        everybody = range(member.world_size)
        sockets.refuse_strangers(store, "default", member.rank, everybody, _connect_timeout(member))
    prove(member.world_size, member.rank, member.device)
    _membership = member


def _meet(store: dist.Store, member: Membership) -> tuple[int, int, bool]:  # type: ignore[name-defined]
    """Wait until all ranks have joined this generation; DistStoreError if it is given up before that.

    This wait may take long, and `give_up` ends it. gloo's own wait for a peer's connection cannot be ended,
    so that it must not begin before all ranks are there. For the same reason a rank that waited here connects
    once all are there, even if the generation has been given up meanwhile: the others may be connecting
    already.

    Returns:
        (the number of the default group, the number of the next group, whether all ranks form the default
        group again in place). Meshes and DTensors look for a group by its number, so the default group keeps
        its number where every rank was a member of a group of the same size before.
    """
    keys = [f"nbgpu/here/{rank}" for rank in range(member.world_size)]
    former = None
    if _membership is not None:
        former = [_membership.world_size, _number, _next_number, _can_form_in_place()]
    store.set(keys[member.rank], json.dumps(former))
    store.wait(keys, member.timeout)
    formers = [json.loads(answer) for answer in store.multi_get(keys)]
    world_sizes, numbers, next_numbers, in_place = zip(
        *(former or (0, 0, 0, False) for former in formers), strict=True
    )
    next_number = max(next_numbers)
    if set(world_sizes) == {member.world_size}:
        return max(numbers), next_number, all(in_place)
    return next_number, next_number, False


def _can_form_in_place() -> bool:
    """Return whether the default group is the one that `form` made, and its backends can connect again as the
    same object."""
    return (
        os.environ.get(IN_PLACE_VARIABLE) != "0"
        and (_takes_nccl2_in_place() or not torch_private.uses_nccl2())
        and _formed is not None
        and _formed[0] is dist.group.WORLD
        and torch_private.can_reconfigure(dist.group.WORLD)
    )


def _takes_nccl2_in_place() -> bool:
    return os.environ.get(IN_PLACE_VARIABLE) == "1"


def _connects_afterwards() -> bool:
    """Return whether new groups are made without connections, and `_connect` connects them once the ranks
    have exchanged their addresses. Only an nccl2 group that was made so can be formed again in place after an
    abort."""
    return _takes_nccl2_in_place() and torch_private.uses_nccl2()


def _connect(
    group: Any,
    store: dist.Store,  # type: ignore[name-defined]
    name: str,
    ranks: Sequence[int],
    member: Membership,
) -> None:
    """Connect the ranks of a group whose backend can be reconfigured: a new one, or one whose connections
    were cut. A collective over these ranks, which exchange the backends' addresses in the store."""
    store.set(f"nbgpu/handle/{name}/{member.rank}", torch_private.reconfigure_handle(group))
    handles = store.multi_get([f"nbgpu/handle/{name}/{rank}" for rank in ranks])
    with sockets.noted_as_groups():
        torch_private.reconfigure(
            group, _generation, [handle.decode() for handle in handles], _connect_timeout(member)
        )


def _form_in_place(member: Membership, store: meeting.Store) -> None:
    """Form the default group again as the same object, so that nothing that holds it needs the new one."""
    global _formed
    assert _formed is not None, "`_can_form_in_place` has looked"
    (group, its_store), _formed = _formed, None  # a forming that fails is not tried a second time
    # torch keeps the first store object of a group; it has to use the keys of the new generation.
    its_store.follow(store)
    _connect(group, store, "default", range(member.world_size), member)
    _formed = group, its_store


def _end_group() -> None:
    """End the default group, if there is one, and all others with it."""
    if dist.is_initialized():  # unless the person's own code has ended it
        groups = torch_private.living_groups()
        dist.destroy_process_group()
        let_go(groups)


def make_own_groups_again(before: list[own_groups.OwnGroup]) -> list[tuple[Any, Any]]:
    """Make the person's own process groups again on the new default group (`own_groups.make_again`). A
    collective.

    Returns:
        For each group the object that has ended and its successor.
    """
    return own_groups.make_again(before, _generation, _connect_timeout(membership()))


def _connect_timeout(member: Membership) -> timedelta:
    """Return how long gloo may wait for the connections of ranks that have all arrived in the store.

    A rank may be freed, or die, while the others wait for its connection, and only this timeout ends their
    wait.
    """
    if not torch_private.can_change_timeout():
        return collective_timeout.gloo_timeout(member.timeout_s)
    connect_s = _CONNECT_TIMEOUT_S + _CONNECT_TIMEOUT_S_PER_RANK * member.world_size
    return min(member.timeout, timedelta(seconds=connect_s))


def _set_collective_timeout(timeout_s: float) -> None:
    """Give the default group the timeout of its collectives, once it is connected."""
    collective_timeout.allow(torch_private.group_name(dist.group.WORLD), timeout_s)
    if torch_private.can_change_timeout():
        torch_private.change_timeout(collective_timeout.gloo_timeout(timeout_s))


@contextmanager
def without_timeout() -> Iterator[None]:
    """Lift the timeout of collectives in this block, in which the ranks wait for one that works by itself.

    A rank that dies or raises still ends the wait of the others, which does not depend on the timeout. Where
    torch cannot change the timeout of a group, the timeout stays as it is.
    """
    if not (dist.is_initialized() and torch_private.can_change_timeout()):
        yield
        return
    _set_collective_timeout(_LONGEST_WAIT_S)
    try:
        yield
    finally:
        # After a failure the group may be gone.
        if dist.is_initialized():
            _set_collective_timeout(membership().timeout_s)


def prove(world_size: int, rank: int, device: torch.device) -> None:
    """Check that an all_reduce works: sum a pattern over the ranks, with a value for each element and rank.

    Between some GPUs peer-to-peer copies go to a wrong place, or nowhere, and report no error. The pattern
    has some MiB, so that it takes the same path as gradients.

    Raises:
        RuntimeError: an element of the sum is wrong.
    """
    num_elements = _PROOF_ELEMENTS if device.type == "cuda" else _PROOF_ELEMENTS_ON_CPU
    pattern = torch.arange(num_elements, dtype=torch.float32, device=device) % _PROOF_PERIOD
    total = pattern * (rank + 1)
    dist.all_reduce(total)
    # The sum of rank + 1 over all ranks is n (n + 1) / 2.
    num_wrong = int((total != pattern * (world_size * (world_size + 1) // 2)).sum())
    if num_wrong:
        raise RuntimeError(
            f"an all_reduce over {world_size} ranks gave {num_wrong} wrong sums of {num_elements}. nccl_safe=True keeps "
            "GPUs from copying directly to one another"
        )


def stay_on_loopback() -> None:
    """Keep gloo's and NCCL's sockets on the loopback interface, unless the person has named another or there
    is none."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def note_connections() -> None:
    """Wrap torch's function that makes a process group, to record the arguments and the TCP connections of
    every group from now on, those that a person makes included. With this record a group can be cut off,
    watched and made again."""

    def noting(make_group: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch's function that makes one process group."""

        def make_group_and_note(*args: Any, **kwargs: Any) -> Any:
            """Make a group, record it, and check its connections before any tensor is sent."""
            if not dist.is_initialized():  # the default group: `form` records and checks it
                with sockets.noted_as_groups():
                    made = make_group(*args, **kwargs)
                _note_number(inspect.signature(make_group).bind(*args, **kwargs).arguments)
                return made
            # A person's group, or torch's for a mesh: note how it is made, so that it can be made again.
            bound = inspect.signature(make_group).bind(*args, **kwargs)
            given = bound.arguments
            member, name = membership(), given["group_name"]
            ranks = given["global_ranks_in_group"] or range(member.world_size)
            timeout_s = _timeout_s(given.get("timeout"))
            own_groups.note({**given, "timeout": timedelta(seconds=timeout_s)})
            given["timeout"] = collective_timeout.gloo_timeout(timeout_s)
            if _store is not None and _connects_afterwards():
                given["enable_reconfigure"] = True
            with sockets.noted_as_groups():
                made = make_group(*bound.args, **bound.kwargs)
            # Before the ranks connect: if one does not come, the others keep a group of this number.
            _note_number(given)
            if _store is not None and member.rank in ranks and given.get("enable_reconfigure"):
                _connect(made[0], _store, str(name), ranks, member)
            collective_timeout.allow(name, timeout_s)
            _raise_if_abandoned()
            sockets.refuse_other_users()
            if _store is not None and member.rank in ranks:
                sockets.refuse_strangers(_store, name, member.rank, ranks, _connect_timeout(member))
            return made

        return make_group_and_note

    torch_private.wrap_making_of_groups(noting)


def _timeout_s(given: timedelta | None) -> float:
    """Return the timeout in seconds of a person's new group: the cluster's, unless the person has given one
    other than torch's defaults."""
    # torch fills in its default before this function is called, so a default counts as none given.
    if given is None or given in torch_private.default_timeouts():
        return membership().timeout_s
    return given.total_seconds()


def _note_number(arguments: Mapping[str, Any]) -> None:
    """Keep torch's count of process groups up to date, because torch names a group by this count, and the
    next generation continues from it.

    A group whose name torch made from its ranks is not counted.
    """
    global _number, _next_number
    if (name := str(arguments["group_name"])).isdecimal():
        _next_number = max(_next_number, int(name) + 1)
        if not arguments["global_ranks_in_group"]:
            _number = int(name)


def untouched_by_cell() -> bool:
    """Return whether no byte went through the process groups since the cell began, so that a failure has left
    them usable.

    NCCL moves its data past the TCP sockets, so that an NCCL group never counts as untouched.
    """
    return membership().backend == "gloo" and sockets.moved_bytes() == _bytes_before_cell


def _begin(generation: int, store: dist.Store | None) -> None:  # type: ignore[name-defined]
    """Enter a generation; DistBackendError if it was given up before this rank reached it.

    The lock makes this wait for a cut that is under way, which would otherwise hit the new connections.
    """
    global _generation, _store, _is_cut
    with _cutting:
        _refuse_ended_generation(generation)
        _generation, _store, _is_cut = generation, store, False


def give_up(generation: int) -> None:
    """Free this rank from any collective of this or an earlier generation. Call on a thread of its own.

    A rank that reaches this generation later does not begin to form it.
    """
    global _given_up
    with _cutting:
        _given_up = max(_given_up, generation)
        if _is_abandoned() and not _is_cut:
            _cut()


def _abandon_late_collective(generation: int, note: Callable[[], None]) -> None:
    """Free this rank from a collective that takes too long, unless it is cut off already; call `note` before
    that."""
    global _given_up
    with _cutting:
        if generation == _generation and not _is_cut:
            note()
            _given_up = max(_given_up, generation)
            _cut()


def _raise_if_abandoned() -> None:
    """Raise DistBackendError if the generation was given up while this rank made a group. The cut came before
    the group had its connections, so they are cut here."""
    with _cutting:
        if _is_abandoned():
            _cut()
            _refuse_ended_generation(_generation)


def _is_abandoned() -> bool:
    return 0 <= _generation <= _given_up


def _refuse_ended_generation(generation: int) -> None:
    """Raise DistBackendError if a generation was given up."""
    if generation <= _given_up:
        # The error that torch raises on a rank that was freed from a collective.
        raise dist.DistBackendError(
            "the process group was given up while it was made, because another rank failed"
        )


def _cut() -> None:
    """Free this rank from every wait for other ranks; afterwards no group of this generation can be used. The
    caller holds `_cutting`."""
    global _is_cut
    _is_cut = True
    collective_timeout.end()
    simulated_link.end()
    sockets.wait_for_group_in_the_making(_MAKING_PATIENCE_S)
    sockets.cut()
    if isinstance(_store, meeting.Store):
        # A rank that makes a group may wait in the store until the others have come, for up to half an hour.
        _store.give_up()
    # NCCL's connections are not among those that were cut; its groups have to be aborted.
    _abort_nccl(torch_private.living_groups())


def _abort_nccl(groups: Sequence[Any]) -> None:
    """Abort NCCL's part of groups; end this process if the abort does not return in time."""
    abort = threading.Thread(
        target=torch_private.abort_nccl, args=(groups,), name="nbgpu-abort-nccl", daemon=True
    )
    abort.start()
    abort.join(_ABORT_PATIENCE_S)
    if abort.is_alive():
        # The rank would be lost to the group, with its GPU. The client replaces it, and says why.
        _log.error("the rank's process %d ends: the abort of NCCL did not come back", os.getpid())
        os._exit(ABORT_HUNG)


def form_alone(member: Membership) -> None:
    """Form a group of torch's backend 'fake': it has this process's rank and the cluster's world size, no
    other process takes part in it, and every collective returns at once and does nothing."""
    global _alone
    _alone = member
    simulated_link.end()
    torch_private.init_fake_group(member.rank, member.world_size)


def prepare_cell() -> None:
    """Give the next cell a group, and begin to count its traffic. Call before each cell."""
    global _bytes_before_cell
    if _alone is not None and not dist.is_initialized():
        form_alone(_alone)  # an earlier run of this cell has ended it
    _bytes_before_cell = sockets.moved_bytes()


def form_again(member: Membership, store: dist.Store, generation: int) -> None:  # type: ignore[name-defined]
    """Form the group again, in place of the one that this process may have. A collective.

    The caller passes the groups that have ended, if it holds any, to `let_go`.
    """
    global _alone
    _alone = None
    with _cutting:
        if not _is_cut:
            # Nothing may wait in the old group for ever, such as a thread of the person's own.
            _cut()
    if not _can_form_in_place():
        _end_group()
    form(member, store, generation)


def let_go(groups: Iterable[Any]) -> None:
    """On a thread of its own, destroy groups that have ended, once no other code holds them. A group that has
    not ended is left alone.

    gloo does not notice that a send was cut in the middle, as happens when another rank's process was
    stopped: a thread of the group waits for the send until the timeout, and the group's destructor waits for
    that thread. The thread that drops the last reference to the group runs the destructor, and must not be
    the one that runs cells.
    """
    living = torch_private.living_groups()
    for group in groups:
        if group is not None and group not in living:
            _ended.put(group)
    _begin_releasing()


@functools.cache
def _begin_releasing() -> None:
    threading.Thread(target=_release, name="nbgpu-end-of-group", daemon=True).start()


def _release() -> None:
    """Drop each group once no other code holds it. One thread does this for all groups: of two threads that
    hold the same group each would wait for the other to drop it."""
    num_ours = 2  # the list's, and that of getrefcount's argument
    held: list[Any] = []
    while True:
        while not held or not _ended.empty():
            held.append(_ended.get())
        # By identity: a group that was put in twice would count as held by its own duplicate.
        held = list({id(group): group for group in held}.values())
        time.sleep(_RELEASE_EVERY_S)
        free = [held.pop(i) for i in reversed(range(len(held))) if sys.getrefcount(held[i]) <= num_ours]
        if free:
            # On another thread, because a destructor that waits must not delay the other groups.
            threading.Thread(target=free.clear, name="nbgpu-end-of-group", daemon=True).start()
