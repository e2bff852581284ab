"""Notes below fields of the control panel: the global batch, the length of the run, and whether the data fit
into memory."""

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

_DATA_SETTINGS = (
    *("data", "split", "split_seed", "val_fraction", "test_fraction", "fold", "features", "patient_pattern"),
    *("patch_size", "spacing", "image_channels", "image_size", "size"),
    *("num_phantoms", "num_patients", "num_masks"),
)
"""The settings on which the size of the decoded data depends."""


def global_batch(config: TrainConfig, num_ranks: int) -> str:
    """The number of samples in an optimizer step, as the product of its factors.

    Args:
        config: the settings of a run on these ranks, with a `batch_size` for each rank.
        num_ranks: the number of ranks.
    """
    if "batch_size" in config.UNUSED:
        return ""
    factors = [str(config.batch_size), count_of_ranks(num_ranks)]
    if config.accumulate > 1:
        factors.append(f"accumulate {config.accumulate}")
    note = f"global batch {config.samples_per_step(num_ranks)} = {' x '.join(factors)}"
    if config.smoke_test:
        return f"{note} (smoke test)"
    if config.global_batch_size is not None:
        return f"{note} (global_batch_size={config.global_batch_size} decides)"
    return note


def length_notes(config: TrainConfig, data: DecodedData | None, num_ranks: int) -> tuple[str, str]:
    """Return (the note below the field of steps, the note below that of epochs); '' for no note. The length
    of a run is given in one of the two, and the other one is derived from it.

    Args:
        config: the settings of a run on these ranks.
        data: the training data; None if their size is not known.
        num_ranks: the number of ranks.
    """
    if config.smoke_test:
        return f"{config.steps} steps, from Smoke test", ""
    if data is None or not data.num_volumes:
        return "follows from Epochs" if config.epochs is not None else "", ""
    per_epoch = epoch_of(config, DataAmount(data.num_volumes, config.samples_per_volume), num_ranks).num_steps
    # An estimate has a basis, and an exact number has none.
    about = "about " if data.basis else ""
    if config.epochs is not None:
        return f"{about}{config.epochs * per_epoch}, from Epochs", ""
    return "", f"{about}{epochs_in_words(config.steps / per_epoch)}, from Steps"


class MemoryNote:
    """Shows below a field whether the data fit into the host's memory, and passes their size on to the notes
    on the length of the run.

    Files are read on a thread, which answers only the newest request.

    Args:
        field: the field of `cache_rate`.
        show_length: called with the settings, the data or None, and the number of ranks.
    """

    def __init__(
        self, field: Field, show_length: Callable[[TrainConfig, DecodedData | None, int], None]
    ) -> None:
        """Make a note that is empty until the first call of `say`."""
        self._field = field
        self._show_length = show_length
        self._lock = threading.Lock()
        self._cache: dict[Any, DecodedData | str] = {}
        """By key (`_key`): the sizes of the data, or the reason why they are not known."""
        self._request: tuple[Any, TrainConfig, int, int | None] | None = None
        """The newest request: the key, the settings, the number of ranks, and the limit of their memory in
        bytes."""
        self._reader: threading.Thread | None = None
        """The thread that reads files; None while there is none."""

    def say(self, config: TrainConfig, num_ranks: int, limit_bytes: int | None) -> None:
        """Show the note for a run with these settings: at once if the size of the data follows from them,
        else once a thread has read the files.

        Args:
            config: the settings.
            num_ranks: the number of ranks, all on this host.
            limit_bytes: the most memory that the ranks may take together; None for all that is free.
        """
        key = _key(config)
        with self._lock:
            self._request = key, config, num_ranks, limit_bytes
            if key not in self._cache and config.data in config.WITHOUT_FILES:
                self._cache[key] = _read_sizes(config)
            if key in self._cache:
                self._show()
                return
            self._write("fits in memory? Looking at the files …")
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_files, name="nbgpu-cache-note", daemon=True)
                self._reader.start()

    def is_about(self, names: Set[str]) -> bool:
        """Whether the note depends on one of these settings."""
        return not names.isdisjoint({*_DATA_SETTINGS, self._field.name})

    def clear(self) -> None:
        """Remove the note, because the settings are not valid."""
        with self._lock:
            self._request = None
            self._write("")

    def wait(self) -> None:
        """Wait until the thread has answered the newest request."""
        reader = self._reader
        if reader is not None:
            reader.join()

    def _read_files(self) -> None:
        """Read the files of the newest request, until the newest request has an answer. This is the thread's
        function."""
        while True:
            with self._lock:
                if self._request is None or self._request[0] in self._cache:
                    self._reader = None
                    return
                key, config, *_ = self._request
            sizes = _read_sizes(config)
            with self._lock:
                self._cache[key] = sizes
                if self._request is not None and self._request[0] == key:
                    self._show()

    def _show(self) -> None:
        """Show the answer to the newest request; `_lock` is held."""
        assert self._request is not None
        key, config, num_ranks, limit_bytes = self._request
        data = self._cache[key]
        self._show_length(config, None if isinstance(data, str) else data, num_ranks)
        if isinstance(data, str):
            self._write(f"whether it fits in memory is not known: {data}")
            return
        host = workers.this_host(num_ranks)
        fit = memory_fit(config, data, host, cgroups.free_memory_bytes(), limit_bytes)
        self._write(fit.words, warns=not fit.fits)

    def _write(self, note: str, warns: bool = False) -> None:
        with self._field.hold_sync():
            self._field.note, self._field.warns = note, warns


def _key(config: TrainConfig) -> Any:
    """Return all that the sizes of the data depend on: settings, and the modification time of the file or
    folder."""
    changed_ns = 0
    if config.data not in config.WITHOUT_FILES:
        with suppress(OSError):  # `_read_sizes` reports a missing folder
            changed_ns = Path(config.data).expanduser().stat().st_mtime_ns
    return (config.recipe, changed_ns, *(getattr(config, name, None) for name in _DATA_SETTINGS))


def _read_sizes(config: TrainConfig) -> DecodedData | str:
    """Read the files, and return the sizes of the data, or the reason why they are not known."""
    try:
        return decoded_data(config)
    except UnknownError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - on a thread nobody would see it
        return f"{type(error).__name__}: {error}"
