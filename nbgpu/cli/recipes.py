"""The commands `nbgpu recipes` and `nbgpu new`."""

from __future__ import annotations

from rich.table import Table

from nbgpu.cli.catalogue import UsageError
from nbgpu.config import TRAIN_CONFIGS, flags, own_file, presets
from nbgpu.text.console import CommandConsole


def new(arguments: list[str]) -> None:
    """Write a new recipe file from a template, and print how to train it."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError("usage: nbgpu new NAME, such as my_recipe: writes my_recipe.py into this folder")
    path = own_file.create(arguments[0])
    print(f"{path}: trains a small network on generated points. Try it:\n    nbgpu train {path}")


def recipes(arguments: list[str]) -> None:
    """List the recipes and their presets."""
    if arguments:
        raise UsageError("usage: nbgpu recipes")
    table = Table("recipe", "what it trains", "what it takes as --data", "without --data")
    for name, model in TRAIN_CONFIGS.items():
        table.add_row(name, flags.summary(model), model.INPUTS, model.TRIAL)
    table.add_row("my_recipe.py", "your own dataset, model and loss: nbgpu new my_recipe", "", "")
    preset_table = Table("recipe", "--preset", "what it sets", "where its numbers come from")
    for preset in (presets.read(recipe, name) for recipe in TRAIN_CONFIGS for name in presets.names(recipe)):
        preset_table.add_row(preset.recipe, preset.name, preset.description, preset.source)
    console = CommandConsole()
    console.print(table)
    console.print(preset_table)
    console.print("nbgpu train RECIPE --help lists a recipe's settings", highlight=False)
