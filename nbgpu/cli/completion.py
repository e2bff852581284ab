"""The command `nbgpu completion bash|zsh|fish`, which prints a completion script.

The script contains all words, so that completion does not start Python. It must be printed again after an
update of nbgpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, get_args, get_origin

from nbgpu.cli.catalogue import COMMANDS, UsageError
from nbgpu.cli.command_flags import fields_of
from nbgpu.config import TRAIN_CONFIGS, presets

SHELLS = ("bash", "zsh", "fish")
WITH_RECIPE = ("train", "sweep", "scaling")
"""The commands whose first argument is a recipe."""

_FIXED_WORDS: Mapping[str, Sequence[str]] = {
    "completion": SHELLS,
    "doctor": ("--json", "--launcher", "--runs-dir"),
    "stop": ("--all",),
    "top": ("--once", "--json"),
}
"""The words of commands without flags of settings."""
_HELP = ("--help", "--help-all")

_BASH = """\
# For ~/.bashrc: eval "$(nbgpu completion bash)"
_nbgpu() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    local command="${{COMP_WORDS[1]}}" recipe="${{COMP_WORDS[2]}}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help --version"
    elif [ "$COMP_CWORD" -eq 2 ] && [[ " {with_recipe} " == *" $command "* ]]; then
        words="{recipes} --help"
    elif [ "$before" = --preset ]; then
        case "$recipe" in
{presets}
        esac
    else
        case "$before" in
{choices}
        *) case "$command $recipe" in
{flags}
            esac ;;
        esac
    fi
    # Without a match the shell offers files.
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _nbgpu nbgpu
"""
_BEFORE_ZSH = """\
# For ~/.zshrc: eval "$(nbgpu completion zsh)"
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
# It runs functions that are written for bash.
autoload -Uz bashcompinit && bashcompinit
"""


def completion(arguments: list[str]) -> None:
    """Print the script that completes `nbgpu` in a shell."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UsageError("usage: nbgpu completion bash|zsh|fish")
    print(script(arguments[0]), end="")


def flags_of(command: str, recipe: str | None = None) -> list[str]:
    """Return the flags of a command, in order."""
    return [_flag(name) for name, _ in fields_of(command, recipe)]


def script(shell: str) -> str:
    """Return the script for one shell."""
    if shell == "fish":
        return _fish()
    bash = _bash()
    # zsh can run completion functions of bash; only the first line, a comment, is replaced.
    return bash if shell == "bash" else _BEFORE_ZSH.format() + bash.partition("\n")[2]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _choices() -> dict[str, tuple[str, ...]]:
    """Return the values of the flags of type `Literal`, by flag, over all commands and recipes."""
    choices: dict[str, tuple[str, ...]] = {}
    others = [command for command in COMMANDS if command not in WITH_RECIPE]
    commands = [*product(TRAIN_CONFIGS, WITH_RECIPE), *((None, command) for command in others)]
    for name, info in (field for recipe, command in commands for field in fields_of(command, recipe)):
        kinds = [info.annotation, *get_args(info.annotation)]
        values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if values:
            choices[_flag(name)] = tuple(dict.fromkeys([*choices.get(_flag(name), ()), *map(str, values)]))
    return choices


def _bash() -> str:
    """Return the script for bash: a `case` with the words for each command, recipe and flag."""
    flags: dict[str, Sequence[str]] = {
        f"{command} {recipe}": [*flags_of(command, recipe), *_HELP]
        for command in WITH_RECIPE
        for recipe in TRAIN_CONFIGS
    }
    # A recipe in a user's file has at least the flags that all recipes have.
    flags |= {f"{command} *": [*flags_of(command), *_HELP] for command in COMMANDS if flags_of(command)}
    flags |= {f"{command} *": values for command, values in _FIXED_WORDS.items()}
    return _BASH.format(
        commands=" ".join(COMMANDS),
        recipes=" ".join(TRAIN_CONFIGS),
        with_recipe=" ".join(WITH_RECIPE),
        presets=_cases({recipe: presets.names(recipe) for recipe in TRAIN_CONFIGS}),
        choices=_cases(_choices()),
        flags=_cases(flags),
    )


def _cases(words: Mapping[str, Iterable[str]]) -> str:
    """Return the branches of a `case` in bash, which set `words`, by pattern. A pattern is quoted, except for
    a star at its end."""
    return "\n".join(
        f'        "{pattern.removesuffix("*")}"{"*" * pattern.endswith("*")}) words="{" ".join(values)}" ;;'
        for pattern, values in words.items()
    )


def _fish() -> str:
    """Return the completions for fish: the commands, and the flags of each, which depend on the recipe."""
    lines = ["# For ~/.config/fish/config.fish: nbgpu completion fish | source"]
    first = "complete -c nbgpu -f -n __fish_use_subcommand"
    lines += [f"{first} -a {entry.name} -d '{entry.what}'" for entry in COMMANDS.values()]
    for command, values in _FIXED_WORDS.items():
        lines.append(f"complete -c nbgpu -n '__fish_seen_subcommand_from {command}' -a '{' '.join(values)}'")
    choices: dict[str, Sequence[str]] = {**_choices()}
    for command in WITH_RECIPE:
        is_command = f"__fish_seen_subcommand_from {command}"
        no_recipe = f"not __fish_seen_subcommand_from {' '.join(TRAIN_CONFIGS)}"
        lines.append(f"complete -c nbgpu -n '{is_command}; and {no_recipe}' -a '{' '.join(TRAIN_CONFIGS)}'")
        by_recipe = {recipe: flags_of(command, recipe) for recipe in TRAIN_CONFIGS}
        common = [flag for flag in flags_of(command) if all(flag in flags for flags in by_recipe.values())]
        lines += _fish_flags(is_command, [flag for flag in common if flag != "--preset"], choices)
        # A recipe in a user's file has at least the flags that all recipes have.
        rest = [flag for flag in flags_of(command) if flag not in common]
        lines += _fish_flags(f"{is_command}; and {no_recipe}", rest, choices)
        for recipe, flags in by_recipe.items():
            others = [flag for flag in flags if flag not in common or flag == "--preset"]
            lines += _fish_flags(
                f"{is_command}; and __fish_seen_subcommand_from {recipe}",
                others,
                choices | {"--preset": presets.names(recipe)},
            )
    for command in COMMANDS:
        if command not in WITH_RECIPE:
            lines += _fish_flags(f"__fish_seen_subcommand_from {command}", flags_of(command), choices)
    return "\n".join(lines) + "\n"


def _fish_flags(condition: str, flags: Iterable[str], values: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield the completions of flags in fish, with the values of those that take one of a few.

    Args:
        condition: the command line to which the flags apply, as commands of fish.
        flags: the flags.
        values: the values by flag.
    """
    for flag in flags:
        choice = f" -x -a '{' '.join(values[flag])}'" if flag in values else ""
        yield f"complete -c nbgpu -n '{condition}' -l {flag[2:]}{choice}"
