"""Recipes of one's own: what is read off their files, and what is said of files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbgpu import cli
from nbgpu.config import TRAIN_CONFIGS, flags, own_file, settings_of, train_config
from nbgpu.config.settings import control_fields
from nbgpu.errors import ConfigError

RECIPE = '''
"""A file."""
from typing import ClassVar, Literal

import a_module_that_is_not_there

class Net(a_module_that_is_not_there.OwnRecipe):
    """Trains a net.

    And more.
    """

    limit = [1, 2]
    kinds: ClassVar[list] = []
    hidden: int = 64  # width of the network
    kind: Literal["a", "b"] = "a"
    share: float | None = None
    negative: float = -1e-3
    lr: float = 0.5
    batch_size: int = 32

    def model(self): ...
'''


def written(folder: Path, text: str = RECIPE) -> str:
    (folder / "net.py").write_text(text)
    return str(folder / "net.py")


def test_settings_are_read_off_the_file_without_running_it(tmp_path: Path) -> None:
    recipe = written(tmp_path)
    config = train_config(recipe, hidden=8, kind="b", steps=3)
    assert config.model_dump().items() >= {
        "recipe": recipe,
        "hidden": 8,
        "kind": "b",
        "share": None,
        "negative": -1e-3,
        "lr": 0.5,
        "batch_size": 32,
        "steps": 3,
    }.items()  # fmt: skip
    assert config.title == "net"
    model = settings_of(recipe)
    assert model.__doc__ == "Trains a net."
    assert model.model_fields["hidden"].description == "width of the network"
    # nbgpu's own keep their bounds, and stand where they stood.
    with pytest.raises(
        ConfigError, match=r"batch_size = 0 is not valid. Give a value within: 1 to 4096 \(default 32\)"
    ):
        train_config(recipe, batch_size=0)
    shown = {name: group for group, name, _ in control_fields(model)}
    assert (shown["hidden"], shown["batch_size"]) == ("Recipe", "Run")
    with pytest.raises(ConfigError, match=r"kind = 'c' is not valid. Give a value within: 'a' or 'b'"):
        train_config(recipe, kind="c")
    with pytest.raises(
        ConfigError, match=r"cache_rate=0.5 means nothing in the recipe .*the dataset is the recipe's own"
    ):
        train_config(recipe, cache_rate=0.5)


def test_a_recipe_says_why_its_losses_are_not_comparable(tmp_path: Path) -> None:
    assert train_config(written(tmp_path)).why_losses_differ == ""
    own = RECIPE.replace("    limit =", '    why_losses_differ = "The loss has no dropout."\n    limit =')
    assert train_config(written(tmp_path, own)).why_losses_differ == "The loss has no dropout."
    annotated = own.replace("why_losses_differ =", "why_losses_differ: str =")
    assert train_config(written(tmp_path, annotated)).why_losses_differ == "The loss has no dropout."
    with pytest.raises(ConfigError, match=r"net.py:13: `why_losses_differ` must be a text that stands there"):
        train_config(written(tmp_path, own.replace('"The loss has no dropout."', "str(1)")))


def test_settings_are_flags(tmp_path: Path) -> None:
    read = flags.parse(
        [settings_of(written(tmp_path))], ["--hidden", "3", "--share", "0.5"], "nbgpu train net.py"
    )
    assert (read["hidden"], read["share"], read["kind"]) == (3, 0.5, "a")


def test_all_that_is_no_setting_is_told_with_its_line(tmp_path: Path) -> None:
    text = RECIPE.replace("negative: float = -1e-3", "negative: dict = {}").replace(
        "hidden: int = 64", "hidden: int"
    )
    with pytest.raises(ConfigError) as caught:
        train_config(written(tmp_path, text))
    told = str(caught.value).splitlines()
    assert len(told) == 2
    assert "net.py:15: `hidden: int` has no value" in told[0]
    assert (
        "net.py:18: `negative: dict = {}` is not a setting. A setting is an int, float, str, bool or Literal"
        in told[1]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "must have one class of OwnRecipe .*; found: none"),
        (RECIPE + "\nclass Other(OwnRecipe): ...", "found: Net, Other"),
        ("class Net(OwnRecipe)\n", "cannot be read: .*expected ':'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_config(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        train_config(str(tmp_path / "nowhere.py"))
    with pytest.raises(ConfigError, match=r"Recipes: autoencoder.*, or a file of your own: my_recipe.py"):
        train_config("nowhere")


def test_a_new_recipe_is_short_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = own_file.create(str(tmp_path / "my_first"))
    lines = path.read_text().splitlines()
    assert len(lines) < 40
    assert own_file.read(path).class_name == "MyFirst"
    assert train_config(str(path)).title == "my_first"
    with pytest.raises(ConfigError, match=r"my_first.py was not written: File exists"):
        own_file.create(str(tmp_path / "my_first.py"))
    for name in ("my-recipe", "class", "random", "3d"):
        with pytest.raises(ConfigError, match="cannot be the name of a recipe"):
            own_file.create(str(tmp_path / name))


def test_the_command_line_lists_all_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes"])
    told = capsys.readouterr().out
    assert all(name in told for name in (*TRAIN_CONFIGS, "my_recipe.py"))
    assert all(model.INPUTS and model.TRIAL for model in TRAIN_CONFIGS.values())
