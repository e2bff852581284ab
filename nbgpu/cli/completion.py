"""`nbgpu completion bash|zsh|fish`.

The script has all words in it, so that Tab starts no Python. It is printed anew after an update of nbgpu.
"""

from __future__ import annotations

from nbgpu.cli.catalogue import COMMANDS
from nbgpu.cli.usage import UsageError, nearest
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, presets
from nbgpu.config.settings import unused

SHELLS = ("bash", "zsh", "fish")
_WITH_RECIPE = ("train", "sweep", "scaling")

_BASH = """\
# For ~/.bashrc: eval "$(nbgpu completion bash)"
_nbgpu() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help --version"
    elif [ "$before" = completion ]; then
        words="bash zsh fish"
    else
        case "${{COMP_WORDS[1]}}" in {with_recipe})
            if [ "$COMP_CWORD" -eq 2 ]; then
                words="{recipes}"
            elif [ "$before" = --preset ]; then
                case "${{COMP_WORDS[2]}}" in
{presets}
                esac
            elif [[ "$word" == -* ]]; then
                case "${{COMP_WORDS[2]}}" in
{flags}
                esac
            fi ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _nbgpu nbgpu
"""


def completion(arguments: list[str]) -> None:
    """Print the script that completes `nbgpu` in a shell."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        near = nearest(arguments[0], SHELLS) if arguments else ""
        raise UsageError(f"usage: nbgpu completion bash|zsh|fish.{near}")
    print(script(arguments[0]), end="")


def flags_of(recipe: str) -> list[str]:
    """The flags of `nbgpu train RECIPE`, in order."""
    model = TRAIN_CONFIGS[recipe]
    names = ["config", "preset", "plan", "find_batch_size", *ClusterConfig.model_fields, *model.model_fields]
    left_out = {"recipe", *unused(model)}
    return [f"--{name.replace('_', '-')}" for name in dict.fromkeys(names) if name not in left_out]


def script(shell: str) -> str:
    """The script for one shell."""
    if shell == "fish":
        return _fish()
    words = {
        "presets": {recipe: presets.names(recipe) for recipe in TRAIN_CONFIGS},
        "flags": {recipe: [*flags_of(recipe), "--help", "--help-all"] for recipe in TRAIN_CONFIGS},
    }
    cases = {
        name: "\n".join(f'                    {r}) words="{" ".join(of[r])}" ;;' for r in of)
        for name, of in words.items()
    }
    bash = _BASH.format(
        commands=" ".join(COMMANDS),
        recipes=" ".join(TRAIN_CONFIGS),
        with_recipe="|".join(_WITH_RECIPE),
        **cases,
    )
    if shell == "bash":
        return bash
    # zsh runs bash's functions with a module of its own.
    head = '# For ~/.zshrc: eval "$(nbgpu completion zsh)"\nautoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n'
    return head + bash.partition("\n")[2]


def _fish() -> str:
    lines = ["# For ~/.config/fish/config.fish: nbgpu completion fish | source"]
    first = "complete -c nbgpu -f -n __fish_use_subcommand"
    lines += [f"{first} -a {each.name} -d '{each.what}'" for each in COMMANDS.values()]
    lines.append("complete -c nbgpu -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'")
    seen = f"__fish_seen_subcommand_from {' '.join(_WITH_RECIPE)}"
    lines.append(f"complete -c nbgpu -n '{seen}' -a '{' '.join(TRAIN_CONFIGS)}'")
    for recipe in TRAIN_CONFIGS:
        given = f"-n '{seen}; and __fish_seen_subcommand_from {recipe}'"
        lines.append(f"complete -c nbgpu {given} -l preset -x -a '{' '.join(presets.names(recipe))}'")
        names = (flag[2:] for flag in flags_of(recipe) if flag != "--preset")
        lines += [f"complete -c nbgpu {given} -l {name}" for name in names]
    return "\n".join(lines) + "\n"
