"""Hosts to test with, in namespaces of this machine, with a real Slurm and a real sshd on them.

with make_hosts(["login", "n1", "n2"], folder) as hosts:
    hosts["n1"].run(["hostname"]).stdout  # 'n1\n'
    with slurm(hosts, folder) as cluster:
        cluster.run(["srun", "--nodes=2", "hostname"])

A host has a network, a name, processes, mounts, shared memory and temporary folders of its own, and sees all
else of this machine, which gives it the checkout and its Python.
"""

from hosts.batch_step import BatchStep
from hosts.far_python import FarPython
from hosts.namespaces import Host, Hosts, leave_the_network, make_hosts
from hosts.namespaces import why_not as why_no_hosts
from hosts.secure_shell import SecureShell, secure_shell
from hosts.secure_shell import why_not as why_no_ssh
from hosts.site import Site
from hosts.slurm import Slurm, slurm
from hosts.slurm import why_not as why_no_slurm

__all__ = [
    "BatchStep",
    "FarPython",
    "Host",
    "Hosts",
    "SecureShell",
    "Site",
    "Slurm",
    "leave_the_network",
    "make_hosts",
    "secure_shell",
    "slurm",
    "why_not",
]


def why_not() -> str:
    """Why this machine can have no test hosts with Slurm and sshd; empty where it can."""
    return why_no_hosts() or why_no_slurm() or why_no_ssh()
