"""What `%load_ext nbgpu` launches in the background for a start that may come."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from kernel import Kernel, kernel

import nbgpu
from nbgpu.client.engines import preloading
from nbgpu.client.host import registry

pytestmark = pytest.mark.cold

_START = "%nbgpu start --gpus none --ranks 2"
_PATIENCE_S = 20.0


def _launched(notebook: Kernel) -> dict[str, psutil.Process]:
    """The processes of clusters that run below the notebook's kernel, by the last part of their modules'
    names."""
    found = {}
    for child in psutil.Process(notebook.manager.provisioner.pid).children():
        command = child.cmdline()
        for name in ("fork_server", "controller"):
            if any(argument.endswith(f".{name}") for argument in command):
                assert name not in found, f"two processes run {name}"
                found[name] = child
    return found


def _wait_until(is_so: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, "it did not come to that in time"
        time.sleep(0.02)


def _preload(notebook: Kernel) -> dict[str, psutil.Process]:
    assert notebook.run("%load_ext nbgpu").status == "ok"
    _wait_until(lambda: len(_launched(notebook)) == 2)
    return _launched(notebook)


def _folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("nbgpu-*/profile"))


def test_a_start_takes_what_was_preloaded_and_a_second_one_launches_its_own() -> None:
    with kernel() as notebook:
        preloaded = _preload(notebook)
        assert registry.entries() == [], "nothing has started yet"
        assert notebook.run(_START).status == "ok"
        (entry,) = registry.entries()
        assert {leader.pid for leader in entry.leaders.values()} == {p.pid for p in preloaded.values()}
        total = notebook.run("%%distributed\ntotal = torch.ones(1); dist.all_reduce(total); int(total)")
        assert "2" in total.stdout + str(total.displays)
        assert notebook.run("%nbgpu stop").status == "ok"
        assert _launched(notebook) == {}
        assert notebook.run(_START).status == "ok"
        assert not {p.pid for p in _launched(notebook).values()} & {p.pid for p in preloaded.values()}
        assert notebook.run("%nbgpu stop").status == "ok"
    assert _folders() == []


@pytest.mark.parametrize(
    "after_s",
    [
        pytest.param(0.0, id="while it imports"),
        pytest.param(3.0, id="while it waits", marks=pytest.mark.long),
    ],
)
def test_what_was_preloaded_ends_with_a_kernel_that_is_killed(after_s: float) -> None:
    with kernel() as notebook:
        preloaded = _preload(notebook)
        time.sleep(after_s)
        os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(preloaded.values(), timeout=_PATIENCE_S)
        assert not alive
        _wait_until(lambda: not _folders())


def test_what_was_preloaded_ends_with_the_kernel_and_with_the_extension() -> None:
    with kernel() as notebook:
        preloaded = _preload(notebook)
        assert notebook.run("%unload_ext nbgpu").status == "ok"
        assert _launched(notebook) == {}
        assert _folders() == []
        preloaded |= _preload(notebook)
    _, alive = psutil.wait_procs(preloaded.values(), timeout=_PATIENCE_S)
    assert not alive
    _wait_until(lambda: not _folders())


def test_nothing_is_preloaded_where_that_is_turned_off() -> None:
    with kernel(environment={preloading.VARIABLE: "0"}) as notebook:
        assert notebook.run("%load_ext nbgpu").status == "ok"
        time.sleep(1.0)
        assert _launched(notebook) == {}
        assert notebook.run(_START).status == "ok"
        assert notebook.run("%nbgpu stop").status == "ok"


@pytest.mark.parametrize(
    "change",
    [
        "import os; os.environ['NBGPU_TEST_COLOUR'] = 'green'",
        pytest.param("%cd -q {folder}", marks=pytest.mark.long),
        pytest.param("import os; os.umask(0o027)", marks=pytest.mark.long),
        pytest.param("import tempfile; tempfile.tempdir = '{folder}'", marks=pytest.mark.long),
    ],
)
def test_the_engines_have_the_surroundings_of_the_start(change: str, tmp_path: Path) -> None:
    asked = (
        "import os, tempfile\nprint(os.environ.get('NBGPU_TEST_COLOUR'), os.getcwd(), oct(os.umask(0o077)))"
    )
    with kernel(environment={preloading.VARIABLE: "0"}) as notebook:
        notebook.run(change.format(folder=tmp_path))
        notebook.run("%load_ext nbgpu")
        assert notebook.run(_START).status == "ok"
        expected = notebook.run(f"%%distributed\n{asked}").stdout
        notebook.run("%nbgpu stop")
    assert expected
    with kernel() as notebook:
        preloaded = _preload(notebook)
        assert notebook.run(change.format(folder=tmp_path)).status == "ok"
        assert notebook.run(_START).status == "ok"
        assert notebook.run(f"%%distributed\n{asked}").stdout == expected
        _, alive = psutil.wait_procs(preloaded.values(), timeout=_PATIENCE_S)
        assert not alive, "the preloaded ones are of no use any more"
        assert notebook.run("%nbgpu stop").status == "ok"


def test_a_forked_child_leaves_what_was_preloaded_alone() -> None:
    with kernel() as notebook:
        preloaded = _preload(notebook)
        fork = (
            "import os\n"
            "from nbgpu.client.engines import preloading\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    preloading.dismiss()\n"
            "    os._exit(0)\n"
            "print(os.waitpid(pid, 0)[1])"
        )
        assert notebook.run(fork).stdout == "0\n"
        assert _launched(notebook) == preloaded


def test_a_start_launches_its_own_where_what_was_preloaded_has_died() -> None:
    with kernel() as notebook:
        preloaded = _preload(notebook)
        preloaded["fork_server"].kill()
        _wait_until(lambda: not preloaded["controller"].is_running() or _has_ended(preloaded["controller"]))
        assert notebook.run(_START).status == "ok"
        assert notebook.run("%nbgpu stop").status == "ok"
        assert _folders() == []


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_script_that_starts_a_cluster_preloads_nothing() -> None:
    with nbgpu.Cluster(gpus="none", ranks=1):
        assert preloading.take({}) is None
