"""Where ranks run: what the settings take, and what they refuse."""

from __future__ import annotations

import ast
from pkgutil import resolve_name

import pytest

import nbgpu
from nbgpu.client.launchers.launcher import Launcher
from nbgpu.config import ClusterConfig
from nbgpu.config.flags import parse
from nbgpu.config.launchers import LAUNCHERS, OPTIONAL
from nbgpu.errors import ConfigError
from nbgpu.package import PACKAGE


def test_hosts_and_options_are_the_same_from_python_and_from_text() -> None:
    given = {"python": "/a b/python", "ssh": "-F config", "unused": False}
    config = ClusterConfig.checked(
        launcher="ssh",
        hosts=["n1", "ann@n2"],
        launcher_options={name: value for name, value in given.items() if value},
        setup=["module load cuda", "ulimit -n 4096"],
    )
    assert config.host_names == ["n1", "ann@n2"]
    assert config.num_hosts == 2
    assert config.options_of_launcher == {"python": "/a b/python", "ssh": "-F config"}
    assert config.setup == "module load cuda\nulimit -n 4096"
    words = ["--launcher", "ssh", "--hosts", "n1", "ann@n2", "--launcher-options", config.launcher_options]
    parsed = parse([ClusterConfig], [*words, "--setup", config.setup], "nbgpu")
    assert ClusterConfig.checked(**parsed) == config
    assert ClusterConfig.checked(**config.model_dump()) == config


def test_an_option_of_sbatch_may_have_no_value() -> None:
    options = {"exclusive": True, "requeue": False, "nodelist": "n1,n2"}
    config = ClusterConfig.checked(launcher="slurm", nodes=2, launcher_options=options)
    assert config.options_of_launcher == {"exclusive": True, "nodelist": "n1,n2"}
    assert config.num_hosts == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"launcher": "ssh"}, "hosts='' names no host on which launcher='ssh' could start ranks"),
        ({"launcher": "ssh", "hosts": "a,b,a"}, "a is named twice"),
        ({"launcher": "ssh", "hosts": "-oProxyCommand=x"}, "'-oProxyCommand=x' is not the name of a host"),
        ({"launcher": "ssh", "hosts": "a", "launcher_options": "pyhton=x"}, "Did you mean python?"),
        ({"launcher": "ssh", "hosts": "a", "launcher_options": "ssh='-p"}, "No closing quotation"),
        ({"launcher": "slurm", "launcher_options": "=3"}, "has no name before the '='"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.checked(**settings)
    assert words in str(caught.value)


def test_variables_are_saved_before_the_end_in_a_notebook_only() -> None:
    cluster = nbgpu.Cluster(launcher="slurm", save_before_time_limit="saved")
    with pytest.raises(ConfigError, match="works in a notebook, between two cells"):
        cluster.parts.lifecycle.start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("nodes=3", "'nodes' cannot be given"),
        ("requeue", "'requeue' needs on_host_lost='wait'"),
        ("--requeue", "'requeue' needs on_host_lost='wait'"),
        ("a_b!=3", "is not the name"),
    ],
)
def test_an_option_that_sbatch_does_not_get_is_refused_before_the_start(options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        nbgpu.Cluster(launcher="slurm", launcher_options=options)


@pytest.mark.slow
def test_only_a_launchers_own_settings_know_its_name() -> None:
    """So that a new one needs no change elsewhere."""
    compared = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in LAUNCHERS
        if "launcher" in ast.unparse(node)
    ]
    assert compared == []


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_a_launcher_takes_is_in_its_settings(name: str) -> None:
    assert issubclass(resolve_name(LAUNCHERS[name].IMPLEMENTATION), Launcher)
    assert set(LAUNCHERS[name].TAKES) <= set(OPTIONAL)
    fields = ClusterConfig.model_fields
    assert f"'{name}' {LAUNCHERS[name].MEANING}" in str(fields["launcher"].description)
    assert LAUNCHERS[name].OPTIONS_MEANING.rstrip(".") in str(fields["launcher_options"].description)
