"""The files around a release agree with pyproject.toml, and `make release` refuses what is not in order."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nbgpu.version import VERSION

PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "jupyter-server": "jupyter_server"}
"""Packages that conda-forge has under other names."""
FOR_WORK_ON_NBGPU = {"test", "docs", "dev", "release"}


def _yaml(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text())


def test_every_extra_is_documented_and_every_documented_one_is_there() -> None:
    extras = set(PROJECT["optional-dependencies"])
    said = [
        name
        for folder, pattern in (("docs", "**/*.md"), ("nbgpu", "**/*.py"), ("notebooks", "*.ipynb"))
        for path in (REPOSITORY / folder).glob(pattern)
        for names in re.findall(r"nbgpu\[([a-z,]+)\]'?", path.read_text())
        for name in names.split(",")
    ]
    assert set(said) <= extras
    start = (REPOSITORY / "docs" / "start.md").read_text()
    assert set(re.findall(r"pip install 'nbgpu\[([a-z]+)\]'", start)) == extras - FOR_WORK_ON_NBGPU
    (everything,) = (Requirement(line) for line in PROJECT["optional-dependencies"]["all"])
    assert everything.extras == extras - FOR_WORK_ON_NBGPU - {"all"}


def test_the_recipe_for_conda_asks_for_what_pip_is_asked_for() -> None:
    recipe = _yaml(".ci/conda/recipe.yaml")
    assert recipe["context"]["version"] == VERSION
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    run = dict(
        line.split() for line in recipe["requirements"]["run"] if not line.startswith(("__", "python "))
    )
    wanted = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert {name: SpecifierSet(bounds) for name, bounds in run.items()} == {
        CONDA_NAMES.get(name, name): bounds for name, bounds in wanted.items()
    }
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    host = {line.replace(" ", "") for line in recipe["requirements"]["host"]}
    assert {line.replace(" ", "") for line in build} <= host
    assert recipe["build"]["python"]["entry_points"] == [f"nbgpu = {PROJECT['scripts']['nbgpu']}"]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_each_file_is_what_its_schema_asks_for(schema: str, pattern: str) -> None:
    pytest.importorskip("check_jsonschema", reason="the extra `release` is not installed here")
    files = sorted(REPOSITORY.glob(pattern))
    assert files
    # The schemas come with the tool, so that nothing is fetched.
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_citation_says_what_the_package_says() -> None:
    citation = _yaml("CITATION.cff")
    assert str(citation["version"]) == VERSION
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]


def test_the_public_forge_runs_the_same_ci() -> None:
    flow = _yaml(".github/workflows/ci.yml")
    # YAML takes the key `on` for a truth value.
    assert set(flow[True]) == {"push", "pull_request", "workflow_dispatch"}
    jobs = flow["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert ".ci/run" in runs["all"]
    assert jobs["all"]["container"]["image"].startswith("python:3.11")
    others = {f"3.{minor}" for minor in _minors() - {11}}
    assert set(jobs["versions"]["strategy"]["matrix"]["python"]) == others
    assert ".ci/run fast" in runs["versions"]
    for line in (line for lines in runs.values() for line in lines):
        for word in line.split():
            if word.startswith(".ci/") or word.endswith(".txt"):
                assert (REPOSITORY / word).is_file(), word


def _minors() -> set[int]:
    found = (re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c) for c in PROJECT["classifiers"])
    return {int(match[1]) for match in found if match}


def test_the_forms_for_issues_are_forms() -> None:
    folder = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert set(forms) == {"bug", "question", "idea", "config"}
    del forms["config"]
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
        asked = [each for each in form["body"] if each["type"] != "markdown"]
        assert all(each["attributes"]["label"] for each in asked)
        assert len({each["id"] for each in asked}) == len(asked)
    assert any("nbgpu doctor --json" in each["attributes"].get("label", "") for each in forms["bug"]["body"])


def test_links_in_the_files_of_the_forge_lead_somewhere() -> None:
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / ".github").rglob("*.md")]
    text = {page: page.read_text() for page in pages} | {
        path: path.read_text() for path in (REPOSITORY / ".github").rglob("*.yml")
    }
    for path, content in text.items():
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", content):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
        for link in re.findall(r"github\.com/nbgpu/nbgpu/(?:blob|tree)/main/([^\s)#>]+)", content):
            assert (REPOSITORY / link).exists(), f"{path.name}: {link}"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A repository with the present files and one commit."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("this is no git checkout")
    pytest.importorskip("build", reason="the extra `release` is not installed here")
    listed = _git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    folder = tmp_path / "scratch"
    for name in (name for name in listed if (REPOSITORY / name).is_file()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    _git(folder, "init", "--quiet", "--initial-branch=main")
    _commit(folder)
    return folder


def _git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _commit(folder: Path) -> str:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", "a state")
    return _git(folder, "rev-parse", "HEAD")


def _release(folder: Path, tested: str = "") -> subprocess.CompletedProcess[str]:
    """`make release`, with the environment of these tests in place of one that would be set up there."""
    ready = f"{sys.prefix}/.ready-for-development"
    command = [
        "make",
        "--no-print-directory",
        f"VENV={sys.prefix}",
        "-o",
        ready,
        "release",
        f"TESTED={tested}",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def _replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.long
def test_a_release_is_refused_until_all_agrees_and_then_built(scratch: Path) -> None:
    (scratch / "stray.txt").write_text("left over")
    _replace(scratch / "nbgpu" / "version.py", f'"{VERSION}"', '"9.9.0"')
    said = _release(scratch).stderr
    for problem in (
        "CHANGELOG.md begins with",
        f"CITATION.cff: the version is ['{VERSION}'], and nbgpu/version.py says 9.9.0",
        f".ci/conda/recipe.yaml: the version is ['{VERSION}']",
        "stray.txt",
        "make release TESTED=",
        "Nothing was built",
    ):
        assert problem in said, problem
    assert not (scratch / "dist").exists()

    (scratch / "stray.txt").unlink()
    today = datetime.datetime.now(datetime.UTC).date()
    changelog = scratch / "CHANGELOG.md"
    changelog.write_text(
        re.sub(r"^## .*$", f"## [9.9.0] - {today}", changelog.read_text(), count=1, flags=re.M)
    )
    _replace(scratch / "CITATION.cff", f"version: {VERSION}", f"version: 9.9.0\ndate-released: {today}")
    _replace(scratch / ".ci" / "conda" / "recipe.yaml", f'version: "{VERSION}"', 'version: "9.9.0"')
    in_jupyterlab = scratch / "widgets" / "labextension" / "package.json"
    _replace(in_jupyterlab, f'"version": "{VERSION}"', '"version": "9.9.0"')
    commit = _commit(scratch)
    assert "nobody said that .ci/run passed" in _release(scratch, "0123456789").stderr
    done = _release(scratch, commit[:12])
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (scratch / "dist").iterdir()} == {
        "nbgpu-9.9.0-py3-none-any.whl",
        "nbgpu-9.9.0.tar.gz",
    }
    assert "git tag --annotate v9.9.0" in done.stdout
    assert done.stdout.count("PASSED") == 2
    assert _git(scratch, "tag", "--list") == ""
    with tarfile.open(scratch / "dist" / "nbgpu-9.9.0.tar.gz") as archive:
        assert "nbgpu-9.9.0/CITATION.cff" in archive.getnames()
    with zipfile.ZipFile(scratch / "dist" / "nbgpu-9.9.0-py3-none-any.whl") as wheel:
        stubs = {name for name in wheel.namelist() if name.endswith(".pyi")}
        assert stubs == {
            "nbgpu/client/cluster/recipe_calls.pyi",
            "nbgpu/client/scaling/starting.pyi",
            "nbgpu/client/sweeps/starting.pyi",
        }
        assert all(b'Literal["autoencoder"]' in wheel.read(name) for name in stubs)

    _git(scratch, "tag", "v9.9.0")
    assert "there is a tag v9.9.0 already" in _release(scratch, commit[:12]).stderr
