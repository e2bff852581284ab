"""Notes on consequences of the settings at the top of the control panel: the global batch, and the memory of
the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.machine import cgroups
from nbgpu.planning import workers
from nbgpu.planning.decoded_data import DecodedData, UnknownError, decoded_data, memory_fit
from nbgpu.planning.epochs import DataAmount, epoch_of, epochs_in_words
from nbgpu.text.ranks import count_of_ranks
from nbgpu.ui.controls.fields import Field

_DECIDE = (
    *("data", "split", "split_seed", "val_fraction", "test_fraction", "fold", "features", "patient_pattern"),
    *("patch_size", "spacing", "image_channels", "image_size", "size"),
    *("num_phantoms", "num_patients", "num_masks"),
)
"""The settings on which the size of the decoded data depends."""


def global_batch(config: TrainConfig, num_ranks: int) -> str:
    """The samples of an optimizer step, and how they come about.

    Args:
        config: the settings as a run on these ranks takes them, with `batch_size` worked out.
        num_ranks: the number of ranks.
    """
    if "batch_size" in config.UNUSED:
        return ""
    factors = [str(config.batch_size), count_of_ranks(num_ranks)]
    if config.accumulate > 1:
        factors.append(f"accumulate {config.accumulate}")
    words = f"global batch {config.samples_per_step(num_ranks)} = {' x '.join(factors)}"
    if config.smoke_test:
        return f"{words} (smoke test)"
    if config.global_batch_size is not None:
        return f"{words} (global_batch_size={config.global_batch_size} decides)"
    return words


def length_notes(config: TrainConfig, data: DecodedData | None, num_ranks: int) -> tuple[str, str]:
    """Return (the note below the field of steps, the note below that of epochs): the one that was not given
    follows from the other; '' for no note.

    Args:
        config: the settings as a run on these ranks takes them.
        data: the training data; None where nothing is known of them.
        num_ranks: the number of ranks.
    """
    if config.smoke_test:
        return f"{config.steps} steps, from Smoke test", ""
    per_epoch, about = 0, ""
    if data is not None:
        amount = DataAmount(data.num_volumes, config.samples_per_volume)
        per_epoch = epoch_of(config, amount, num_ranks).num_steps
        # The basis is what an estimate was made from; it is empty for exact numbers.
        about = "about " if data.basis else ""
    if config.epochs is not None:
        return (
            f"{about}{config.epochs * per_epoch}, from Epochs" if per_epoch else "follows from Epochs"
        ), ""
    return "", (f"{about}{epochs_in_words(config.steps / per_epoch)}, from Steps" if per_epoch else "")


class MemoryNote:
    """Shows below a field whether the data fit into the host's memory, and below the fields of steps and
    epochs how long the run is.

    Files are read on a thread, one folder after another, and only if the newest request is not answered yet.

    Args:
        field: the field of `cache_rate`.
        say_length: called with the settings, the data or None, and the number of ranks.
    """

    def __init__(
        self, field: Field, say_length: Callable[[TrainConfig, DecodedData | None, int], None]
    ) -> None:
        """Make a note that is empty until the first call of `say`."""
        self._field = field
        self._say_length = say_length
        self._lock = threading.Lock()
        self._known: dict[Any, DecodedData | str] = {}
        """By key (`_key`): the sizes of the data, or why they are not known."""
        self._asked: tuple[Any, TrainConfig, int, int | None] | None = None
        """The newest request: the key, the settings, the number of ranks, and the limit of their memory in
        bytes."""
        self._looking: threading.Thread | None = None
        """The thread that reads files; None while there is none."""

    def say(self, config: TrainConfig, num_ranks: int, limit_bytes: int | None) -> None:
        """Show the note for a run with these settings: at once if the settings alone determine the data, else
        once a thread has read the files.

        Args:
            config: the settings.
            num_ranks: the number of ranks, all of this host.
            limit_bytes: the most memory that they may take together; None for what is free.
        """
        key = _key(config)
        with self._lock:
            self._asked = key, config, num_ranks, limit_bytes
            if key not in self._known and config.data in config.WITHOUT_FILES:
                self._known[key] = _look(config)
            if key in self._known:
                self._show()
                return
            self._write("fits in memory? Looking at the files …")
            if self._looking is None:
                self._looking = threading.Thread(target=self._look, name="nbgpu-cache-note", daemon=True)
                self._looking.start()

    def is_about(self, names: Set[str]) -> bool:
        """Whether the note depends on one of these settings."""
        return not names.isdisjoint({*_DECIDE, self._field.name})

    def clear(self) -> None:
        """Remove the note, because the settings are not valid."""
        with self._lock:
            self._asked = None
            self._write("")

    def wait(self) -> None:
        """Wait until the thread has answered the newest request."""
        looking = self._looking
        if looking is not None:
            looking.join()

    def _look(self) -> None:
        """Read the files of the newest request until no request is left without an answer; runs on the
        thread."""
        while True:
            with self._lock:
                if self._asked is None or self._asked[0] in self._known:
                    self._looking = None
                    return
                key, config, *_ = self._asked
            found = _look(config)
            with self._lock:
                self._known[key] = found
                if self._asked is not None and self._asked[0] == key:
                    self._show()

    def _show(self) -> None:
        """Show the answer to the newest request; `_lock` is held."""
        assert self._asked is not None
        key, config, num_ranks, limit_bytes = self._asked
        data = self._known[key]
        self._say_length(config, None if isinstance(data, str) else data, num_ranks)
        if isinstance(data, str):
            self._write(f"whether it fits in memory is not known: {data}")
            return
        host = workers.this_host(num_ranks)
        fit = memory_fit(config, data, host, cgroups.free_memory_bytes(), limit_bytes)
        self._write(fit.words, warns=not fit.fits)

    def _write(self, words: str, warns: bool = False) -> None:
        with self._field.hold_sync():
            self._field.note, self._field.warns = words, warns


def _key(config: TrainConfig) -> Any:
    """Return the values that the sizes of the data depend on, and the time at which the file or folder
    changed."""
    path = Path(config.data).expanduser()
    changed_ns = 0
    if config.data not in config.WITHOUT_FILES:
        with suppress(OSError):  # that it is not there is said when it is looked at
            changed_ns = path.stat().st_mtime_ns
    return (config.recipe, changed_ns, *(getattr(config, name, None) for name in _DECIDE))


def _look(config: TrainConfig) -> DecodedData | str:
    """Read the files, and return the sizes of the data, or why they are not known."""
    try:
        return decoded_data(config)
    except UnknownError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - on a thread nobody would see it
        return f"{type(error).__name__}: {error}"
