"""The exports to Kubernetes: an indexed Job, a JobSet, or a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

from nbgpu.exports import shell
from nbgpu.exports.program import IN_CONTAINER, RUNS_IN_CONTAINER, Program
from nbgpu.exports.settings import ExportConfig


def job(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of a Job with a Service, which need nothing but Kubernetes."""
    # One failed pod takes the others with it, which torchrun would wait for.
    backoff = str(settings.max_restarts * settings.nodes)
    return _filled("job.yaml", program, settings, at=6, backoff_limit=backoff, deadline_at=2)


def jobset(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of a JobSet."""
    return _filled("jobset.yaml", program, settings, at=12)


def trainjob(program: Program, settings: ExportConfig) -> Mapping[str, str]:
    """Return the files of a TrainJob."""
    return _filled("trainjob.yaml", program, settings, at=20, program_at=4, deadline_at=2)


def _filled(
    template: str,
    program: Program,
    settings: ExportConfig,
    at: int,
    program_at: int | None = None,
    deadline_at: int = 0,
    **more: str,
) -> Mapping[str, str]:
    """Fill in a template.

    Args:
        at: the indentation of the pod's lists.
        program_at: that of the program's arguments; left out: as the container's fields.
        deadline_at: that of the time limit.
    """
    inside = at + 2
    values = {
        "title": program.title,
        "name": program.name,
        "nodes": str(settings.nodes),
        "ranks_per_node": str(program.ranks_per_node),
        "max_restarts": str(settings.max_restarts),
        "threads": str(shell.threads(program, settings)),
        "image": settings.image or "IMAGE",
        "settings": _settings(program),
        "queue": _queue(settings.queue),
        "deadline": " " * deadline_at + f"activeDeadlineSeconds: {settings.time_limit_s}"
        if settings.time_limit_s
        else "",
        "program": _indented(_arguments(program), inside if program_at is None else program_at),
        "container": _indented(_container(program, settings), inside),
        "resources": _indented(_resources(program, settings), 6),
        "mounts": _indented(_mounts(), 22),
        "volumes": _indented(_volumes(program, settings), at),
        **more,
    }
    return {template: shell.filled(template, values)}


def _settings(program: Program) -> str:
    files = "\n".join(f"  {name}: |\n{_indented(text, 4)}" for name, text in program.files.items())
    return shell.filled("settings.yaml", {"name": program.name, "files": files}).rstrip("\n")


def _arguments(program: Program) -> str:
    words = [f"{IN_CONTAINER}/{word}" if word in program.files else word for word in program.arguments]
    return "\n".join(f"- {json.dumps(word)}" if word.startswith("-") else f"- {word}" for word in words)


def _container(program: Program, settings: ExportConfig) -> str:
    return "\n".join(
        [
            "env:",
            "- name: POD_IP",
            "  valueFrom:",
            "    fieldRef:",
            "      fieldPath: status.podIP",
            "- name: NBGPU_JOB",
            f"  value: {program.name}",
            "- name: OMP_NUM_THREADS",
            f'  value: "{shell.threads(program, settings)}"',
            "# torchrun would keep one store for all its restarts, in which the ranks find the addresses of ended ones.",
            "- name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            '  value: "1"',
            "# A token, such as WANDB_API_KEY, comes from a Secret and stands in no file:",
            "# - name: WANDB_API_KEY",
            "#   valueFrom: {secretKeyRef: {name: SECRET, key: WANDB_API_KEY}}",
            "resources:",
            _indented(_resources(program, settings), 2),
            "volumeMounts:",
            _mounts(),
        ]
    )


def _resources(program: Program, settings: ExportConfig) -> str:
    """The requests, and equal limits of what cannot be shared. Without nvidia.com/gpu a pod gets no GPU, and
    nobody says so."""
    shared = [f'nvidia.com/gpu: "{program.gpus_per_node}"'] if program.gpus_per_node else []
    if settings.memory:
        shared.append(f"memory: {settings.memory}i")
    limits = [f"  {line}" for line in shared]
    asked = ["requests:", f'  cpu: "{shell.cpus(program, settings)}"', *limits]
    return "\n".join([*asked, *(["limits:", *limits] if limits else [])])


def _mounts() -> str:
    return "\n".join(
        [
            "- name: shm",
            "  mountPath: /dev/shm",
            "- name: program",
            f"  mountPath: {IN_CONTAINER}",
            "- name: runs",
            f"  mountPath: {RUNS_IN_CONTAINER}",
        ]
    )


def _volumes(program: Program, settings: ExportConfig) -> str:
    size = settings.shared_memory
    return "\n".join(
        [
            "volumes:",
            "# /dev/shm has 64 MiB otherwise, and data workers die of SIGBUS. What is in it counts as memory.",
            "- name: shm",
            "  emptyDir:",
            "    medium: Memory",
            *([f"    sizeLimit: {size}i"] if size else []),
            "- name: program",
            "  configMap:",
            f"    name: {program.name}",
            "- name: runs",
            "  persistentVolumeClaim:",
            f"    claimName: {settings.claim or 'CLAIM'}",
        ]
    )


def _queue(queue: str) -> str:
    return f"  labels:\n    kueue.x-k8s.io/queue-name: {queue}" if queue else ""


def _indented(text: str, by: int) -> str:
    # A line of spaces may be a part of a string in the program, and keeps its own.
    return textwrap.indent(text.removesuffix("\n"), " " * by, lambda line: line != "\n")
