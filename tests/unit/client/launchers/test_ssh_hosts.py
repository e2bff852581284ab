"""Programs on hosts that ssh reaches: started side by side, with a secret that stays one, and every way in
which that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
from hosts.namespaces import wait_until

from nbgpu.client.launchers.ssh import SshHosts, SshOptions
from nbgpu.client.launchers.ssh_launcher import SshLauncher
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError
from nbgpu.host import versions

pytestmark = pytest.mark.hosts

SECRET = "o0-the-key-of-a-cluster-0o"
SLEEP = [
    "{python}",
    "-c",
    "print('begun', flush=True); import time; time.sleep(60)",
    "{folder}/connection.json",
]


def _settings(test_ssh: hosts.SecureShell, *more: str, python: str = sys.executable) -> SshOptions:
    laptop = test_ssh.hosts["laptop"]
    return SshOptions(python, [*more, "-F", str(test_ssh.configuration)], laptop.entering([]))


@pytest.fixture
def both(test_ssh: hosts.SecureShell) -> Iterator[SshHosts]:
    with SshHosts(["n1", "n2"], _settings(test_ssh)) as opened:
        yield opened


def test_a_program_runs_on_both_hosts_until_it_is_ended(both: SshHosts, test_ssh: hosts.SecureShell) -> None:
    started = both.start(SLEEP, SECRET)
    assert [process.host for process in started] == ["n1", "n2"]
    for process in started:
        wait_until(lambda process=process: both.log(process) == "begun\n", 30, lambda p=process: both.log(p))
        assert both.alive(process)
        shown = test_ssh.hosts[process.host].run(
            [
                "sh",
                "-c",
                f"stat -c '%a' {process.folder} {process.folder}/*; cat {process.folder}/connection.json",
            ]
        )
        assert shown.stdout == f"700\n600\n600\n{SECRET}"
    both.end(started)
    for process in started:
        assert not both.alive(process)
        gone = test_ssh.hosts[process.host].run(["test", "-e", process.folder], check=False)
        assert gone.returncode == 1


def test_it_outlives_the_connection(test_ssh: hosts.SecureShell) -> None:
    with SshHosts(["n1"], _settings(test_ssh)) as first:
        (process,) = first.start(SLEEP, SECRET)
    with SshHosts(["n1"], _settings(test_ssh)) as second:
        assert second.alive(process)
        second.end([process])
        assert not second.alive(process)


def test_no_connection_is_left(test_ssh: hosts.SecureShell) -> None:
    with SshHosts(["n1", "n2"], _settings(test_ssh)) as opened:
        opened.reach()
        assert "ssh" in test_ssh.hosts["laptop"].run(["ps", "-eo", "comm"]).stdout
    wait_until(lambda: not test_ssh.hosts["laptop"].pids(), 30, test_ssh.hosts["laptop"].pids)


def test_the_secret_is_in_no_command_line_and_no_environment(
    both: SshHosts, test_ssh: hosts.SecureShell
) -> None:
    started = both.start(SLEEP, SECRET)
    seen = 0
    for host in test_ssh.hosts.values():
        for pid in host.pids():
            for what in ("cmdline", "environ"):
                seen += 1
                assert SECRET.encode() not in Path(f"/proc/{pid}/{what}").read_bytes()
    assert seen > 6
    both.end(started)


def test_a_host_with_another_torch_is_named_and_nothing_is_left_on_the_other(
    both: SshHosts, test_ssh: hosts.SecureShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # n2 sees another torch first.
    n2 = test_ssh.hosts["n2"]
    folder = "/tmp/older/torch-2.0.0.dist-info"
    n2.run(["sh", "-c", f"mkdir -p {folder}; printf 'Name: torch\\nVersion: 2.0.0\\n' > {folder}/METADATA"])
    python = "/tmp/python-of-a-test"
    n2.run(
        ["sh", "-c", f"printf '#!/bin/sh\\nPYTHONPATH=/tmp/older exec {sys.executable} \"$@\"\\n' > {python}"]
    )
    test_ssh.hosts["n1"].run(["sh", "-c", f"printf '#!/bin/sh\\nexec {sys.executable} \"$@\"\\n' > {python}"])
    for name in ("n1", "n2"):
        test_ssh.hosts[name].run(["chmod", "+x", python])
    own = versions.here()
    with (
        SshHosts(["n1", "n2"], _settings(test_ssh, python=python)) as opened,
        pytest.raises(ClusterError) as caught,
    ):
        opened.start(SLEEP, SECRET)
    assert (
        str(caught.value) == f"n2 has other versions than this notebook: torch 2.0.0 and not {own['torch']}"
    )
    assert (
        test_ssh.hosts["n1"].run(["sh", "-c", "ls -d /tmp/nbgpu-*/connection.json"], check=False).stdout == ""
    )


def test_differences_are_named() -> None:
    own = {"Python": "3.11", "torch": "2.13.0", "nbgpu": "0.4"}
    assert versions.differences(own, own) == []
    other = {"Python": "3.12", "torch": "2.13.0", "nbgpu": None}
    assert versions.differences(other, own) == ["Python 3.12 and not 3.11", "no nbgpu"]


def test_a_host_without_that_python(test_ssh: hosts.SecureShell) -> None:
    with (
        SshHosts(["n1"], _settings(test_ssh, python="/opt/none/python")) as opened,
        pytest.raises(ClusterError, match=r"^n1: there is no /opt/none/python \(.*\)\. launcher_options="),
    ):
        opened.start(SLEEP, SECRET)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "more", "words"),
    [
        ("laptop", [], "laptop: it refuses the connection: no sshd runs there, .*Connection refused"),
        ("n1.nowhere.invalid", [], "n1.nowhere.invalid: there is no host of that name .*resolve hostname"),
        ("198.18.0.99", ["-o", "ConnectTimeout=4"], "198.18.0.99: (there is no way to it|it did not answer)"),
        ("n1", ["-o", "UserKnownHostsFile=/dev/null"], "n1: its host key is not .*verification failed"),
        ("n1", ["-o", "User=nobody"], "n1: it takes no key of yours: `ssh-copy-id n1`.*Permission denied"),
        ("192.0.2.1", [], "192.0.2.1: there is no way to it from here .*unreachable"),
    ],
)
def test_a_host_that_is_not_reached_is_named_with_the_reason(
    test_ssh: hosts.SecureShell, host: str, more: list[str], words: str
) -> None:
    with (
        SshHosts([host, "n2"], _settings(test_ssh, *more)) as opened,
        pytest.raises(ClusterError, match=f"^{words}"),
    ):
        opened.start(SLEEP, SECRET)
    left = test_ssh.hosts["n2"].run(["sh", "-c", "ls -d /tmp/nbgpu-*/connection.json"], check=False)
    assert left.stdout == ""


@pytest.mark.slow
def test_two_hosts_are_asked_at_the_same_time(test_ssh: hosts.SecureShell) -> None:
    """Each takes the same while, in which the interpreter there sleeps."""
    slow = "/tmp/slow-python"
    for name in ("n1", "n2"):
        script = f'#!/bin/sh\\ndate +%%s.%%N > /tmp/begun; sleep 2; date +%%s.%%N > /tmp/over; exec {sys.executable} "$@"\\n'
        test_ssh.hosts[name].run(["sh", "-c", f"printf '{script}' > {slow}; chmod +x {slow}"])
    with SshHosts(["n1", "n2"], _settings(test_ssh, python=slow)) as opened:
        opened.reach()
    spans = [
        [float(test_ssh.hosts[name].run(["cat", f"/tmp/{when}"]).stdout) for when in ("begun", "over")]
        for name in ("n1", "n2")
    ]
    assert max(begun for begun, _ in spans) < min(over for _, over in spans)


def test_hosts_start_although_the_notebooks_folder_was_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    join_file = tmp_path / "join.json"
    join_file.write_text(SECRET)
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    started: list[str] = []

    def start(command: list[str], connection: str) -> list[str]:
        started.append(connection)
        return []

    launcher = SshLauncher(ClusterConfig.checked(launcher="ssh", hosts="n1"))
    connections: Any = SimpleNamespace(start=start)
    monkeypatch.setattr(launcher, "_connections", connections)
    launcher.start(join_file, "eth0 (10.0.0.1)")
    assert started == [SECRET]
