"""The exported files: bash and Slurm read them, and Kubernetes' own schemas know every field."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from nbgpu.config import ClusterConfig, read_toml, train_config
from nbgpu.errors import ConfigError, RunError
from nbgpu.exports import export
from nbgpu.exports.settings import FORMATS, USED, ExportConfig
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.settling import SettledConfig

_OLDEST, _NEWEST = "1.29", "1.37"
_MODELS = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
_EVERYTHING: dict[str, Any] = {
    "nodes": 2,
    "gpus_per_node": 4,
    "cpus_per_node": 16,
    "memory": "128G",
    "time_limit": "24:00:00",
    "warn_before_s": 90,
    "partition": "gpu",
    "account": "lab",
    "setup": "module load cuda",
    "interface": "ib0",
    "image": "registry.example.org/nbgpu:1",
    "claim": "runs",
    "queue": "team",
    "shared_memory": "16G",
    "max_restarts": 5,
    "name": "long-run",
    "min_nodes": 1,
}


def for_format(to: str) -> dict[str, Any]:
    return {name: value for name, value in _EVERYTHING.items() if name in USED[to]}  # type: ignore[index]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    config = train_config("autoencoder", data="phantoms", batch_size=2, runs_dir=str(tmp_path / "runs"))
    return runs.create(SettledConfig(config), ClusterConfig(gpus="none", ranks=2))


def not_known(document: dict[str, Any]) -> list[str]:
    """What the schemas, or the models of the two that have none, do not know."""
    if document["kind"] in _MODELS:
        known = _MODELS[document["kind"]].from_dict(json.loads(json.dumps(document)))
        assert known is not None
        return list(dropped(document, known.to_dict()))
    wrong = []
    for version in (_OLDEST, _NEWEST):
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            wrong.append(f"{version}: {error.message}")
    return wrong


def dropped(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The models ignore the fields that they do not know: those are what went in and does not come out."""
    if isinstance(before, dict):
        for key, value in before.items():
            if not isinstance(after, dict) or key not in after:
                yield f"{path}.{key}"
            else:
                yield from dropped(value, after[key], f"{path}.{key}")
    elif isinstance(before, list):
        for index, value in enumerate(before):
            yield from dropped(value, after[index], f"{path}[{index}]")


@pytest.mark.parametrize("more", [{}, _EVERYTHING], ids=["bare", "everything"])
@pytest.mark.parametrize("to", ["job", "jobset", "trainjob"])
def test_kubernetes_knows_every_field(
    to: str, more: dict[str, Any], run_folder: Path, tmp_path: Path
) -> None:
    values = {name: value for name, value in more.items() if name in USED[to]}  # type: ignore[index]
    made = export.of_run(run_folder, to, {**values, "out": str(tmp_path / "out")})
    (file,) = made.files
    text = (made.folder / file).read_text()
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        assert not_known(document) == []
    assert documents[0]["kind"] == "ConfigMap"
    settings = tomllib.loads(documents[0]["data"]["run.toml"])
    assert settings["train"]["resume"] == "auto"
    assert settings["train"]["runs_dir"] == "/runs"
    assert "medium: Memory" in text
    if more:
        assert text.count('nvidia.com/gpu: "4"') == 2, "without it a pod has no GPU"
        assert "--nproc-per-node=4" in text
        assert "Change" not in str(made)
    else:
        assert "nvidia.com/gpu" not in text
        assert "Change IMAGE and CLAIM" in str(made)


@pytest.mark.parametrize(
    ("to", "field"),
    [("job", "backoffLimit"), ("job", "terminationGracePeriodSeconds"), ("jobset", "coordinator")]
    + [("trainjob", "numNodes"), ("trainjob", "volumeMounts")],
)
def test_a_misspelt_field_is_found(to: str, field: str, run_folder: Path, tmp_path: Path) -> None:
    made = export.of_run(run_folder, to, {"out": str(tmp_path / "out")})
    text = (made.folder / made.files[0]).read_text()
    assert field in text
    misspelt = yaml.safe_load_all(text.replace(field, field[:-1]))
    assert any(not_known(document) for document in misspelt)


def test_kubernetes_knows_every_field_of_the_job_whose_pods_are_hosts_of_a_notebook() -> None:
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    (written,) = re.findall(r"```yaml\n(.+?)```", page, re.DOTALL)
    assert not_known(yaml.safe_load(written)) == []
    misspelt = yaml.safe_load(written.replace("parallelism", "paralelism"))
    assert len(not_known(misspelt)) == 2


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_the_scripts_are_bash_and_hold_what_was_asked_for(to: str, run_folder: Path, tmp_path: Path) -> None:
    made = export.of_run(run_folder, to, {**for_format(to), "out": str(tmp_path / "out")})
    script = made.folder / made.files[0]
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "--node-rank" not in text.replace("No --node-rank", "")
    assert "module load cuda" in text
    assert "GLOO_SOCKET_IFNAME=ib0" in text
    if to == "slurm":
        asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
        assert asked >= {
            *("--nodes=2", "--gpus-per-node=4", "--cpus-per-task=16", "--mem=128G", "--time=24:00:00"),
            *("--partition=gpu", "--account=lab", "--requeue", "--signal=USR1@90", "--ntasks-per-node=1"),
        }
    _, config = read_toml(made.folder / "run.toml")
    assert (config.resume, config.run_name) == ("auto", "long-run")
    assert Path(config.runs_dir).is_absolute()


