"""The commands, in the groups in which `nbgpu` shows them.

A command is a function of the arguments after its name in a module of this folder, which is imported only
when the command is asked for. It returns the exit code, or None for 0. A new command is one line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command and where its function is."""

    usage: str
    """What stands after `nbgpu`, beginning with the command's name."""
    what: str
    module: str
    more: tuple[str, ...] = ()
    """Further lines of its help."""

    @property
    def name(self) -> str:
        return self.usage.split()[0]


_TRAIN = (
    "nbgpu train RECIPE --help            the flags that matter most; --help-all lists every one",
    "nbgpu train RECIPE --preset NAME     the settings of a guide; `nbgpu recipes` lists the presets",
    "nbgpu train RECIPE --config run.toml the settings of a file, such as those of an earlier run",
    "nbgpu train RECIPE --plan            what the run would do and take, and no more",
    "nbgpu train RECIPE --find-batch-size the largest batch that fits, and the run with it",
    "nbgpu train my_recipe                the recipe in my_recipe.py, which `nbgpu new my_recipe` writes",
    "The same with no notebook: torchrun --nproc-per-node=N -m nbgpu.engine.train run.toml",
)
_SWEEP = (
    "nbgpu sweep RECIPE --lr 1e-4,1e-3 --seed 0,1   every combination, as many side by side as there are GPUs",
    "nbgpu sweep --resume SWEEP_FOLDER              what of it is not finished",
)
_SCALING = (
    "nbgpu scaling RECIPE --ranks 1,2,4             how much faster a step becomes, and where its time goes",
    "nbgpu scaling RECIPE --vary bucket-mb --values 1,5,25 --ranks 2   what one setting does to a step",
    "nbgpu scaling --resume STUDY_FOLDER            what of it was not measured",
)

GROUPS: dict[str, tuple[Command, ...]] = {
    "Begin": (
        Command("demo [FOLDER]", "run the first notebook, and leave it and a report", "teaching"),
        Command("notebooks DIR", "copy the teaching notebooks", "teaching"),
        Command("lab", "open the first notebook in JupyterLab", "teaching"),
    ),
    "Train": (
        Command("recipes", "what can be trained, and what each recipe takes", "recipes"),
        Command("new NAME", "write a recipe of your own to start from", "recipes"),
        Command("train RECIPE", "train on all GPUs, or on CPU ranks", "training", _TRAIN),
        Command("sweep RECIPE", "train with every combination of settings", "sweeping", _SWEEP),
        Command("scaling RECIPE", "measure how ranks or a setting change a step", "scaling", _SCALING),
    ),
    "Use results": (
        Command(
            "predict RUN_FOLDER",
            "apply a trained model to new data",
            "results",
            ("nbgpu predict RUN_FOLDER --help lists the flags.",),
        ),
        Command("report RUN_FOLDER", "write one page that shows a run", "results"),
        Command("characterize FILE ...", "measure descriptors of microstructures", "results"),
        Command("convert FILE ...", "take settings from the files of other tools", "results"),
    ),
    "This machine": (
        Command("doctor [--json]", "what works here, what does not, what to do", "host"),
        Command(
            "top",
            "the devices: how full, how busy, who has them",
            "host",
            ("nbgpu top [--once] [--json]    live on a terminal, where q ends it; else once",),
        ),
        Command("ps", "your clusters on this host", "host"),
        Command("stop [ID ...] [--all]", "end those clusters that were left over", "host"),
        Command("completion SHELL", "print completion for bash, zsh or fish", "completion"),
    ),
}

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def overview() -> str:
    """What `nbgpu` alone prints; no line has more than 80 columns."""
    lines = ["nbgpu trains and explores on several GPUs, from JupyterLab or a terminal."]
    for title, commands in GROUPS.items():
        lines += ["", title, *(f"  nbgpu {each.usage:<22} {each.what}" for each in commands)]
    return "\n".join([*lines, "", "nbgpu COMMAND --help says more; nbgpu --version tells the version.", ""])
