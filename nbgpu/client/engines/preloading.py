"""Processes for the next cluster that are launched before anybody starts it.

Most of the time of a start goes into importing torch. When the notebook's extension is loaded, or while
`nbgpu train` checks the data, the fork server and the controller begin to import in the background, and the
start finds them ready. A start takes them only if it would launch the same processes itself: with the same
variables, folder, limits and installed packages. Otherwise they end, and the start launches its own. They
touch no GPU, and end with this process, however it ends, or unused after ten minutes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nbgpu.client.engines import environment
from nbgpu.config import ClusterConfig
from nbgpu.errors import NbgpuError, NoFreeGpuError
from nbgpu.host import enough_ranks, launch
from nbgpu.protocol.records import Device

VARIABLE = "NBGPU_PRELOAD"
"""Environment variable: 0 turns it off."""

_UNUSED_S = 600.0

_log = logging.getLogger("nbgpu.cluster")
_lock = threading.Lock()
_preloading: _Preloading | None = None


@dataclass
class _Preloading:
    expiry: threading.Timer
    thread: threading.Thread = field(init=False)
    """Launches the processes, because the driver may take a while to list the GPUs."""
    surroundings: tuple[object, ...] = ()
    launched: launch.Launched | None = None


def begin(choose: Callable[[ClusterConfig], Sequence[Device]], config: ClusterConfig | None = None) -> None:
    """Launch the processes of a cluster in the background, and return at once.

    Does nothing where preloading is turned off or was begun already, or where the ranks will be on other
    hosts, and never fails.

    Args:
        choose: finds the devices that a cluster with these settings would get.
        config: the settings of the cluster; None for the defaults.
    """
    global _preloading
    if os.environ.get(VARIABLE) == "0" or (config is not None and not config.is_local):
        return
    with _lock:
        if _preloading is not None:
            return
        expiry = threading.Timer(_UNUSED_S, dismiss)
        expiry.daemon = True
        _preloading = _Preloading(expiry)
        _preloading.thread = threading.Thread(
            target=_launch, args=(_preloading, choose, config), name="nbgpu-preload", daemon=True
        )
        _preloading.thread.start()
        expiry.start()
    atexit.register(dismiss)


@contextmanager
def begun(choose: Callable[[ClusterConfig], Sequence[Device]], config: ClusterConfig) -> Iterator[None]:
    """Launch the processes of a cluster that is started inside the context, and end them if it is not."""
    begin(choose, config)
    try:
        yield
    finally:
        dismiss()


def take(engines_environment: Mapping[str, str]) -> launch.Launched | None:
    """Hand over the preloaded processes; None if there are none, or if they no longer match.

    They match if a launch at this moment would give the same variables, folder, limits and packages.
    Processes that do not match are ended.

    Args:
        engines_environment: the variables of the engines beside this process's own.
    """
    preloading = _release()
    if preloading is None or preloading.launched is None:
        return None
    if preloading.launched.are_alive() and preloading.surroundings == launch.surroundings(
        engines_environment
    ):
        return preloading.launched
    _end(preloading.launched)
    return None


def dismiss() -> None:
    """End the preloaded processes, if there are any."""
    preloading = _release()
    if preloading is not None and preloading.launched is not None:
        _end(preloading.launched)


def _launch(
    preloading: _Preloading,
    choose: Callable[[ClusterConfig], Sequence[Device]],
    config: ClusterConfig | None,
) -> None:
    """Launch the processes in a thread that imports nothing, because the main thread imports meanwhile."""
    try:
        config = config or ClusterConfig.checked()
        if not config.is_local:
            return  # there are no ranks here
        config, _ = enough_ranks.placed(config)
        wanted = environment.engine_variables(config, choose(config))
        preloading.surroundings = launch.surroundings(wanted)
        preloading.launched = launch.launch(launch.new_folder(), wanted)
    except NoFreeGpuError:
        return  # the start says who has them
    except Exception as error:  # noqa: BLE001 - the start raises what is still wrong then
        _log.warning("nothing is preloaded: %s", error)


def _release() -> _Preloading | None:
    global _preloading
    with _lock:
        preloading, _preloading = _preloading, None
    if preloading is not None:
        preloading.expiry.cancel()
        preloading.thread.join()
        atexit.unregister(dismiss)
    return preloading


def _end(launched: launch.Launched) -> None:
    try:
        launched.end()
    except NbgpuError as error:
        _log.warning("what was preloaded does not end: %s", error)


def _forget() -> None:
    """Forget the preloaded processes in a forked child: they belong to its parent."""
    global _preloading, _lock
    _preloading = None
    _lock = threading.Lock()  # another thread of the parent may have held it
    atexit.unregister(dismiss)


os.register_at_fork(after_in_child=_forget)
