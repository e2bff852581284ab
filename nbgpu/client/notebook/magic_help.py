"""The texts of `%nbgpu help`, `%nbgpu?` and `%%distributed --help`."""

from __future__ import annotations

COMMANDS = {
    "start": (
        "[--gpus auto|free:N|all|none|0,1|UUID,...] [--ranks N] [--wait] ...",
        "start a cluster; start --help has all flags",
    ),
    "status": ("", "each rank's device, process, memory and current line"),
    "stop": ("", "end the cluster; the ranks' variables are gone then"),
    "restart": (
        "[--rank K [--replay]]",
        "end the cluster and start it again, or replace one rank, which may run its cells again",
    ),
    "resize": ("N", "change the number of ranks; those that stay keep their variables"),
    "attach": ("[ID]", "connect to a cluster that an earlier kernel has kept"),
    "ps": ("", "your clusters on this machine"),
    "doctor": ("", "look at this machine: what works, what does not, what to do"),
    "debug": ("[--rank K]", "pdb where the last cell failed, on a rank"),
    "vars": ("[PATTERN]", "the ranks' variables, and where the ranks differ"),
    "save": ("FOLDER [NAME ...]", "write the ranks' variables into a folder"),
    "load": ("FOLDER [NAME ...] [--trust]", "give them back, to new ranks too"),
    "sync": ("", "repeat the notebook's imports on the ranks"),
    "autoreload": ("[on|off]", "load edited modules again on the ranks before each cell"),
    "help": ("", "this list"),
}
"""The commands of `%nbgpu`: the arguments of each, and its effect."""

_EXAMPLES = """\
    %nbgpu start --gpus 0,1                  two ranks, one on each of these GPUs
    %nbgpu start --gpus free:2 --wait        two free GPUs, once two are free
    %nbgpu start --gpus none --ranks 2       two CPU ranks

    %%distributed                            a cell for every rank, which has rank, world_size, device, torch, dist
    model = torch.nn.Linear(8, 1).to(device)

    %distributed model.weight.sum()          one line for every rank
    %push lr                                 a variable of the notebook to the ranks
    %pull loss                               a variable of rank 0 to the notebook
    %nbgpu vars                              what the ranks have

%%distributed --help has the options of a cell, and %pull? and %push? have theirs. In Python:
nbgpu.current().train?"""

EXAMPLES_OF_CELLS = """\
examples of the first line of a cell:
    %%distributed                      on every rank
    %%distributed --ranks 0            on rank 0 alone
    %%distributed --into losses        losses[1] is the last value of rank 1
    %%distributed --timeout 60         interrupt the ranks after a minute

%nbgpu help lists the commands for the cluster."""


def _commands() -> str:
    """Return a line for each command with its effect, which moves to a line of its own behind long
    commands."""
    lines = [(f"%nbgpu {name} {arguments}".rstrip(), text) for name, (arguments, text) in COMMANDS.items()]
    return "\n".join(
        f"    {line:<40} {text}" if len(line) < 40 else f"    {line}\n{'':45}{text}" for line, text in lines
    )


HELP = f"""\
Starts, shows and ends the cluster whose ranks run distributed cells.

{_commands()}

Examples:

{_EXAMPLES}"""
"""The text that `%nbgpu help` prints."""
