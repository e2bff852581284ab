"""The defaults and limits that an administrator sets for all users of a host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretend_gpus
import pytest
from pretend_gpus import GIB, several

from nbgpu.cli import training
from nbgpu.cli.asking import cluster_of
from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.engines import preloading
from nbgpu.client.host import doctor, gpu_choice, registry
from nbgpu.client.host.device_cards import DeviceCards
from nbgpu.config import ClusterConfig, flags, read_toml, site_file, train_config, write_toml
from nbgpu.engine import train as on_a_rank
from nbgpu.engine.process import host_calls
from nbgpu.errors import ConfigError
from nbgpu.machine import devices
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.planning import trials
from nbgpu.planning.studies import StudyConfig
from nbgpu.protocol.records import Device
from nbgpu.ui.controls.devices import DeviceControls

Site = Callable[[str], Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Writes the site's file."""
    path = tmp_path / "defaults.toml"
    monkeypatch.setenv(site_file.VARIABLE, str(path))
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


def entry_of(chosen: tuple[Device, ...], **settings: Any) -> registry.Entry:
    transport = ChosenTransport(Transport("nccl", "nccl"))
    return registry.new_entry(ClusterConfig.checked(**settings), chosen, transport, Path("/tmp/nbgpu-none"))


def test_a_default_counts_where_nothing_is_given_on_every_path(site: Site, tmp_path: Path) -> None:
    site(f'[defaults]\ngpus = "none"\nrelease_after_s = 3600\nruns_dir = "{tmp_path}/$USER/runs"\n')
    assert (ClusterConfig().gpus, ClusterConfig().release_after_s) == ("none", 3600)
    assert ClusterConfig.checked(gpus="auto", release_after_s=None).release_after_s is None
    assert Cluster(ranks=1).config.release_after_s == 3600
    assert Cluster("auto").config.gpus == "auto"
    values = flags.parse([ClusterConfig], [], prog="nbgpu")
    assert cluster_of(ClusterConfig(), [], values).release_after_s == 3600
    given = ["--release-after-s", "60"]
    assert (
        cluster_of(ClusterConfig(), given, flags.parse([ClusterConfig], given, prog="nbgpu")).release_after_s
        == 60
    )
    assert trials.plan("autoencoder", {"lr": [1e-4, 1e-3]}).cluster.release_after_s == 3600
    controls = DeviceControls()
    assert controls.fields["release_after_s"].value == "3600"
    assert controls.gpus.wait(30)
    assert controls.gpus.value == ()
    # Each user has a folder of their own.
    runs_dir = os.path.expandvars(f"{tmp_path}/$USER/runs")
    assert train_config("autoencoder").runs_dir == StudyConfig().studies_dir == doctor.runs_dir() == runs_dir
    assert train_config("autoencoder", runs_dir="here").runs_dir == "here"
    # What a person has written down stays as it is, and what is copied has no more than is needed.
    write_toml(
        tmp_path / "run.toml", ClusterConfig(gpus="auto"), train_config("autoencoder", runs_dir="here")
    )
    site('[defaults]\ngpus = "free:1"\nruns_dir = "elsewhere"\n')
    cluster, train = read_toml(tmp_path / "run.toml")
    assert (cluster.gpus, train.runs_dir) == ("auto", "here")
    assert ClusterConfig().beyond_defaults == {}
    assert ClusterConfig(gpus="auto").beyond_defaults == {"gpus": "auto"}


def test_nbgpu_train_has_the_defaults_of_the_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site('[defaults]\ngpus = "none"\nrelease_after_s = 3600\n')
    asked: list[ClusterConfig] = []

    def begun(_: object, cluster: ClusterConfig) -> None:
        asked.append(cluster)
        raise InterruptedError

    monkeypatch.setattr(preloading, "begun", begun)
    for arguments in ([], ["--release-after-s", "60"]):
        with pytest.raises(InterruptedError):
            training.train(["autoencoder", "--preset", "demo", *arguments])
    assert [(each.gpus, each.release_after_s) for each in asked] == [("none", 3600), ("none", 60)]


def test_the_launcher_of_a_site_and_a_persons_own(site: Site) -> None:
    site(
        '[defaults]\nlauncher = "slurm"\ngpus = "free:1"\nwait = true\nnodes = 2\n'
        '[defaults.launcher_options]\npartition = "gpu"\n'
    )
    assert ClusterConfig().launcher == "slurm"
    assert (ClusterConfig().launcher_options, ClusterConfig().nodes) == ("partition=gpu", 2)
    assert (ClusterConfig().gpus, ClusterConfig().wait) == ("auto", False)
    own = ClusterConfig.checked(launcher="local")
    assert (own.launcher_options, own.nodes, own.gpus, own.wait) == ("", None, "free:1", True)
    shared = ClusterConfig.checked(launcher="local", share_gpus=True)
    assert (shared.gpus, shared.wait) == ("auto", False)
    assert ClusterConfig.checked(launcher="local", gpus="0").wait is False
    # A person who asks for ranks here must not get a job.
    with pytest.raises(
        ConfigError, match="ranks=2 counts only with launcher='local', and launcher is 'slurm'"
    ):
        ClusterConfig.checked(ranks=2)


