"""The lists with which a person chooses a recipe and one of its presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbgpu.config import TRAIN_CONFIGS, flags, own_file, presets, settings_of
from nbgpu.errors import ConfigError
from nbgpu.ui.controls.fields import Choice

_NO_PRESET = "none"


class WorkloadChoice:
    """The choice of a recipe and of a preset.

    Args:
        recipe, preset: what is chosen at first.
        on_choice: called with the recipe and the preset ('' for none) when another one was chosen. Raises
            ConfigError where that cannot be used.
    """

    def __init__(self, recipe: str, preset: str, on_choice: Callable[[str, str], None]) -> None:
        """Make both lists, with the present recipe and preset chosen."""
        self._on_choice = on_choice
        self._present = recipe, preset
        self._showing = False
        self.recipe = Choice("Recipe", _recipes(recipe), recipe)
        self.preset = Choice("Preset", _presets(recipe), preset)
        self.fields = (self.recipe, self.preset)
        self._explain()
        self.recipe.observe(self._choose, "value")
        self.preset.observe(self._choose, "value")

    def _choose(self, _: Any) -> None:
        """Pass a new choice on; a preset that the new recipe does not have is dropped. If the recipe cannot
        be used, the choice stays with a message, and the settings stay those of the recipe before."""
        if self._showing:
            return
        recipe, preset = self.recipe.value, self.preset.value
        if recipe != self._present[0] and preset not in presets.names(recipe):
            preset = ""
        self.recipe.problem = ""
        try:
            self._on_choice(recipe, preset)
        except ConfigError as error:
            # What is chosen stays, as what is typed wrongly does; the form below is the last one's.
            self.recipe.problem = f"{error}. The settings below are those of {self._present[0]}"
            return
        self._present = recipe, preset
        self._showing = True
        try:
            # Files may have been written since.
            self.recipe.offer(_recipes(recipe))
            self.preset.offer(_presets(recipe))
            self.recipe.show(recipe)
            self.preset.show(preset)
        finally:
            self._showing = False
        self._explain()

    def _explain(self) -> None:
        """Show the summary of the recipe, and the description and the source of the preset."""
        recipe, preset = self._present
        self.recipe.meaning = f"What is trained: {flags.summary(settings_of(recipe))}"
        self.preset.meaning = "Values that take the place of defaults, such as those of a guide"
        self.preset.note = ""
        if preset:
            found = presets.read(recipe, preset)
            self.preset.note = f"{found.description} ({found.source})"
        self.preset.layout.display = "" if len(self.preset.choices) > 1 else "none"


def _recipes(recipe: str) -> dict[str, str]:
    """Return the recipes of nbgpu and those in files of this folder, with the present one, by their names."""
    return {name: name for name in [*TRAIN_CONFIGS, *own_file.in_folder(Path()), recipe]}


def _presets(recipe: str) -> dict[str, str]:
    return {"": _NO_PRESET, **{name: name for name in presets.names(recipe)}}
