"""A real sshd on test hosts, with keys of the test's own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts.missing import why_missing
from hosts.namespaces import Host, Hosts, wait_until

_PROGRAMS = {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
_PORT = 22
_PATIENCE_S = 20.0

_SERVER = """\
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PidFile /run/sshd/sshd.pid
LogLevel VERBOSE
"""
_CLIENT = """\
Host *
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class SecureShell:
    """The way from the first host to the others."""

    hosts: Hosts
    configuration: Path
    """A file for `ssh -F`."""

    def command(self, host: str) -> list[str]:
        """The beginning of a command line that runs the rest of it on a host."""
        return ["ssh", "-F", str(self.configuration), "-o", "BatchMode=yes", host]

    def run(self, host: str, command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a program on a host by way of ssh from the first host."""
        first = next(iter(self.hosts.values()))
        return first.run([*self.command(host), *command], **options)  # type: ignore[arg-type]


def why_not() -> str:
    """Why sshd cannot run on test hosts here; empty where it can."""
    return why_missing("no sshd on this machine", _PROGRAMS)


@contextmanager
def secure_shell(hosts: Hosts, folder: Path) -> Iterator[SecureShell]:
    """Start sshd on all hosts but the first, from which they are reached. It ends with the hosts.

    Args:
        hosts: two or more.
        folder: an empty one that all hosts see.
    """
    folder.mkdir(parents=True)
    for name in ("host_key", "user_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    _, *others = hosts.values()
    known = [f"{host.name},{host.address} {host_key}\n" for host in others]
    (folder / "known_hosts").write_text("".join(known))
    configuration = folder / "config"
    configuration.write_text(_CLIENT.format(folder=folder))
    for host in others:
        start_sshd(host, folder)
    for host in others:
        wait_until(lambda host=host: (host.address, _PORT) in host.listening(), _PATIENCE_S, host.listening)
    yield SecureShell(hosts, configuration)


def start_sshd(host: Host, folder: Path) -> None:
    """Start sshd on one host, with the keys in `folder`."""
    server = folder / f"sshd_config-{host.name}"
    server.write_text(_SERVER.format(address=host.address, folder=folder))
    host.run(["/usr/sbin/sshd", "-f", str(server)])
