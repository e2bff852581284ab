"""Launchers of ipyparallel that an IPython profile chooses: what is refused, and what does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbgpu
from nbgpu.errors import ClusterError, ConfigError


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of the profile `mine`, which says nothing yet."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    folder = tmp_path / "profile_mine"
    folder.mkdir()
    path = folder / "ipcluster_config.py"
    path.write_text("c = get_config()\n")
    return path


def cluster(**settings: object) -> nbgpu.Cluster:
    given = {"ipython_profile": "mine", "interface": "lo", "gpus": "none", **settings}
    return nbgpu.Cluster(launcher="hosts", **given)


def test_a_profile_that_is_not_there_is_named_with_the_command_that_makes_one(profile: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ipython_profile='minne'.*`ipython profile create --parallel minne` makes one"
    ):
        cluster(ipython_profile="minne")
    profile.unlink()
    with pytest.raises(ConfigError, match=r"ipython_profile='mine' has no ipcluster_config\.py in "):
        cluster()


def test_a_mistake_in_the_configuration_is_told_and_nothing_else_is_used_in_its_place(profile: Path) -> None:
    profile.write_text("c = get_config(\n")
    with pytest.raises(ConfigError, match=r"ipcluster_config\.py cannot be used: SyntaxError"):
        cluster()
    profile.write_text("c = get_config()\nc.Cluster.engine_launcher_class = 'no_such_launcher'\n")
    with pytest.raises(ConfigError, match="no_such_launcher"):
        cluster()


def test_launchers_that_start_only_ipyparallels_programs_are_refused(profile: Path) -> None:
    profile.write_text("c = get_config()\nc.Cluster.engine_launcher_class = 'ssh'\n")
    with pytest.raises(ConfigError, match=r"starts engines with SSHEngineSetLauncher.*launcher='ssh'"):
        cluster()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"launcher_options": "fodler=/x"}, "fodler is none of an ipython_profile. Did you mean folder?"),
        ({"ipython_profile": "", "launcher_options": "folder=/x"}, "only beside an ipython_profile"),
        (
            {"setup": "module load cuda"},
            "setup='module load cuda' counts only with launcher='ssh' or 'slurm'",
        ),
    ],
)
def test_settings_that_do_not_count_beside_a_profile(
    profile: Path, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(**settings)
    assert words in str(caught.value)


@pytest.mark.slow
def test_what_does_not_start_says_why_and_leaves_nothing(profile: Path, tmp_path: Path) -> None:
    profile.write_text("c = get_config()\nc.Cluster.engine_launcher_class = 'pbs'\n")
    place = tmp_path / "shared"
    with pytest.raises(
        ClusterError, match=r"no folder for the hosts can be made: .*No such file or directory"
    ):
        cluster(launcher_options={"folder": place}).parts.lifecycle.start()
    place.mkdir()
    with pytest.raises(ClusterError, match=r"PBSEngineSetLauncher could not start the hosts: .*'qsub'"):
        cluster(launcher_options={"folder": place}).parts.lifecycle.start()
    profile.write_text(
        "c = get_config()\nc.PBSEngineSetLauncher.submit_command = ['sh', '-c', 'echo no queue; exit 3']\n"
        "c.Cluster.engine_launcher_class = 'pbs'\n"
    )
    with pytest.raises(ClusterError, match="failed with exit code 3: no queue"):
        cluster(launcher_options={"folder": place}).parts.lifecycle.start()
    assert list(place.iterdir()) == []


def test_the_start_ends_when_all_that_was_started_has_ended(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"what LocalEngineSetLauncher has started has ended\. It has written nothing"
    ):
        cluster(launcher_options={"folder": tmp_path, "python": "/bin/false"}).parts.lifecycle.start()
