"""What every test can rely on: one thread per rank, nothing left behind, and honest skips."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Without them each of some thousand processes would compile nbgpu's sources and pytest the tests' again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before anything imports torch or numpy: two ranks with all the cores each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# scikit-learn sets these two when it is imported; set first, they are no test's doing.
os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")

import after_failures
import hosts
import ipykernel
import jupyter_client
import launching
import leaks
import psutil
import pytest
import rows
import slow_link
import warm_start

from nbgpu.machine import slow_imports

if TYPE_CHECKING:
    from lab import Lab
    from playwright.sync_api import Page

slow_imports.put_off()

# For this process itself, which has read the variable already.
sys.dont_write_bytecode = False

if not hasattr(psutil.Process, "net_connections"):
    # Before psutil 6 the method had another name.
    psutil.Process.net_connections = psutil.Process.connections

REPOSITORY = Path(__file__).resolve().parents[1]
SUPPORT = REPOSITORY / "tests" / "support"
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
IN_CI = os.environ.get("CI") == "true"
# CI elsewhere says so where it cannot have them.
WITHOUT_SHARED_DATA = os.environ.get("NBGPU_TESTS_WITHOUT_SHARED_DATA") == "true"


HAS_TORCH = find_spec("torch") is not None
_LACKS_TORCH = re.compile(
    r"No (module named|package metadata was found for) '?(torch|monai|sklearn|lifelines)"
)

# Files that tests find good are nobody's business afterwards.
_cache = tempfile.TemporaryDirectory(prefix="nbgpu-test-cache-")
os.environ["NBGPU_CACHE_DIR"] = _cache.name


def pytest_addoption(parser: pytest.Parser) -> None:
    launching.add_options(parser)
    parser.addoption(
        "--cold", action="store_true", help="no cluster comes from the tests' template (tests/support/warm)"
    )


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_xdist_auto_num_workers() -> int:
    """The number of files to run side by side: twice the cores, because a test waits for half of its time,
    and eight at most, because each worker has a template of half a gigabyte."""
    return min(8, 2 * len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leaks)
    config.pluginmanager.register(after_failures)
    config.pluginmanager.register(launching)
    config.pluginmanager.register(rows)
    config.addinivalue_line("markers", "requires_shared_data: needs the real files beside the checkout")
    if jupyter_client.version_info < (8,):
        # It makes a context of its own for each client, and leaves it to the garbage collector.
        for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            config.addinivalue_line(
                "filterwarnings", f"ignore:.*(Unclosed context|Context.__del__):{warning}"
            )
    config.addinivalue_line("markers", "row: a row of the table of faults (rows.py)")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Without torch (`make test-python`) the files that import it are skipped, and say so."""
    report = yield
    return _skipped_without_torch(report, str(collector.path), str(report.longrepr))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """The same for single tests that import it, also in a process of their own."""
    report = yield
    of_process = getattr(call.excinfo.value, "stderr", "") if call.excinfo else ""
    return _skipped_without_torch(report, str(item.path), f"{report.longrepr}{of_process}")


def _skipped_without_torch(report: Any, path: str, said: str) -> Any:
    if report.failed and not HAS_TORCH and _LACKS_TORCH.search(said):
        report.outcome = "skipped"
        report.longrepr = (path, 0, "Skipped: PyTorch is not installed for this Python")
    return report


_LONGEST_FIRST = (
    "launchers",
    "cluster",
    "scaling",
    "faults",
    "runs",
    "recipes",
    "notebooks",
    "ui",
    "data",
    "cells",
    "unit",
)
"""The folders of tests by how long a file of theirs may take."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, files that may take long come first, so that no core is idle at the end."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: _LONGEST_FIRST.index(item.path.relative_to(REPOSITORY / "tests").parts[0])
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--cold") or session.config.option.collectonly:
        return
    if HAS_TORCH and any("unit" not in item.path.parts for item in session.items):
        warm_start.begin()


def pytest_runtest_setup(item: pytest.Item) -> None:
    warm_start.turn(on=item.get_closest_marker("cold") is None)
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.skip(reason)
    if item.get_closest_marker("browser") and chromium() is None:
        _skip_unless_ci("no Chromium on this machine: apt-get install chromium")
    if item.get_closest_marker("subshells") and ipykernel.version_info < (7, 1):
        pytest.skip(f"ipykernel {ipykernel.__version__} has no subshells, which came with 7.1")
    if item.get_closest_marker("slow_link") and (reason := slow_link.why_not()):
        _skip_unless_ci(reason)
    if item.get_closest_marker("hosts") and (reason := hosts.why_not()):
        _skip_unless_ci(reason)
    if item.get_closest_marker("requires_shared_data") and not SHARED_DATA.is_dir():
        _skip_without_shared_data()


def _skip_unless_ci(reason: str) -> None:
    """CI has everything but a GPU, and a test that it skips would be one that nobody runs."""
    if IN_CI:
        pytest.fail(f"{reason} (with CI=true this is a failure)", pytrace=False)
    pytest.skip(reason)


def _skip_without_shared_data() -> None:
    reason = f"no real files to try: {SHARED_DATA} is not there"
    if WITHOUT_SHARED_DATA:
        pytest.skip(reason)
    _skip_unless_ci(reason)


def _no_gpu() -> str:
    """Why there is no NVIDIA GPU to test with; empty where there is one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVIDIA GPU on this machine: {error}"
    try:
        return "" if pynvml.nvmlDeviceGetCount() else "the NVIDIA driver finds no GPU"
    finally:
        pynvml.nvmlShutdown()