def test_bad_rows_are_refused_all_at_once_with_file_and_key(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = site(
        '[defaults]\nrelease_after_s = -1\nlauncher = "slum"\nrelease_after = 60\nruns_dir = 3\n'
        "[limits]\ngpus_per_person = 0\n[limit]\nx = 1\n"
    )
    with pytest.raises(ConfigError) as refusal:
        ClusterConfig.checked(gpus="none")
    lines = str(refusal.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    for what in (
        "[defaults] release_after cannot be set for a site. Did you mean release_after_s?",
        "[limit] is no table of this file. Did you mean limits?",
        "[defaults] release_after_s = -1",
        "[defaults] launcher = 'slum' is not valid",
        "[defaults] runs_dir = 3 is not valid",
        "[limits] gpus_per_person = 0 is not valid",
    ):
        assert sum(what in line for line in lines) == 1, what
    finding = doctor._site()
    assert (finding.verdict, finding.text.count(str(path))) == ("fail", len(lines))
    path.write_text("gpus = ")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        ClusterConfig.checked()
    monkeypatch.setenv(site_file.VARIABLE, "/nowhere/site.toml")
    with pytest.raises(ConfigError, match=r"NBGPU_SITE_FILE=/nowhere/site\.toml: the file cannot be read"):
        ClusterConfig.checked()
    monkeypatch.setenv(site_file.VARIABLE, "")
    assert ClusterConfig.checked().gpus == "auto"


def test_doctor_says_which_file_sets_what(site: Site) -> None:
    path = site('[defaults]\ngpus = "free:1"\n[limits]\ngpus_per_person = 2\n')
    assert doctor._site().text == f"{path} (NBGPU_SITE_FILE) sets gpus='free:1', gpus_per_person=2"


def test_a_person_gets_no_more_gpus_than_the_site_allows(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site("[limits]\ngpus_per_person = 3\n")
    pretend_gpus.install(several(8), patch=monkeypatch)
    # What is not named stays within the limit.
    chosen = gpu_choice.choose(ClusterConfig())
    assert [device.index for device in chosen] == [0, 1, 2]
    first = registry.claim(entry_of(chosen[:2]))
    assert len(gpu_choice.choose(ClusterConfig())) == 1
    with DeviceCards() as cards:
        assert len(cards.read().proposed) == 1
    wanted = devices.choose("2,3", None)
    with pytest.raises(ConfigError) as refusal:
        registry.claim(entry_of(wanted, gpus="2,3"))
    assert str(refusal.value) == (
        f"the cluster would have 2 GPU(s), and your other clusters have 2 ({first.describe()}): one person may have 3 on "
        f"this host (gpus_per_person in {path}). Take fewer, or end a cluster with nbgpu stop"
    )
    assert [entry.id for entry in registry.entries()] == [first.id]
    # A cluster that grows is within the limit, too.
    with pytest.raises(ConfigError, match=r"the cluster would have 4 GPU\(s\): one person may have 3"):
        registry.claim(first.model_copy(update={"devices": devices.choose("0,1,2,3", None)}))
    registry.claim(first.model_copy(update={"devices": chosen}))
    # GPUs that two clusters share count once, and CPU ranks count nothing.
    registry.claim(entry_of(chosen[:2], share_gpus=True))
    registry.claim(entry_of((devices.cpu(0),), gpus="none"))


def test_the_limit_holds_on_other_hosts_and_under_torchrun_and_not_within_a_job_of_slurm(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("[limits]\ngpus_per_person = 1\n")
    gpus = pretend_gpus.install(several(3), patch=monkeypatch)
    monkeypatch.setattr(host_calls, "_address", ("lo", "127.0.0.1"), raising=False)
    monkeypatch.setattr(host_calls, "_folder", Path("/tmp"), raising=False)
    assert "one person may have 1" in host_calls.describe("all", None, [])["problem"]
    gpus[0].used = 9 * GIB
    described = host_calls.describe("auto", None, [])
    assert [each["index"] for each in described["devices"]] == [1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one person may have 1"):
        on_a_rank._place_of_torchrun(ClusterConfig())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # A rank under torchrun takes what the launcher shows, free or not.
    assert [each.index for each in on_a_rank._place_of_torchrun(ClusterConfig()).local_devices] == [0, 1]
    with pytest.raises(ConfigError, match="Under torchrun name the GPUs"):
        on_a_rank._place_of_torchrun(ClusterConfig(gpus="free:2"))
