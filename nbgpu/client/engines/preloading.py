"""Launches the fork server and the controller of the next cluster before anybody starts it.

Most of the time of a start goes into importing torch. When the notebook's extension is loaded, or while
`nbgpu train` checks the data, the two processes begin to import in the background. A start uses them only if
it would launch the same processes itself: with the same variables, folder, limits and installed packages.
Otherwise they end, and the start launches its own. The preloaded processes touch no GPU, and end with this
process, however it ends, or after ten minutes if no start has used them.
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
"""Environment variable: 0 turns preloading off."""

_UNUSED_S = 600.0

_log = logging.getLogger("nbgpu.cluster")
_lock = threading.Lock()
_preloading: _Preloading | None = None


@dataclass
class _Preloading:
    """The preloaded processes, and the threads that launch them and end them unused."""

    expiry: threading.Timer
    thread: threading.Thread = field(init=False)
    """Launches the processes, in the background because the driver may take a while to list the GPUs."""
    surroundings: tuple[object, ...] = ()
    """The variables, folder, limits and packages with which they were launched."""
    launched: launch.Launched | None = None
    """None until they are launched, or if that fails."""


def begin(choose: Callable[[ClusterConfig], Sequence[Device]], config: ClusterConfig | None = None) -> None:
    """Launch the processes of a cluster in the background, and return at once. This never raises.

    Nothing happens if preloading is turned off or was begun already, or if the ranks will be on other hosts.

    Args:
        choose: returns the devices that a cluster with these settings would get now.
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
    """Preload for a cluster that may be started inside the context; end the processes if no start has used
    them."""
    begin(choose, config)
    try:
        yield
    finally:
        dismiss()


def take(engines_environment: Mapping[str, str]) -> launch.Launched | None:
    """Return the preloaded processes to the start that will own them; None if there are none that it can use.

    It can use them if a launch now would have the same variables, folder, limits and packages. Otherwise they
    are ended.

    Args:
        engines_environment: the variables that the engines get in addition to this process's own.
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
    """Launch the processes. This runs in a thread and imports no module, because the main thread is importing
    and the two would wait for each other's import locks."""
    try:
        config = config or ClusterConfig.checked()
        if not config.is_local:
            return  # there are no ranks here
        config, _ = enough_ranks.placed(config)
        variables = environment.engine_variables(config, choose(config))
        preloading.surroundings = launch.surroundings(variables)
        preloading.launched = launch.launch(launch.new_folder(), variables)
    except NoFreeGpuError:
        return  # the start will say who has the GPUs
    except Exception as error:  # noqa: BLE001 - the start raises what is still wrong then
        _log.warning("nothing is preloaded: %s", error)


def _release() -> _Preloading | None:
    """Wait for the launch, and give up its ownership: the caller uses the processes or ends them."""
    global _preloading
    with _lock:
        preloading, _preloading = _preloading, None
    if preloading is not None:
        preloading.expiry.cancel()
        preloading.thread.join()
        atexit.unregister(dismiss)
    return preloading


def _end(launched: launch.Launched) -> None:
    """End preloaded processes. A failure is only logged, because nobody has asked for them."""
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
