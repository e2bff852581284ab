"""Test hosts: processes in namespaces of their own, whose networks meet at a switch."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from hosts.missing import why_missing

_NETWORK = "198.18.0"
"""RFC 2544 keeps these addresses for tests of networks; no network routes them."""
_FIRST_ADDRESS = 10
_NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")
_PRIVATE = ("/tmp", "/run", "/dev/shm")
_ALONE_S = 30.0
_CLONE_NEWNET = 0x40000000
_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}


class Host:
    """One test host.

    Args:
        name: of the host; the others reach it by this name.
        address: on the interface eth0.
        process: that holds the host's process 1; its standard input keeps the host on.
        pid: of its process 1, as this machine sees it.
        switch_pid: of the process that holds the switch's namespace.
    """

    def __init__(
        self, name: str, address: str, process: subprocess.Popen[str], pid: int, switch_pid: int
    ) -> None:
        self.name = name
        self.address = address
        self.pid = pid
        self.environment: dict[str, str] = {}
        """Variables that every program on this host gets."""
        self.process = process
        self._switch_pid = switch_pid
        self.namespaces = {kind: namespace_of(pid, kind) for kind in _NAMESPACES}
        """The inode of each of its namespaces, which tells it from all others."""

    def run(
        self,
        command: Sequence[str],
        *,
        check: bool = True,
        timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host to its end.

        Raises:
            RuntimeError: it failed, with what it wrote, unless `check` is False.
        """
        done = subprocess.run(
            self.entering(command),
            capture_output=True,
            text=True,
            input=stdin or "",
            timeout=timeout_s,
            env=self._variables(environment),
            check=False,
        )
        if check and done.returncode:
            words = (done.stdout + done.stderr).strip()
            raise RuntimeError(f"{' '.join(command)} on {self.name} ended with {done.returncode}:\n{words}")
        return done

    def popen(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on this host. It ends with the process that is returned, and gets its signals by
        `send_signal` of this class."""
        return subprocess.Popen(self.entering(command), env=self._variables(environment), **options)

    def python(self, code: str, **options: Any) -> str:
        """Run code with this environment's Python on this host and return what it prints."""
        return self.run([sys.executable, "-c", code], **options).stdout

    @staticmethod
    def send_signal(process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to a program that `popen` has started: its process is a child of nsenter."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)

    def pids(self) -> list[int]:
        """The processes of this host but its first, as this machine numbers them."""
        mine = self.namespaces["pid"]
        return [pid for pid in _all_pids() if pid != self.pid and namespace_of(pid, "pid") == mine]

    def listening(self) -> list[tuple[str, int]]:
        """The addresses and ports on which this host accepts TCP connections, by the kernel's table."""
        lines = []
        for table, kind in (("tcp", 4), ("tcp6", 6)):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A":
                    address, port = local.split(":")
                    lines.append((_address_of(address, kind), int(port, 16)))
        return sorted(lines)

    def power_off(self) -> None:
        """End all processes of this host at once. The other hosts hear nothing of it."""
        self.cut_link()
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        # The kernel removes it some time after the host, whose name may be needed before.
        self._switch(f"link delete {_port(self.name)}", may_be_gone=True)

    @property
    def is_on(self) -> bool:
        """Whether the host's process 1 runs."""
        return self.process.poll() is None

    def cut_link(self) -> None:
        """Lose everything that this host sends and is sent, without a word to either side."""
        self._switch(f"link set {_port(self.name)} nomaster")

    def mend_link(self) -> None:
        """Undo `cut_link`."""
        self._switch(f"link set {_port(self.name)} master br0")

    def limit_link(self, bits_per_s: float) -> None:
        """Let this host send and receive no more than this; call again for another rate."""
        limit = f"rate {int(bits_per_s)}bit burst 128kb latency 100ms"
        _in_network(
            self._switch_pid, ["tc", *f"qdisc replace dev {_port(self.name)} root tbf {limit}".split()]
        )
        _in_network(self.pid, ["tc", *f"qdisc replace dev eth0 root tbf {limit}".split()])

    def _switch(self, words: str, may_be_gone: bool = False) -> None:
        try:
            _in_network(self._switch_pid, ["ip", *words.split()])
        except RuntimeError as error:
            if not (may_be_gone and "Cannot find device" in str(error)):
                raise

    def entering(self, command: Sequence[str]) -> list[str]:
        """The command line by which a program that is started here runs on this host."""
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        # A signal to nsenter reaches it alone; with its end, though, goes what it has started.
        outlived_by_none = ["setpriv", "--pdeathsig", "KILL"]
        return ["nsenter", "--target", str(self.pid), *spaces, "--wd=/", "--", *outlived_by_none, *command]

    def _variables(self, more: Mapping[str, str] | None) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name not in {"TMPDIR", "HOSTNAME"}}
        return {**ours, "HOSTNAME": self.name, **self.environment, **(more or {})}


class Hosts(Mapping[str, Host]):
    """The test hosts by name, in the order in which they were named.

    Args:
        begin: starts the hosts of these names.
        names: of all hosts.
    """

    def __init__(self, begin: Callable[[Sequence[str]], dict[str, Host]], names: Sequence[str]) -> None:
        self._begin = begin
        self._hosts = begin(names)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def power_on(self, name: str) -> Host:
        """Start a host that was powered off, with its name and address and nothing of what it held."""
        self._hosts |= self._begin([name])
        return self[name]

    def have(self, pid: int | None) -> bool:
        """Whether a process is of one of these hosts, and ends with them."""
        if pid is None:
            return False
        mine = {host.namespaces["pid"] for host in self.values()} | {""}
        return namespace_of(pid, "pid") in mine or any(host.process.pid == pid for host in self.values())


@contextmanager
def make_hosts(
    names: Sequence[str],
    folder: Path,
    *,
    shared: Sequence[Path] = (),
    private: Sequence[Path] = (),
    desk: str = "",
) -> Iterator[Hosts]:
    """Make hosts that reach each other by name and nothing else; call where `why_not` is empty.

    They end with the block, and with this process if it is killed.

    Args:
        names: of the hosts.
        folder: an empty folder for what they need, which all of them see.
        shared: more folders that all of them see where they lie in a private one, such as in /tmp.
        private: folders that each of them has for itself, beside /tmp, /run and /dev/shm.
        desk: the name by which they reach this process, which has called `leave_the_network`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = [*names, *([desk] if desk else [])]
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(named, _FIRST_ADDRESS)}
    hosts_file = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    hosts_file.write_text("\n".join(lines) + "\n")
    everywhere = [folder, *shared, *_needed_for_python()]
    description = {
        "hosts_file": str(hosts_file),
        "private": [*_PRIVATE, *map(str, private)],
        "shared": [str(path.resolve()) for path in everywhere],
    }
    with ExitStack() as stack:
        switch = _started(["unshare", "--net", "--", "sh", "-c", "echo $$; exec cat"])
        stack.callback(_end, switch)
        switch_pid = int(_line(switch))
        _in_network(switch_pid, ["ip", "-batch", "-"], "link add br0 type bridge\nlink set br0 up\n")

        def begin(wanted: Sequence[str]) -> dict[str, Host]:
            processes = {}
            # They are made side by side.
            for name in wanted:
                processes[name] = _started(_host_command({**description, "name": name}))
                stack.callback(_end, processes[name])
            hosts = {
                name: Host(name, addresses[name], process, int(_line(process)), switch_pid)
                for name, process in processes.items()
            }
            _connect({name: (addresses[name], host.pid) for name, host in hosts.items()}, switch_pid)
            return hosts

        if desk:
            _connect({desk: (addresses[desk], os.getpid())}, switch_pid)
            stack.callback(_in_network, os.getpid(), ["ip", "link", "delete", "eth0"])
        yield Hosts(begin, names)


def why_not() -> str:
    """Why no test hosts can be made on this machine; empty where they can."""
    if missing := why_missing("test hosts need programs", _PROGRAMS):
        return missing
    if os.geteuid() != 0:
        return "test hosts are made in namespaces, which needs root here"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return f"no namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


def namespace_of(pid: int, kind: str) -> str:
    """The inode of a process's namespace; empty where the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return ""


def _host_command(description: Mapping[str, Any]) -> list[str]:
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child=KILL"]
    first = Path(__file__).with_name("first_process.py")
    return ["unshare", *spaces, "--", sys.executable, "-I", "-S", str(first), json.dumps(description)]


def _connect(hosts: Mapping[str, tuple[str, int]], switch_pid: int) -> None:
    """Give every host its interface, the other end of which is a port of the switch.

    Args:
        hosts: the address of each, by name, and a process in its network.
        switch_pid: a process in the switch's.
    """
    ports = []
    for name, (address, pid) in hosts.items():
        port = _port(name)
        # A host that is on again has the hardware that it had, and nobody need ask for it.
        hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        ports.append(f"link add {port} type veth peer name eth0 address {hardware} netns {pid}")
        ports.append(f"link set {port} master br0 up")
    _in_network(switch_pid, ["ip", "-batch", "-"], "\n".join(ports) + "\n")
    for address, pid in hosts.values():
        lines = f"addr add {address}/24 dev eth0\nlink set eth0 up\nlink set lo up\n"
        _in_network(pid, ["ip", "-batch", "-"], lines)


def leave_the_network() -> None:
    """Give this process, which has one thread, and those that it will start a network of their own, with
    nothing in it. Test hosts can then be made for which this process is another host."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network of its own can be made for this process")


def _in_network(pid: int, command: Sequence[str], stdin: str = "") -> None:
    """Run a program in the network namespace of a process."""
    entering = ["nsenter", "--target", str(pid), "--net", "--", *command]
    done = subprocess.run(entering, input=stdin, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{stdin}")


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process whose standard input stays open as long as it is to live."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _line(process: subprocess.Popen[str]) -> str:
    output: IO[str] | None = process.stdout
    assert output is not None
    line = output.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait()} before it was ready")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that lives as long as its standard input is open."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_ALONE_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _needed_for_python() -> list[Path]:
    repository = Path(__file__).resolve().parents[3]
    return [repository, Path(sys.prefix), Path(sys.base_prefix)]


def _port(name: str) -> str:
    return f"p-{name}"


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _address_of(digits: str, kind: int) -> str:
    """'0A00A8C0' as an address: the kernel writes it in words of four bytes, the lowest byte first."""
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    packed = b"".join(words)
    return str(ipaddress.IPv4Address(packed) if kind == 4 else ipaddress.IPv6Address(packed))


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], object], patience_s: float, otherwise: Callable[[], object]) -> None:
    """Wait until a call returns what counts as true.

    Raises:
        TimeoutError: it did not in time; with what `otherwise()` says.
    """
    give_up_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"not within {patience_s:.0f} s: {otherwise()}")
        time.sleep(0.02)