def test_an_elastic_export_keeps_the_samples_of_a_step(run_folder: Path, tmp_path: Path) -> None:
    values = {"nodes": 2, "min_nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1}
    made = export.of_run(run_folder, "torchrun", {**values, "out": str(tmp_path / "out")})
    assert "NNODES:=1:2" in (made.folder / "torchrun.sh").read_text()
    _, config = read_toml(made.folder / "run.toml")
    assert config.global_batch_size == 4


def test_every_mistake_is_named_at_once_and_nothing_is_written(run_folder: Path, tmp_path: Path) -> None:
    bad = {
        "nodes": 0,
        "memory": "lots",
        "time_limit": "1 day",
        "name": "My Run",
        "out": str(tmp_path / "out"),
    }
    with pytest.raises(ConfigError) as raised:
        export.of_run(run_folder, "slrum", bad)
    text = str(raised.value)
    for word in ("slurm", "nodes", "there is no export"):
        assert word in text
    bad["nodes"] = 1
    with pytest.raises(ConfigError) as raised:
        export.of_run(run_folder, "slurm", bad | {"queue": "team", "image": "x"})
    for word in ("memory", "time_limit", "name", "queue", "image"):
        assert word in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_setting_is_honoured_or_refused_by_name(to: str, run_folder: Path, tmp_path: Path) -> None:
    assert {*_EVERYTHING, "ranks_per_node", "out"} == {*ExportConfig.model_fields}
    for name, value in _EVERYTHING.items():
        out = tmp_path / f"{to}-{name}"
        if name in USED[to]:
            extra = {"time_limit": "01:00:00"} if name == "warn_before_s" else {}
            extra |= {"nodes": 2} if name == "min_nodes" else {}
            made = export.of_run(run_folder, to, {name: value, **extra, "out": str(out)})
            plain = export.of_run(run_folder, to, {**extra, "out": f"{out}-plain"})
            assert (made.folder / made.files[0]).read_text() != (plain.folder / plain.files[0]).read_text()
        else:
            with pytest.raises(ConfigError, match=f"^{name}: an export to {to} has no place for it"):
                export.of_run(run_folder, to, {name: value, "out": str(out)})


def test_only_a_job_that_is_warned_needs_time_for_it(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="time_limit = '00:02:00' is not longer than warn_before_s = 120"):
        export.of_run(run_folder, "slurm", {"time_limit": "00:02:00", "out": str(tmp_path / "slurm")})
    job = export.of_run(
        run_folder, "job", {"time_limit": "00:02:00", "out": str(tmp_path / "job"), "image": "a/b:1"}
    )
    assert "activeDeadlineSeconds: 120" in "".join(path.read_text() for path in job.folder.iterdir())


def test_files_that_are_there_are_not_written_over(run_folder: Path, tmp_path: Path) -> None:
    made = export.of_run(run_folder, "torchrun", {"out": str(tmp_path / "out")})
    (made.folder / "run.toml").write_text("mine")
    with pytest.raises(RunError, match="already"):
        export.of_run(run_folder, "torchrun", {"out": str(tmp_path / "out")})
    assert (made.folder / "run.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("to", "asked"),
    [("torchrun", "NPROC:=2"), ("slurm", "--nproc-per-node=2"), ("job", "--nproc-per-node=2")],
)
def test_machines_share_the_ranks_of_the_run(to: str, asked: str, tmp_path: Path) -> None:
    config = train_config("autoencoder", data="phantoms", runs_dir=str(tmp_path / "runs"))
    folder = runs.create(SettledConfig(config), ClusterConfig(gpus="none", ranks=4))
    values = {**for_format(to), "nodes": 2, "gpus_per_node": None, "out": str(tmp_path / "out")}
    made = export.of_run(folder, to, values)
    assert asked in (made.folder / made.files[0]).read_text()


def test_ranks_that_machines_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    config = train_config("autoencoder", data="phantoms", runs_dir=str(tmp_path / "runs"))
    folder = runs.create(SettledConfig(config), ClusterConfig(gpus="none", ranks=3))
    out = str(tmp_path / "out")
    for nodes in (2, 8):
        with pytest.raises(ConfigError, match=rf"3 ranks.*nodes = {nodes}.*give ranks_per_node"):
            export.of_run(folder, "torchrun", {"nodes": nodes, "out": out})
    assert not (tmp_path / "out").exists()
    export.of_run(folder, "torchrun", {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 0, "out": out})
    assert "NPROC:=2" in (tmp_path / "out" / "torchrun.sh").read_text()
