"""The fixture that fails a test for what it leaves behind: each kind is left behind here, on purpose."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import leaks
import pytest
from leaks import Leftover, free_of, holding, holding_connections_to

CAREFUL_AND_CARELESS_TESTS = """
import os, socket, subprocess, sys, tempfile, threading, time
from pathlib import Path
import leaks, pytest

leaks.GRACE_S = 0.3
kept = []
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]

def test_tidy(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOUR", "blue")
    with tempfile.TemporaryDirectory(), socket.create_server(("127.0.0.1", 0)):
        thread = threading.Thread(target=time.sleep, args=(0.1,))
        thread.start()
    subprocess.run([sys.executable, "-c", "pass"], check=True)

def test_slow_to_go():
    threading.Thread(target=time.sleep, args=(0.1,)).start()

def test_process():
    kept.append(subprocess.Popen(sleep))

def test_orphan():
    # The parent is gone at once, and the child belongs to init.
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"])

def test_thread():
    kept.append(threading.Thread(target=time.sleep, args=(60,), daemon=True, name="straggler"))
    kept[-1].start()

def test_listener():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_socket():
    kept.append(socket.socketpair())

def test_temp_folder():
    tempfile.mkdtemp(prefix="straggler")

def test_temp_file():
    Path(tempfile.gettempdir(), "straggler").write_text("")

def test_variable():
    os.environ["STRAGGLER"] = "1"

def test_changed_variable():
    os.environ["HOME"] = "/nowhere"

def test_removed_variable():
    del os.environ["HOME"]

@pytest.fixture(scope="module")
def holds_a_listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener

def test_module_fixture(holds_a_listener):
    pass

@pytest.fixture(scope="module")
def forgets_a_listener():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_last_in_a_forgetful_module(forgets_a_listener):
    pass
"""

Verdicts = dict[str, str]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """What the fixture said of each test above: empty where it let it pass."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "test_inner.py").write_text(CAREFUL_AND_CARELESS_TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "leaks", "--junitxml=result.xml", "test_inner.py"]
    support = Path(leaks.__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(support), str(support / "warm")])}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, timeout=360)
    cases = ElementTree.parse(folder / "result.xml").iter("testcase")
    found: Verdicts = {}
    for case in cases:
        problems = [problem.get("message", "") + (problem.text or "") for problem in case]
        found[str(case.get("name"))] = found.get(str(case.get("name")), "") + "".join(problems)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_tidy", "test_slow_to_go", "test_module_fixture"])
def test_what_cleans_up_passes(verdicts: Verdicts, name: str) -> None:
    assert verdicts[name] == ""


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("test_process", r"process \d+: .*time\.sleep\(60\)"),
        ("test_orphan", r"process \d+: .*time\.sleep\(60\)"),
        ("test_thread", r"thread 'straggler'"),
        ("test_listener", r"LISTEN socket .*127\.0\.0\.1"),
        ("test_socket", r"socket:\["),
        ("test_temp_folder", r"straggler\w+ in the temporary folder"),
        ("test_temp_file", r"straggler in the temporary folder"),
        ("test_variable", r"environment variable STRAGGLER='1'"),
        ("test_changed_variable", r"environment variable HOME=.* was removed or changed"),
        ("test_removed_variable", r"environment variable HOME=.* was removed or changed"),
        ("test_last_in_a_forgetful_module", r"LISTEN socket .*127\.0\.0\.1"),
    ],
)
def test_what_is_left_behind_is_named(verdicts: Verdicts, name: str, named: str) -> None:
    assert "left behind" in verdicts[name]
    assert re.search(named, verdicts[name])


def test_one_leak_blames_one_test(verdicts: Verdicts) -> None:
    """What was reported once is taken away or known, so that no later test or scope is blamed for it."""
    assert "STRAGGLER" not in verdicts["test_changed_variable"]
    assert "straggler" not in verdicts["test_last_in_a_forgetful_module"]
    assert verdicts["test_last_in_a_forgetful_module"].count("left behind:\n") == 2, "message and text, once"


def test_what_somebody_holds_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)

    def is_mine(leftover: Leftover) -> bool:
        return "MINE" in leftover.text

    def leave(name: str) -> None:
        with free_of("variable"):
            monkeypatch.setenv(name, "1")

    with holding(is_mine):
        leave("MINE")
        with pytest.raises(pytest.fail.Exception, match="OTHERS"):
            leave("OTHERS")


def test_a_connection_that_is_made_late_is_held_and_a_second_one_is_a_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with holding_connections_to([server.getsockname()[1]]):
            with free_of("socket"):
                late = socket.create_connection(server.getsockname())
            with pytest.raises(pytest.fail.Exception, match="ESTABLISHED socket"), free_of("socket"):
                second = socket.create_connection(server.getsockname())
        late.close()
        second.close()


def test_only_the_named_kinds_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with free_of("process", "thread"):
        monkeypatch.setenv("SOMETHING", "1")


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Kinds: process, thread, socket, temp, variable"), free_of("window"):
        pass
