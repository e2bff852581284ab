"""The hosts to test with: that they are apart, that they fail as hosts do, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
import leaks
import pytest
from hosts.namespaces import namespace_of, wait_until

pytestmark = pytest.mark.hosts

_ECHO = """
import socket
server = socket.create_server(("n2", 4000))
print("listens", flush=True)
connection, _ = server.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""
_TALK = """
import socket, sys
connection = socket.create_connection(("n2", 4000), timeout=20)
for line in sys.stdin:
    connection.sendall(line.encode())
    try:
        print(connection.recv(100).decode().strip() or "closed", flush=True)
    except TimeoutError:
        print("silence", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with (
        hosts.make_hosts(["n1", "n2"], folder, private=[Path.home()]) as made,
        leaks.holding(lambda leftover: made.have(leftover.pid)),
    ):
        yield made


def test_hosts_reach_each_other_by_name(two: hosts.Hosts) -> None:
    assert two["n1"].run(["hostname"]).stdout == "n1\n"
    assert two["n1"].run(["getent", "hosts", "n2"]).stdout.split() == ["198.18.0.11", "n2"]
    assert two["n1"].python("print(6 * 7)") == "42\n"


def test_hosts_have_folders_processes_and_networks_of_their_own(two: hosts.Hosts, tmp_path: Path) -> None:
    n1, n2 = two.values()
    for folder in ("/tmp", "/run", "/dev/shm", str(Path.home())):
        n1.run(["touch", f"{folder}/of-n1"])
        assert n2.run(["test", "-e", f"{folder}/of-n1"], check=False).returncode == 1
        assert not Path(folder, "of-n1").exists()
    assert n1.run(["test", "-e", str(tmp_path)], check=False).returncode == 1
    sleeper = n1.popen(["sleep", "60"])
    try:
        wait_until(lambda: "sleep" in n1.run(["ps", "-e"]).stdout, 20, lambda: "no sleep on n1")
        assert "sleep" not in n2.run(["ps", "-e"]).stdout
    finally:
        sleeper.kill()
        sleeper.wait()
    for kind in ("net", "uts", "ipc", "mnt", "pid"):
        assert len({host.namespaces[kind] for host in two.values()} | {namespace_of(os.getpid(), kind)}) == 3


def test_a_host_has_no_way_out(two: hosts.Hosts) -> None:
    assert two["n1"].run(["ip", "route", "show", "default"]).stdout == ""
    assert (
        "198.18.0" not in subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    )


def test_a_fresh_host_listens_nowhere(two: hosts.Hosts) -> None:
    assert two["n1"].listening() == []
    server = two["n1"].popen(
        [
            sys.executable,
            "-c",
            "import socket; s = socket.create_server(('', 4001)); print(1, flush=True); s.accept()",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        server.stdout.readline()
        assert two["n1"].listening() == [("0.0.0.0", 4001)]
    finally:
        server.kill()
        server.communicate()
    wait_until(lambda: two["n1"].listening() == [], 20, two["n1"].listening)


def test_a_program_gets_signals_and_ends_with_its_process_here(two: hosts.Hosts) -> None:
    n1 = two["n1"]
    first = n1.popen(
        ["sh", "-c", "trap 'echo got it; exit 7' USR1; echo ready; while :; do sleep 0.05; done"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout.readline() == "ready\n"
    n1.send_signal(first, signal.SIGUSR1)
    assert first.communicate(timeout=20)[0] == "got it\n"
    assert first.returncode == 7
    second = n1.popen(["sleep", "60"])
    wait_until(lambda: "sleep" in n1.run(["ps", "-e"]).stdout, 20, n1.pids)
    second.kill()
    second.wait()
    wait_until(lambda: not n1.pids(), 20, n1.pids)


def test_a_program_that_fails_says_why(two: hosts.Hosts) -> None:
    with pytest.raises(RuntimeError, match=r"ls /nothing on n1 ended with 2:\n.*No such file"):
        two["n1"].run(["ls", "/nothing"])


@pytest.fixture
def conversation(two: hosts.Hosts) -> Iterator[subprocess.Popen[str]]:
    """A program on n1, of which each line goes to n2 and back."""
    pipe = subprocess.PIPE
    server = two["n2"].popen([sys.executable, "-c", _ECHO], stdout=pipe, text=True)
    assert server.stdout.readline() == "listens\n"
    talk = two["n1"].popen([sys.executable, "-c", _TALK], stdin=pipe, stdout=pipe, text=True)
    yield talk
    for process in (talk, server):
        process.kill()
        process.communicate()


def _said(talk: subprocess.Popen[str], line: str) -> str:
    assert talk.stdin is not None
    assert talk.stdout is not None
    talk.stdin.write(line + "\n")
    talk.stdin.flush()
    return talk.stdout.readline().strip()


def test_a_cut_link_loses_what_is_sent_and_resets_nothing(
    two: hosts.Hosts, conversation: subprocess.Popen[str]
) -> None:
    assert _said(conversation, "hello") == "hello"
    two["n2"].cut_link()
    conversation.stdin.write("lost\n")
    conversation.stdin.flush()
    time.sleep(1.0)  # in which a reset would have come
    assert two["n2"].run(["sh", "-c", "echo still on"]).stdout == "still on\n"
    two["n2"].mend_link()
    # The connection is the same one, and TCP sends once more what was lost.
    assert conversation.stdout.readline().strip() == "lost"
    assert _said(conversation, "again") == "again"


def test_a_host_without_power_says_nothing_and_comes_back_empty(
    two: hosts.Hosts, conversation: subprocess.Popen[str]
) -> None:
    assert _said(conversation, "hello") == "hello"
    two["n2"].run(["touch", "/tmp/of-before"])
    two["n2"].power_off()
    assert not two["n2"].is_on
    conversation.stdin.write("lost\n")
    conversation.stdin.flush()
    time.sleep(0.5)
    assert conversation.poll() is None
    assert two.power_on("n2").run(["ls", "/tmp/of-before"], check=False).returncode == 2
    # The new kernel of n2, so to speak, knows nothing of the connection.
    assert conversation.stdout.readline().strip() == "ConnectionResetError"


def test_a_link_can_be_slow(two: hosts.Hosts) -> None:
    n1, n2 = two["n1"], two["n2"]
    n1.limit_link(80e6)
    code = "import socket\ns = socket.create_server(('n2', 4002)); print(1, flush=True)\nc, _ = s.accept()\nwhile c.recv(2**16): pass"
    server = n2.popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    server.stdout.readline()
    send = (
        "import socket, time\nc = socket.create_connection(('n2', 4002)); t = time.monotonic()\n"
        "c.sendall(bytes(4 * 2**20)); c.shutdown(socket.SHUT_WR); c.recv(1); print(time.monotonic() - t)"
    )
    took_s = float(n1.python(send))
    server.communicate(timeout=20)
    assert took_s > 0.3  # 4 MiB at 10 MB/s


def test_nothing_of_hosts_is_left(tmp_path: Path) -> None:
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    with hosts.make_hosts(["a", "b"], tmp_path) as made:
        spaces = {space for host in made.values() for space in host.namespaces.values()}
        made["a"].run(["sh", "-c", "sleep 60 > /dev/null 2>&1 &"])
        made["b"].power_off()
    kinds = ("net", "uts", "ipc", "mnt", "pid")
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    assert not spaces & {namespace_of(pid, kind) for pid in pids for kind in kinds}
    assert (
        subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout == links
    )


def test_hosts_end_with_a_test_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; import hosts\n"
        f"with hosts.make_hosts(['a'], Path({str(tmp_path)!r})) as made:\n"
        "    print(made['a'].pid, flush=True); time.sleep(60)"
    )
    support = Path(hosts.__file__).parents[1]
    test = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(support)},
    )
    pid = int(test.stdout.readline())
    test.kill()
    test.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 20, lambda: f"process {pid} is there")
