"""Hosts by ssh: all of them are asked and started side by side, by the system's own ssh.

One connection to each host carries everything, and needs no password: `~/.ssh/config` and an agent count as
in a terminal. Secrets travel over its standard input, and stand in no command line and no environment.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nbgpu.errors import ClusterError
from nbgpu.host import versions
from nbgpu.machine.signals import uninterrupted

_CONNECT_TIMEOUT_S = 10
_PATIENCE_S = 60.0
_TIDYING_LOOKS = 60
"""Every tenth of a second, for the end of a program that was told to end."""
_OPTIONS = (
    # There is nobody whom ssh could ask for a password.
    "BatchMode=yes",
    f"ConnectTimeout={_CONNECT_TIMEOUT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ControlMaster=auto",
    "ControlPersist=20",
)
_READ = (
    "import json, sys; "
    "sys.version_info < (3, 8) and sys.exit('Python %d.%d is too old: nbgpu needs 3.11' % sys.version_info[:2]); "
    'request = json.loads(sys.stdin.readline()); exec(request["code"])'
)

_NOTHING: Mapping[str, Any] = {
    "packages": versions.PACKAGES,
    "versions": {},
    "command": [],
    "connection": "",
    "working_folder": "",
}
"""A request that starts nothing."""
_SETUP_FAILED = 125
_NO_CONNECTION = (
    (r"Could not resolve hostname", "there is no host of that name"),
    (r"No route to host|Network is unreachable", "there is no way to it from here"),
    (r"Connection refused", "it refuses the connection: no sshd runs there, or on another port"),
    (r"timed out|Timeout|Connection closed by UNKNOWN", f"it did not answer within {_CONNECT_TIMEOUT_S} s"),
    (
        r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        "its host key is not the one that is known here, or none is known: run `ssh {host}` once in a terminal and "
        "compare the key",
    ),
    (
        r"Permission denied",
        "it takes no key of yours: `ssh-copy-id {host}` puts one there, and `ssh-add` gives it to the agent. nbgpu "
        "cannot type a password",
    ),
)
"""What ssh says, and what that means."""


@dataclass(frozen=True)
class RemoteProcess:
    """A program that was started on a host."""

    host: str
    pid: int
    folder: str
    """Of the program alone, on the host; only the user can enter it. Its log is `host.log`."""


@dataclass(frozen=True)
class SshOptions:
    """How hosts are reached, and what runs there."""

    python: str = "python3"
    """The interpreter there: a path, or a name that a shell without a terminal finds."""
    options: Sequence[str] = ()
    """More arguments of ssh, such as ['-F', 'config'] or ['-p', '2222']."""
    through: Sequence[str] = ()
    """The beginning of a command line by which ssh is run elsewhere; empty for here."""
    setup: str = ""
    """Lines of shell that run before Python."""


class SshHosts:
    """Connections to hosts. `close` ends them; what was started there goes on.

    Args:
        hosts: names or addresses as ssh takes them, also 'user@host'.
        settings: how they are reached.
    """

    def __init__(self, hosts: Sequence[str], settings: SshOptions | None = None) -> None:
        self.hosts = tuple(hosts)
        self._settings = settings or SshOptions()
        if not self._settings.through and shutil.which("ssh") is None:
            raise ClusterError(
                "there is no ssh on this host, and launcher='ssh' needs it: install openssh-client"
            )
        # A short path: a socket's has at most 108 bytes.
        self._sockets = f"/tmp/nbgpu-ssh-{secrets.token_hex(6)}"
        made = self._settled(["mkdir", "-m", "700", self._sockets])
        if made.returncode:
            raise ClusterError(f"no folder for connections can be made: {made.stderr.strip()}")

    def reach(self) -> list[str]:
        """Connect to every host and compare the versions. Return the address by which each knows this host.

        Raises:
            ClusterError: a host cannot be reached or has other versions, with a line for each such host.
        """
        answers, problems = self._compared(self._on_every_host(lambda host: self._answer(host, _NOTHING)))
        if problems:
            raise ClusterError("\n".join(problems))
        return [answer["caller"] for answer in answers.values()]

    def start(self, command: Sequence[str], connection: str, working_folder: str = "") -> list[RemoteProcess]:
        """Start a program on every host.

        Args:
            command: its words. '{python}' stands for the interpreter there, and '{folder}' for a new folder.
            connection: the text of the file `connection.json` in that folder, which only the user can read.
            working_folder: where the program runs; the home folder on a host that does not have it.

        Returns:
            One process for each host, in their order.

        Raises:
            ClusterError: a host cannot be reached or has other versions, with a line for each such host. What
                was started on the others is ended.
        """
        request = {
            **_NOTHING,
            "versions": versions.here(),
            "command": list(command),
            "connection": connection,
            "working_folder": working_folder,
        }
        answers, problems = self._compared(self._on_every_host(lambda host: self._answer(host, request)))
        started = [RemoteProcess(host, answer["pid"], answer["folder"]) for host, answer in answers.items()]
        if problems:
            self.end(started)
            raise ClusterError("\n".join(problems))
        return started

    def _compared(self, answers: Sequence[Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """The answers of the hosts that are as this one, and a line for each other host."""
        wanted = versions.here()
        good, problems = {}, []
        for host, answer in zip(self.hosts, answers, strict=True):
            if isinstance(answer, ClusterError):
                problems.append(str(answer))
            elif different := versions.differences(answer["versions"], wanted):
                problems.append(f"{host} has other versions than this notebook: {', '.join(different)}")
            else:
                good[host] = answer
        return good, problems

    def ended(self, processes: Sequence[RemoteProcess]) -> list[RemoteProcess]:
        """Return those that have ended.

        Raises:
            ClusterError: a host cannot be reached.
        """
        with uninterrupted(), ThreadPoolExecutor(max(1, len(processes))) as pool:
            pending = [(process, pool.submit(self.alive, process)) for process in processes]
            return [process for process, alive in pending if not alive.result()]

    def alive(self, process: RemoteProcess) -> bool:
        """Whether a program that was started still runs.

        Raises:
            ClusterError: its host cannot be reached.
        """
        return not self._shell(process.host, f"kill -0 {process.pid} 2>/dev/null").returncode

    def runs_in(self, process: RemoteProcess) -> bool:
        """Whether a program whose command line names its folder still runs. A host that was off since may
        have given the program's number to another one.

        Raises:
            ClusterError: its host cannot be reached.
        """
        found = f"grep -qs {shlex.quote(process.folder)} /proc/{process.pid}/cmdline"
        return not self._shell(process.host, found).returncode

    def log(self, process: RemoteProcess, num_lines: int = 20) -> str:
        """The last lines that a program has written.

        Raises:
            ClusterError: its host cannot be reached.
        """
        return self._shell(process.host, f"tail -n {num_lines} {shlex.quote(process.folder)}/host.log").stdout

    def end(self, processes: Sequence[RemoteProcess]) -> None:
        """End programs with all that they have started in their sessions, and remove their folders. A host
        that is out of reach is passed over: what runs there has to see that for itself."""

        def end(process: RemoteProcess) -> None:
            # First SIGTERM, which lets it tidy up; `kill` of a group is that of a session's first process. A
            # busy host takes its time to remove the cluster's folder there, which would stay otherwise.
            pid, folder = process.pid, shlex.quote(process.folder)
            looks = " ".join(map(str, range(_TIDYING_LOOKS)))
            patience = f"for i in {looks}; do kill -0 -{pid} 2>/dev/null || break; sleep 0.1; done"
            words = f"kill -TERM -{pid}; {patience}; kill -KILL -{pid}; rm -rf {folder}"
            self._shell(process.host, f"{{ {words}; }} 2>/dev/null; true")

        with uninterrupted(), ThreadPoolExecutor(max(1, len(processes))) as pool:
            for done in [pool.submit(end, process) for process in processes]:
                error = done.exception()
                if error is not None and not isinstance(error, ClusterError):
                    raise error

    def close(self) -> None:
        """End the connections."""
        self._on_every_host(lambda host: self._ssh(host, ["-O", "exit"], ""))
        self._settled(["rm", "-rf", self._sockets])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_every_host(self, ask: Callable[[str], Any]) -> list[Any]:
        """The answers of all hosts in their order; a ClusterError takes the place of an answer."""
        with uninterrupted(), ThreadPoolExecutor(max(1, len(self.hosts))) as pool:
            pending = [pool.submit(ask, host) for host in self.hosts]
        answers: list[Any] = []
        for done in pending:
            error = done.exception()
            if error is not None and not isinstance(error, ClusterError):
                raise error
            answers.append(error or done.result())
        return answers

    def _answer(self, host: str, request: Mapping[str, Any]) -> dict[str, Any]:
        code = Path(__file__).with_name("remote_start.py").read_text()
        # One argument: the host's shell gets the words joined by spaces.
        words = shlex.join([self._settings.python, "-c", _READ])
        if self._settings.setup:
            # What it writes would stand among what is read.
            words = f"{{ {self._settings.setup}\n}} >&2 </dev/null || exit {_SETUP_FAILED}\nexec {words}"
        done = self._reached(host, self._ssh(host, [], json.dumps({**request, "code": code}) + "\n", words))
        lines = [line for line in done.stdout.splitlines() if line.startswith("nbgpu ")]
        if done.returncode or not lines:
            raise ClusterError(f"{host}: {self._why_no_answer(done)}")
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix("nbgpu "))
        return answer

    def _why_no_answer(self, ended: subprocess.CompletedProcess[str]) -> str:
        """Say why a host's Python gave no answer: the lines of `setup` failed, there is no such Python, or it
        ended with an error."""
        output = (ended.stderr or ended.stdout).strip().splitlines()
        last = output[-1] if output else f"exit status {ended.returncode}"
        python = self._settings.python
        if ended.returncode == _SETUP_FAILED and self._settings.setup:
            return f"the lines of setup failed there: {last}"
        if ended.returncode in {126, 127}:
            return (
                f"there is no {python} ({last}). launcher_options={{'python': ...}} names the Python there that has "
                "nbgpu, with its path"
            )
        return f"{python} failed there: {last}"

    def _shell(self, host: str, words: str) -> subprocess.CompletedProcess[str]:
        return self._reached(host, self._ssh(host, [], "", words))

    def _ssh(
        self, host: str, options: Sequence[str], stdin: str, words: str = ""
    ) -> subprocess.CompletedProcess[str]:
        ours = [word for option in (*_OPTIONS, f"ControlPath={self._sockets}/%C") for word in ("-o", option)]
        return self._settled(
            ["ssh", *self._settings.options, *ours, *options, "--", host, *filter(None, [words])], stdin
        )

    def _settled(self, command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        words = [*self._settings.through, *command]
        # A connection that stays open keeps what it has inherited: files, so that nobody waits for its end.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                status = subprocess.run(
                    words,
                    input=stdin.encode(),
                    stdout=output,
                    stderr=errors,
                    check=False,
                    timeout=_PATIENCE_S,
                    start_new_session=True,
                ).returncode
            except subprocess.TimeoutExpired:
                status = 255
                errors.write(f"Timeout: nothing came within {_PATIENCE_S:.0f} s".encode())
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(words, status, *texts)

    @staticmethod
    def _reached(host: str, done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        """The same, if ssh itself has not failed."""
        if done.returncode != 255:
            return done
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        for pattern, meaning in _NO_CONNECTION:
            if re.search(pattern, done.stderr):
                words = next((line for line in reversed(said) if re.search(pattern, line)), said[-1])
                raise ClusterError(f"{host}: {meaning.format(host=host)} (ssh: {words})")
        raise ClusterError(f"{host} is not reached: ssh says {' '.join(said) or 'nothing'}")
