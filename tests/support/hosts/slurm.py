"""A real Slurm on test hosts: slurmctld on the first, slurmd on the others, munge on all."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hosts.missing import why_missing
from hosts.namespaces import Host, Hosts, wait_until

_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
_IDLE_PATIENCE_S = 30.0
KILL_WAIT_S = 3
"""Between SIGTERM and SIGKILL."""

_CONFIGURATION = """\
ClusterName=nbgpu-test
SlurmctldHost={login}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/tmp/slurmd-spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1,sched_min_interval=0,requeue_delay=0
EnforcePartLimits=ALL
MpiDefault=none
ReturnToService=2
KillWait={kill_wait_s}
MinJobAge=300
MaxJobCount=50
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=10
GresTypes=gpu
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=01:00:00 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes={names} MaxTime=01:00:00 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=closed Nodes={names} State=DRAIN
PartitionName=theirs Nodes={names} AllowAccounts=astronomy State=UP
"""
_CGROUPS = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"


@dataclass(frozen=True)
class Slurm:
    """A Slurm that runs."""

    hosts: Hosts
    """The first is for logging in, the others are nodes."""
    folder: Path
    """Of its configuration, state and logs; all hosts see it."""
    environment: dict[str, str] = field(default_factory=dict)
    """What its programs need beside what every host has."""

    @property
    def login(self) -> Host:
        """The host with the notebook."""
        return next(iter(self.hosts.values()))

    @property
    def nodes(self) -> tuple[Host, ...]:
        """The hosts that run jobs; one that was off is another since."""
        return tuple(self.hosts.values())[1:]

    def run(self, command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a program, such as sbatch, on the login host."""
        return self.login.run(command, **options)  # type: ignore[arg-type]

    def idle_nodes(self) -> list[str]:
        """The names of the nodes that have no work and can take some."""
        words = self.run(["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %T"]).stdout
        return [line.split()[0] for line in words.splitlines() if line.split()[1] == "idle"]

    def wait_until_idle(self, patience_s: float = _IDLE_PATIENCE_S) -> None:
        """Wait until all nodes are idle."""
        wait_until(
            lambda: len(self.idle_nodes()) == len(self.nodes),
            patience_s,
            lambda: self.run(["sinfo", "--long", "--Node"]).stdout + self.logs(),
        )

    def cancel_all(self) -> None:
        """End every job, and wait until the nodes are idle again."""
        self.run(["scancel", "--user=root"])
        self.wait_until_idle()

    def start_node(self, host: Host) -> None:
        """Start what a node runs, such as when its host is on again."""
        _start_munge(host, self)
        host.run(["mkdir", "-p", "/tmp/slurmd-spool"])
        host.run(["slurmd"])

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)


def why_not() -> str:
    """Why Slurm cannot run on test hosts here; empty where it can."""
    return why_missing("no Slurm on this machine", _PROGRAMS)


@contextmanager
def slurm(hosts: Hosts, folder: Path, *, gpus_per_node: int = 2, cores_per_node: int = 2) -> Iterator[Slurm]:
    """Start Slurm: the first host is for logging in, all others are nodes. It ends with the hosts.

    Partitions: `debug`, whose jobs are requeued where one of `urgent` needs their nodes; `closed`, which
    takes none; `theirs`, which is for another account.

    Args:
        hosts: two or more.
        folder: an empty one that all hosts see.
        gpus_per_node: GPUs that Slurm counts and gives to jobs; they have device files and no more.
        cores_per_node: whether the machine has them or not.
    """
    login, *nodes = hosts.values()
    names = ",".join(node.name for node in nodes)
    for part in ("state", "log", "devices"):
        (folder / part).mkdir(parents=True)
    for number in range(gpus_per_node):
        # Slurm only looks whether there is a device file; this one is another /dev/null.
        os.mknod(folder / "devices" / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={cores_per_node} RealMemory=1000 "
        f"Gres=gpu:{gpus_per_node} State=UNKNOWN"
        for node in nodes
    ]
    configuration = _CONFIGURATION.format(
        login=login.name, folder=folder, kill_wait_s=KILL_WAIT_S, nodes="\n".join(lines), names=names
    )
    (folder / "slurm.conf").write_text(configuration)
    (folder / "cgroup.conf").write_text(_CGROUPS)
    devices = f"{folder}/devices/gpu[0-{gpus_per_node - 1}]"
    (folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={devices}\n")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    home = folder / "home"
    home.mkdir()
    # A job begins with a login shell. It reads no start-up files of this machine, which may take locks that
    # stay behind when a test ends the job in the middle of them.
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(home)}
    made = Slurm(hosts, folder, environment)
    _start_munge(login, made)
    login.run(["slurmctld", "-c"])
    for node in nodes:
        made.start_node(node)
    made.wait_until_idle()
    yield made


def _start_munge(host: Host, slurm: Slurm) -> None:
    host.environment |= slurm.environment
    host.run(
        [
            "munged",
            "--force",
            f"--key-file={slurm.folder}/munge.key",
            "--socket=/run/munge/munge.socket.2",
            "--pid-file=/run/munge/munged.pid",
            "--log-file=/run/munge/munged.log",
            "--seed-file=/run/munge/munged.seed",
        ]
    )
