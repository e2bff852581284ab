"""The environment variables that torchrun sets for each process, set for a rank.

accelerate, Lightning, transformers and many scripts learn from these variables that they run in a group, and
use the group that exists. Without the variables such a library takes each rank for a single process, and
trains alone on every rank without a warning.

The variables are in `os.environ` and not in the environment that child processes inherit. A program that a
cell starts (`!python script.py`, `subprocess.run`, a process that multiprocessing spawns) is no rank: with
the variables it would wait for as many processes as there are ranks. `os.unsetenv` makes this difference: it
is documented to leave `os.environ` as it is. A hook on `subprocess.Popen` would miss `os.execv`,
`os.system` and multiprocessing, which read the C environment. A child that gets `env=os.environ` has the
variables, as it has below torchrun.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from typing import Any

from nbgpu.engine.group.meeting import Store
from nbgpu.engine.process.rank_spec import RankSpec
from nbgpu.machine import interfaces

_STORE_KEY = "nbgpu/master"
_set_here: dict[str, str] = {}
"""The variables that this module has set, with their values."""

_names_in_c: list[bytes] = []
"""Their names, as C has them."""

# The environment that children inherit is C's, which Python can write and not read.
_getenv = ctypes.PyDLL(None).getenv
_getenv.restype = ctypes.c_char_p
_getenv.argtypes = [ctypes.c_char_p]


def install(shell: Any) -> None:
    """Keep the variables out of the environment of this rank's child processes, even if other code sets them
    again.

    accelerate assigns the values that it has read to `os.environ`, and `unittest.mock.patch.dict` restores
    them by assignment: both put them into the environment of children. So they are taken out again before
    each cell, and before each fork, with which `!` starts its commands.
    """
    shell.events.register("pre_run_cell", lambda _: hide_from_children())
    os.register_at_fork(before=hide_from_children)


def set_from_spec(spec: RankSpec) -> None:
    """Set the variables that follow from a rank's spec, before the first group and after each change of the
    number of ranks."""
    _set(
        {
            "RANK": str(spec.rank),
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_RANK": str(spec.local_rank),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(spec.host_number),
            "GROUP_WORLD_SIZE": str(spec.num_hosts),
            "ROLE_RANK": str(spec.rank),
            "ROLE_WORLD_SIZE": str(spec.world_size),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # torchrun's value for a run without an identity. A name would be taken for that of a job.
            "TORCHELASTIC_RUN_ID": "none",
            # Nobody listens at MASTER_PORT: rank 0 opens a store there for whoever asks for one.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    )
    if spec.device == "cpu":
        # As `accelerate launch --cpu` does. Otherwise accelerate is distributed on GPUs only.
        _set({"ACCELERATE_USE_CPU": "true"})


def publish_master(spec: RankSpec, store: Store) -> None:
    """Write into the store the address and a free port of rank 0's host, where a store that the person's code
    makes may listen. Call before the group is formed; only rank 0 writes."""
    if spec.rank:
        return
    address = interfaces.address_of(spec.interface)[1] if spec.interface else interfaces.LOOPBACK
    store.set(_STORE_KEY, json.dumps([address, _free_port(address)]))


def set_master(store: Store) -> None:
    """Set MASTER_ADDR and MASTER_PORT to the values that rank 0 has written. Call after the group was
    formed."""
    address, port = json.loads(store.get(_STORE_KEY))
    _set({"MASTER_ADDR": address, "MASTER_PORT": str(port)})


def hide_from_children() -> None:
    """Take the variables out of the environment that child processes inherit, unless the person has changed
    one of them: a person who does that is preparing the environment of a child."""
    # Asking C first takes a quarter of the time of the comparison, before every cell.
    if any(map(_getenv, _names_in_c)) and _set_here.items() <= os.environ.items():
        for name in _set_here:
            os.unsetenv(name)


def _set(variables: dict[str, str]) -> None:
    """Set variables, except those that the person has changed since they were set here."""
    for name, value in variables.items():
        if name in _set_here and os.environ.get(name) != _set_here[name]:
            continue
        os.environ[name] = _set_here[name] = value
        os.unsetenv(name)
    _names_in_c[:] = map(os.fsencode, _set_here)


def _free_port(address: str) -> int:
    """Return a TCP port that no process uses now on this address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
