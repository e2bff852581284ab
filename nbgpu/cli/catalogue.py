"""The commands, in the groups in which `nbgpu` lists them.

A command is a function with the command's name in a module of this folder. It takes the arguments after the
name, and returns the exit code, or None for 0. The module is imported only when the command is called. A new
command needs one line here.
"""

from __future__ import annotations

from dataclasses import dataclass


class UsageError(Exception):
    """The command line is wrong; the message shows the correct usage."""


@dataclass(frozen=True)
class Command:
    """One command, and the module with its function."""

    usage: str
    """The command line after `nbgpu`, beginning with the command's name."""
    what: str
    """The purpose of the command, as a phrase."""
    module: str
    """The name of the module in this folder."""
    examples: tuple[tuple[str, str], ...] = ()
    """Command lines for the help, each with its effect."""
    has_flags: bool = False
    """Whether the command has flags of settings, and therefore prints its help itself."""
    anywhere: bool = False
    """Whether the command works on every operating system, because it needs no ranks."""

    @property
    def name(self) -> str:
        return self.usage.split()[0]

    @property
    def sentence(self) -> str:
        """The purpose of the command, as a sentence."""
        return f"{self.what[0].upper()}{self.what[1:]}."


_TRAIN = (
    ("nbgpu train RECIPE --help", "the flags that matter most; --help-all lists every one"),
    ("nbgpu train RECIPE --preset NAME", "the settings of a guide; `nbgpu recipes` lists the presets"),
    ("nbgpu train RECIPE --config run.toml", "the settings of a file, such as those of an earlier run"),
    ("nbgpu train RECIPE --plan", "what the run would do and need; nothing is started"),
    ("nbgpu train RECIPE --find-batch-size", "the largest batch that fits, and the run with it"),
    ("nbgpu train my_recipe", "the recipe in my_recipe.py, which `nbgpu new my_recipe` writes"),
    (
        "torchrun --nproc-per-node=N -m nbgpu.engine.train run.toml",
        "the same training, without nbgpu's processes",
    ),
)
_SWEEP = (
    (
        "nbgpu sweep RECIPE --lr 1e-4,1e-3 --seed 0,1",
        "every combination, as many side by side as there are GPUs",
    ),
    ("nbgpu sweep RECIPE --random 20 --lr 1e-5..1e-2:log", "twenty trials with values drawn from a range"),
    ("nbgpu sweep --resume SWEEP_FOLDER", "its unfinished trials"),
)
_SCALING = (
    ("nbgpu scaling RECIPE --ranks 1,2,4", "how much faster a step becomes, and where its time goes"),
    ("nbgpu scaling RECIPE --vary bucket-mb --values 1,5,25 --ranks 2", "what one setting does to a step"),
    ("nbgpu scaling --resume STUDY_FOLDER", "its missing points"),
)
_PREDICT = (
    ("nbgpu predict RUN_FOLDER --data NEW --out FOLDER", "each of the new data, with a share on each rank"),
    ("nbgpu predict RUN_FOLDER --help", "also the settings of the run's recipe that may change"),
)
_CHARACTERIZE = (
    ("nbgpu characterize alloy.npy --out descriptors", "its descriptors, as numbers, a table and a picture"),
    ("nbgpu characterize found.npy --against alloy.npy", "how far one is from the other"),
)
_CONVERT = (
    ("nbgpu convert config.json environment.json --out run.toml", "the files of MONAI's tutorial 3d_ldm"),
    ("nbgpu convert brats.yml --out run.toml", "the file of Fast-DDPM"),
)
_RESULT = (("nbgpu result RUN_FOLDER", "the result of its newest checkpoint, on as many ranks as it had"),)
_REPORT = (
    (
        "nbgpu report nbgpu_runs/20260101-120000-autoencoder-1f2e",
        "report.html in that folder: settings, curves, pictures and result on a page that needs no network",
    ),
)
_EXPORT = (
    ("nbgpu export RUN_FOLDER --to slurm --nodes 2 --gpus-per-node 4", "a run's training as a job.sbatch"),
    ("nbgpu export notebook.ipynb --to torchrun", "the distributed cells of a notebook as a script"),
    ("nbgpu export --help", "the five formats, and what each takes"),
)
_DEMO = (
    ("nbgpu demo", "the notebook with its outputs, a page and the run's report, in the folder demo"),
    ("nbgpu demo elsewhere", "the same in another folder"),
)
_NOTEBOOKS = (("nbgpu notebooks lessons", "all of them, in a folder that is made; no file is overwritten"),)
_LAB = (
    ("nbgpu lab", "the first notebook; without a checkout in a copy in the folder notebooks"),
    ("nbgpu lab --no-browser --port 8888", "flags behind `lab` go to JupyterLab"),
)
_NEW = (
    ("nbgpu new my_recipe", "my_recipe.py in this folder, which trains a small network on generated points"),
)
_DOCTOR = (
    ("nbgpu doctor", "a line for each check; exits with 1 if something does not work"),
    ("nbgpu doctor --json", "the same for a program, or for a bug report"),
    ("nbgpu doctor --runs-dir FOLDER", "also checks the folder that runs write to"),
    (
        "nbgpu doctor --launcher slurm",
        "in a Slurm job: do ranks start on the nodes of this job, and how fast is each pair?",
    ),
    (
        "nbgpu doctor --launcher slurm --nodes 2",
        "do its hosts come and form a group, and how fast is each pair? With the flags of a cluster",
    ),
)
_TOP = (
    ("nbgpu top", "live on a terminal, where q ends it; else once"),
    ("nbgpu top --once", "once, also on a terminal"),
    ("nbgpu top --json", "once, for a program"),
)
_STOP = (
    ("nbgpu stop", "end the clusters whose notebook is gone"),
    ("nbgpu stop 1f2e", "end this one; `nbgpu ps` lists the ids"),
    ("nbgpu stop --all", "end all of your clusters, even those at work"),
)
_HOST = (("nbgpu host --join join.json", "dial in to the cluster that wrote the file, until it ends"),)
_COMPLETION = (
    ('eval "$(nbgpu completion bash)"', "for ~/.bashrc"),
    ('eval "$(nbgpu completion zsh)"', "for ~/.zshrc"),
    ("nbgpu completion fish | source", "for ~/.config/fish/config.fish"),
)

