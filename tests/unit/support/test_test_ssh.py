"""The ssh to test with: from a laptop to two hosts that share no folder."""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest

pytestmark = pytest.mark.hosts


def test_both_hosts_are_reached(test_ssh: hosts.SecureShell) -> None:
    assert [test_ssh.run(name, ["hostname"]).stdout for name in ("n1", "n2")] == ["n1\n", "n2\n"]


@pytest.mark.slow
def test_they_share_no_home_and_no_temporary_folder(test_ssh: hosts.SecureShell) -> None:
    for folder in (Path.home(), "/tmp", "/var/tmp"):
        test_ssh.run("n1", ["touch", f"{folder}/of-n1"])
        assert test_ssh.run("n2", ["test", "-e", f"{folder}/of-n1"], check=False).returncode == 1
        assert not Path(folder, "of-n1").exists()


def test_sshd_listens_on_one_address(test_ssh: hosts.SecureShell) -> None:
    assert test_ssh.hosts["n1"].listening() == [("198.18.0.11", 22)]
    assert test_ssh.hosts["laptop"].listening() == []


def test_a_host_that_nobody_knows_is_refused(test_ssh: hosts.SecureShell) -> None:
    done = test_ssh.run("laptop", ["true"], check=False)
    assert done.returncode == 255
    assert "Connection refused" in done.stderr
