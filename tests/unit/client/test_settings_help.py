"""What Tab and Shift-Tab say in calls that take settings by name, and what editors are told of them."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jedi
import pytest
from conftest import REPOSITORY

import nbgpu
from nbgpu.client.notebook import settings_help
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, signatures, train_config
from nbgpu.config.settings import unused
from nbgpu.planning.studies import StudyConfig
from nbgpu.planning.trials import SweepConfig

VARIABLES: dict[str, Any] = {
    "nbgpu": nbgpu,
    "cluster": nbgpu.Cluster(gpus="none"),
    "sweep": nbgpu.sweep,
    "train": print,
    "other": print,
}


def offered(text: str) -> list[str]:
    return settings_help.completed(text, VARIABLES)[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('cluster.train("au', ["autoencoder"]),
        ("cluster.train(", [f'"{name}"' for name in TRAIN_CONFIGS]),
        ('cluster.train("autoencoder", ba', ["batch_size="]),
        ('cluster.train(\n    "autoencoder",\n    latent', ["latent_channels="]),
        ('run = cluster.plan("survival", resn', ["resnet="]),
        ('cluster.find_batch_size("autoencoder", pre', ["preset=", "pretrained=", "prefetch="]),
        ('cluster.train("autoencoder", amp="', ["off", "auto", "bf16", "fp16"]),
        ("cluster.train('autoencoder', amp='b", ["bf16"]),
        ('cluster.train("autoencoder", preset="d', ["demo"]),
        ('cluster.train("autoencoder", batch_size=4, batch_s', []),
        ('nbgpu.sweep("autoencoder", lr=[1e-4, 1e-3], par', ["parallel="]),
        ('sweep("autoencoder", steps=3, sort', ["sort_by="]),
        ('nbgpu.scaling("diffusion", mo', ["mode=", "momentum="]),
        ('nbgpu.study("autoencoder", bucket', ["bucket_mb="]),
        ('nbgpu.controls("survival", preset="m', ["mace"]),
        ('nbgpu.Cluster(gpus="none", backend="g', ["gloo"]),
        ('cluster.predict(run, checkpoint="', ["newest", "best"]),
    ],
)
def test_tab_completes_recipes_settings_and_values(text: str, expected: list[str]) -> None:
    assert sorted(offered(text)) == sorted(expected)


@pytest.mark.parametrize(
    "text",
    [
        'other.train("autoencoder", ba',
        'train("autoencoder", ba',
        'cluster.train("autoencoder", batch_size=ba',
        'cluster.train("autoencoder", [ba',
        'cluster.train("nothing_like_it", ba',
        'cluster.train("autoencoder") or ba',
        'cluster.start("autoencoder", ba',
        'cluster.train(name, "ba',
        "ba",
    ],
)
def test_elsewhere_tab_is_ipythons_own(text: str) -> None:
    assert offered(text) == []


def test_a_recipe_of_ones_own_is_completed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from nbgpu.recipes.own import OwnRecipe\nclass Mine(OwnRecipe):\n    hidden: int = 64  # width\n"
    )
    assert offered(f'cluster.train("{file}", hid') == ["hidden="]
    assert "width" in settings_help.help_at(f'cluster.train("{file}", hidden', "", VARIABLES)


def test_what_a_run_can_change_is_completed() -> None:
    run = object.__new__(nbgpu.Run)
    run.config = train_config("diffusion")
    variables = {**VARIABLES, "run": run}
    assert settings_help.completed("run.set(weight", variables)[1] == ["weight_decay="]
    assert settings_help.completed("run.set(chan", variables)[1] == []
    assert "lr=" in settings_help.completed("run.set(", variables)[1]
    offers = settings_help.completed('cluster.predict(run, "new", sampl', variables)[1]
    assert sorted(offers) == ["sampler=", "sampling_steps="]
    assert settings_help.completed('cluster.predict("folder", "new", sampl', variables)[1] == []


def test_shift_tab_shows_one_setting_or_all_of_the_recipe() -> None:
    one = settings_help.help_at('cluster.train("autoencoder", batch', "_size=4)", VARIABLES)
    assert one.splitlines()[0].strip() == "batch_size: int = 2"
    assert "1 to 4096" in one
    every = settings_help.help_at('cluster.train("autoencoder", ', ")", VARIABLES)
    for name in set(TRAIN_CONFIGS["autoencoder"].model_fields) - {"recipe"}:
        assert f"    {name}: " in every
    assert settings_help.help_at("other(", ")", VARIABLES) == ""
    assert settings_help.help_at('cluster.train("au', '")', VARIABLES) == ""


def test_the_docstring_lists_the_settings_with_their_types() -> None:
    of_cluster = [getattr(VARIABLES["cluster"], call) for call in ("train", "plan", "find_batch_size")]
    for call in (*of_cluster, nbgpu.sweep, nbgpu.scaling, nbgpu.study):
        text = call.getdoc()
        assert "batch_size: int = 2\n        samples for each rank and micro-batch (1 to 4096)" in text
        assert 'amp: Literal["off", "auto", "bf16", "fp16"] = "off"' in text
        assert all(f"    {recipe}: " in text for recipe in TRAIN_CONFIGS)


GENERATOR = runpy.run_path(str(REPOSITORY / "docs" / "generate_stub.py"))
BESIDE: dict[str, set[str]] = {
    "train": set(),
    "plan": set(),
    "find_batch_size": set(),
    "sweep": {*SweepConfig.model_fields, *ClusterConfig.model_fields},
    "study": {*StudyConfig.model_fields, *ClusterConfig.model_fields},
    "scaling": {*StudyConfig.model_fields, *ClusterConfig.model_fields},
}
"""The settings that each call takes beside those of a recipe."""


def _overloads(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "preset" in {each.arg for each in node.args.kwonlyargs}:
            yield node


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its stubs, as an installation has them."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("static", "labextension", "__pycache__")
    shutil.copytree(REPOSITORY / "nbgpu", folder / "nbgpu", ignore=ignored)
    GENERATOR["write"](folder / "nbgpu")
    return folder


def test_the_stubs_for_editors_have_every_setting(installed: Path) -> None:
    seen = []
    for path in GENERATOR["STUBS"]:
        assert (installed / "nbgpu" / path).with_suffix(".py").is_file()
        for overload in _overloads(ast.parse((installed / "nbgpu" / path).read_text())):
            recipe = next(name for name in TRAIN_CONFIGS if f"'{name}'" in ast.unparse(overload.args))
            seen.append((overload.name, recipe))
            model = TRAIN_CONFIGS[recipe]
            named = {each.arg for each in overload.args.kwonlyargs}
            by_place = {each.arg for each in overload.args.args}
            own = set(model.model_fields) - unused(model) - {"recipe"} | {"preset"}
            assert named == (own | BESIDE[overload.name]) - by_place
    assert sorted(seen) == sorted((call, recipe) for call in BESIDE for recipe in TRAIN_CONFIGS)


def _editor(text: str, installed: Path) -> jedi.Script:
    """The end of a file in an editor that asks jedi."""
    project = jedi.Project(installed, sys_path=[str(installed), *sys.path])
    return jedi.Script(text, environment=jedi.InterpreterEnvironment(), project=project)


@pytest.mark.slow
def test_an_editor_completes_the_settings(installed: Path) -> None:
    script = _editor(
        'import nbgpu\ncluster = nbgpu.current()\ncluster.train("autoencoder", latent', installed
    )
    assert [found.name for found in script.complete()] == ["latent_channels="]
    script = _editor('import nbgpu\nnbgpu.Cluster().plan("survival", ', installed)
    shown = [found.to_string() for found in script.get_signatures()]
    assert len(shown) == len(TRAIN_CONFIGS) + 1
    assert any('Literal["survival"]' in text and "resnet: Literal" in text for text in shown)


def test_an_editor_completes_the_settings_of_sweeps_and_studies(installed: Path) -> None:
    for call, own in (
        ("sweep", "random_seed="),
        ("scaling", "measured_steps="),
        ("study", "measured_steps="),
    ):
        text = f'import nbgpu\nnbgpu.{call}("survival", '
        for begun in (own, "resnet=", "backend="):
            script = _editor(text + begun[:-2], installed)
            assert begun in [found.name for found in script.complete()]
    script = _editor('import nbgpu\nnbgpu.sweep("autoencoder", ', installed)
    assert any("lr: float | list[float] | str" in found.to_string() for found in script.get_signatures())


@pytest.mark.long
@pytest.mark.release
@pytest.mark.slow
def test_type_checkers_know_what_sweeps_and_studies_take(tmp_path: Path, installed: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import nbgpu\n"
        'nbgpu.sweep("autoencoder", lr=[1e-4, 1e-3], batch_size=2, seed="0..9", random=4, ranks=1)\n'
        'nbgpu.scaling("survival", ranks=[1, 2], mode="strong", resnet=18)\n'
        'nbgpu.study("autoencoder", amp=["off", "bf16"], ranks=1)\n'
        'nbgpu.sweep("my_recipe.py", anything=[1, 2])\n'
        'nbgpu.sweep(resume="nbgpu_runs/sweep")\n'
        'nbgpu.scaling("survival", ranks=[1, 2], mode="medium")\n'
    )
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(REPOSITORY / "pyproject.toml"),
            "--cache-dir",
            str(tmp_path),
            "--follow-imports",
            "silent",
            str(program),
        ],
        capture_output=True,
        text=True,
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
    ).stdout
    assert "program.py:7: error" in found, found
    assert "medium" in found or "No overload" in found, found
    assert not any(f"program.py:{line}: error" in found for line in range(1, 7)), found


def test_every_setting_can_be_written_as_a_parameter() -> None:
    for model in TRAIN_CONFIGS.values():
        names = signatures.names_of(model)
        text = f"def f(*, {', '.join(signatures.parameter(model, name) for name in names)}): ..."
        assert len(ast.parse(text).body) == 1