GROUPS: dict[str, tuple[Command, ...]] = {
    "Begin": (
        Command("demo [FOLDER]", "run the first notebook, and leave it and a report", "teaching", _DEMO),
        Command("notebooks DIR", "copy the teaching notebooks", "teaching", _NOTEBOOKS, anywhere=True),
        Command("lab", "open the first notebook in JupyterLab", "teaching", _LAB),
    ),
    "Train": (
        Command("recipes", "list the recipes, and what each takes", "recipes", anywhere=True),
        Command("new NAME", "write a recipe of your own to start from", "recipes", _NEW, anywhere=True),
        Command("train RECIPE", "train on all GPUs, or on CPU ranks", "training", _TRAIN, has_flags=True),
        Command(
            "sweep RECIPE", "train with every combination of settings", "many_runs", _SWEEP, has_flags=True
        ),
        Command(
            "scaling RECIPE",
            "measure how ranks or a setting change a step",
            "many_runs",
            _SCALING,
            has_flags=True,
        ),
    ),
    "Use results": (
        Command(
            "predict RUN_FOLDER", "apply a trained model to new data", "results", _PREDICT, has_flags=True
        ),
        Command(
            "result RUN_FOLDER", "work out the result of a stopped run", "results", _RESULT, has_flags=True
        ),
        Command("report RUN_FOLDER", "write one page that shows a run", "results", _REPORT),
        Command(
            "export RUN_OR_NOTEBOOK",
            "leave for torchrun, Slurm, Kubernetes",
            "results",
            _EXPORT,
            has_flags=True,
        ),
        Command(
            "characterize FILE ...",
            "measure descriptors of microstructures",
            "results",
            _CHARACTERIZE,
            has_flags=True,
        ),
        Command(
            "convert FILE ...",
            "take settings from the files of other tools",
            "results",
            _CONVERT,
            has_flags=True,
        ),
    ),
    "This machine": (
        Command("doctor [--json]", "check what works here, and say what to do", "host", _DOCTOR),
        Command("top", "the devices: how full, how busy, who has them", "host", _TOP),
        Command("ps", "list your clusters on this machine", "host"),
        Command("stop [ID ...] [--all]", "end the clusters that were left over", "host", _STOP),
        Command("host --join FILE", "make this machine a host of a cluster", "host", _HOST),
        Command(
            "completion SHELL",
            "print completion for bash, zsh or fish",
            "completion",
            _COMPLETION,
            anywhere=True,
        ),
    ),
}

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def overview() -> str:
    """Return the text that `nbgpu` without arguments prints, at most 80 columns wide."""
    lines = ["nbgpu runs cells and training on several GPUs, from JupyterLab or a terminal."]
    for title, commands in GROUPS.items():
        lines += ["", title, *(f"  nbgpu {command.usage:<22} {command.what}" for command in commands)]
    return "\n".join([*lines, "", "nbgpu COMMAND --help says more; nbgpu --version prints the version.", ""])