def chromium() -> str | None:
    """The path of a Chromium that can be driven, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real volumes; skips where it is missing."""
    if not SHARED_DATA.is_dir():
        _skip_without_shared_data()
    return SHARED_DATA


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many bytes, to be filled up; skips where that is not allowed."""
    path = tmp_path / "disk"
    path.mkdir()

    def make(size_bytes: int) -> Path:
        options = f"size={size_bytes},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "nbgpu-test", str(path)]
        if os.geteuid() != 0:
            pytest.skip("only root can mount a small file system to fill up")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
        return path

    yield make
    if path.is_mount():
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def cluster2() -> Iterator[Any]:
    """Two CPU ranks, started once for a test module.

    A process has one cluster at a time: a module whose tests start their own does without this one.
    """
    import nbgpu

    with nbgpu.Cluster(**launching.settings()) as cluster, what_changes_of(cluster):
        yield cluster


@pytest.fixture(scope="module")
def cluster3() -> Iterator[Any]:
    """Three CPU ranks: with as many, the order in which gradients are added up decides their last bits."""
    import nbgpu

    with nbgpu.Cluster(**launching.settings(3)) as cluster, what_changes_of(cluster):
        yield cluster


@pytest.fixture(scope="module")
def test_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Slurm]:
    """A Slurm with the nodes n1 and n2, started once for a test module that is marked `hosts`."""
    folder = tmp_path_factory.mktemp("slurm")
    with (
        hosts.make_hosts(["login", "n1", "n2"], folder / "hosts", shared=[folder]) as made,
        leaks.holding(lambda leftover: made.have(leftover.pid)),
        hosts.slurm(made, folder / "slurm") as started,
    ):
        yield started


@pytest.fixture(scope="module")
def test_ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.SecureShell]:
    """Hosts n1 and n2 that are reached by ssh from `laptop`, started once for a test module that is marked
    `hosts`. They share no folder that a person writes to."""
    folder = tmp_path_factory.mktemp("ssh")
    private = [Path.home(), Path("/var/tmp")]
    with (
        hosts.make_hosts(["laptop", "n1", "n2"], folder, private=private) as made,
        leaks.holding(lambda leftover: made.have(leftover.pid)),
        hosts.secure_shell(made, folder / "ssh") as started,
    ):
        yield started


@pytest.fixture
def stop_at_the_fault() -> Iterator[Callable[[], threading.Thread]]:
    """Starts a thread that presses Stop in this process once the fault has begun."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    over = threading.Event()
    threads = []

    def press() -> None:
        while not rows.moment().exists():
            # Nobody waits for the interrupt of a test that has failed, and it would end pytest.
            if over.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    def start() -> threading.Thread:
        threads.append(threading.Thread(target=press))
        threads[0].start()
        return threads[0]

    yield start
    over.set()
    threads[0].join()
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Any]:
    """A notebook's kernel with two CPU ranks, started once for a test module."""
    from kernel import kernel

    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        yield started
        started.run("%nbgpu stop")


@pytest.fixture(scope="module")
def ranks_may_be_replaced(notebook: Any) -> Iterator[None]:
    """In the notebook's module an engine that takes the place of another one is no leak."""
    with leaks.holding_family_of(notebook.manager.provisioner.pid):
        yield


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab, started once for a test module."""
    from lab import jupyter_lab

    with jupyter_lab(tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture
def page(lab: Lab, tmp_path: Path) -> Iterator[Page]:
    """A page of a fresh Chromium for the `lab` of the test's module, whose kernels end with the page.

    The test fails where a part of nbgpu has complained in the browser's console.
    """
    from lab import browser_page, complaints_of

    path = chromium()
    assert path is not None, "the marker 'browser' skips where there is none"
    with browser_page(path, tmp_path) as opened:
        complaints = complaints_of(opened)
        # A reload asks whether what is not saved may go.
        opened.on("dialog", lambda dialog: dialog.accept())
        yield opened
    lab.shut_kernels_down()
    assert not complaints, "\n".join(complaints)


@contextlib.contextmanager
def what_changes_of(cluster: Any) -> Iterator[None]:
    """While this is open, engines that the cluster replaces and connections made again are no leaks."""
    client_file = json.loads(cluster.parts.state.connection_file.read_text())
    ports = [value for value in client_file.values() if isinstance(value, int)]
    with leaks.holding_family_of(fork_server(cluster)), leaks.holding_connections_to(ports):
        yield


def fork_server(cluster: Any) -> int:
    """The pid of the process that forks a cluster's engines; 0 where they are on other hosts."""
    if not cluster.ranks.pids_here:
        return 0
    return psutil.Process(cluster.pids[0]).ppid()
