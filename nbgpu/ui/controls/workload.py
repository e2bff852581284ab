"""The lists from which a person chooses a recipe and one of its presets."""

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
        recipe, preset: the first choice.
        on_choice: called with the recipe and the preset ('' for none) after another choice. It raises
            ConfigError for a recipe that cannot be used.
    """

    def __init__(self, recipe: str, preset: str, on_choice: Callable[[str, str], None]) -> None:
        """Make both lists, with the present recipe and preset chosen."""
        self._on_choice = on_choice
        self._shown = recipe, preset
        """The recipe and the preset whose settings the panel shows."""
        self._is_program_writing = False
        """Whether the program writes into the lists, so that a changed value is not a person's choice."""
        self.recipe = Choice("Recipe", _recipes(recipe), recipe)
        self.preset = Choice("Preset", _presets(recipe), preset)
        self.fields = (self.recipe, self.preset)
        self._describe()
        self.recipe.observe(self._on_value, "value")
        self.preset.observe(self._on_value, "value")

    def _on_value(self, _: Any) -> None:
        """Pass a new choice on; a preset that the new recipe does not have is dropped. If the recipe cannot
        be used, the choice stays with a message, and the panel goes on showing the settings of the last
        recipe."""
        if self._is_program_writing:
            return
        recipe, preset = self.recipe.value, self.preset.value
        if recipe != self._shown[0] and preset not in presets.names(recipe):
            preset = ""
        self.recipe.problem = ""
        try:
            self._on_choice(recipe, preset)
        except ConfigError as error:
            # The list keeps the wrong choice, as a field keeps a wrong text.
            self.recipe.problem = f"{error}. The settings below are those of {self._shown[0]}"
            return
        self._shown = recipe, preset
        self._is_program_writing = True
        try:
            # The folder may have other files with recipes by now.
            self.recipe.offer(_recipes(recipe))
            self.preset.offer(_presets(recipe))
            self.recipe.show(recipe)
            self.preset.show(preset)
        finally:
            self._is_program_writing = False
        self._describe()

    def _describe(self) -> None:
        """Show the summary of the recipe, and the description and the source of the preset."""
        recipe, name = self._shown
        self.recipe.meaning = f"What is trained: {flags.summary(settings_of(recipe))}"
        self.preset.meaning = "Values that take the place of defaults, such as those of a guide"
        self.preset.note = ""
        if name:
            preset = presets.read(recipe, name)
            self.preset.note = f"{preset.description} ({preset.source})"
        self.preset.layout.display = "" if len(self.preset.choices) > 1 else "none"


def _recipes(recipe: str) -> dict[str, str]:
    """Return the names of nbgpu's recipes, of those in files of this folder, and of the present one."""
    return {name: name for name in [*TRAIN_CONFIGS, *own_file.in_folder(Path()), recipe]}


def _presets(recipe: str) -> dict[str, str]:
    return {"": _NO_PRESET, **{name: name for name in presets.names(recipe)}}
