"""Writes the stubs of the calls that take a recipe's settings by name: the parameters that editors and type
checkers show for `cluster.train("autoencoder", ...)`, `nbgpu.sweep("survival", ...)` and the like.

They are written where nbgpu is built or installed (hatch_build.py), and are not committed. `Unpack` of a
TypedDict does not take their place: it would be generated, too, it shows no default and no help, and jedi
ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, presets, signatures
from nbgpu.planning.studies import StudyConfig
from nbgpu.planning.trials import SweepConfig

_ONE_OF = "list[{}]"
_ONE_OR_A_RANGE = "list[{}] | str"

_CLUSTER_HEAD = '''\
"""Written by docs/generate_stub.py from nbgpu/config/: the parameters of each recipe. See recipe_calls.py."""

import threading
from collections.abc import Sequence
from typing import Any, Literal, overload

from nbgpu.client.cluster.parts import ClusterParts
from nbgpu.client.runs.planning import BatchSizes
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.run import Run

class RecipeCalls:
    parts: ClusterParts
'''
_STUDIES_HEAD = '''\
"""Written by docs/generate_stub.py from nbgpu/config/: the parameters of each recipe. See starting.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from nbgpu.client.scaling.study import Study

def begin(
    recipe: str,
    vary: str,
    values: Sequence[Any],
    settings: Mapping[str, Any],
    advice: str = "",
    promised: float = 0.0,
) -> Study: ...
'''
_SWEEPS_HEAD = '''\
"""Written by docs/generate_stub.py from nbgpu/config/: the parameters of each recipe. See starting.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from nbgpu.client.sweeps.sweep import Sweep
from nbgpu.config import ClusterConfig

def begin(recipe: str, settings: Mapping[str, Any]) -> Sweep: ...
def go_on(resume: str | Path = "", **settings: Any) -> Sweep: ...
def places(cluster: ClusterConfig, parallel: int | None) -> list[str]: ...
'''


def cluster_stub() -> str:
    """The stub of the methods of a cluster."""
    stop = ["stop: threading.Event | None = None"]
    calls = [
        *_overloads("train", "Run", within="self", is_explained=True),
        *_overloads("plan", "Plan", within="self"),
        *_overloads("find_batch_size", "BatchSizes", stop, within="self"),
    ]
    return _CLUSTER_HEAD + "".join(f"    {line}\n" if line else "\n" for line in calls)


def studies_stub() -> str:
    """The stub of `nbgpu.scaling` and `nbgpu.study`."""
    given = [
        "ranks: Sequence[int] = (1, 2)",
        f"{signatures.parameter(StudyConfig, 'mode')}",
        f"{signatures.parameter(StudyConfig, 'repeats')}",
    ]
    calls = [
        *_overloads("scaling", "Study", given, beside=(StudyConfig, ClusterConfig)),
        *_overloads(
            "study", "Study", beside=(StudyConfig, ClusterConfig), several=_ONE_OF, varied=("ranks",)
        ),
    ]
    return _STUDIES_HEAD + "".join(f"{line}\n" for line in calls)


def sweeps_stub() -> str:
    """The stub of `nbgpu.sweep`."""
    calls = [
        *_overloads("sweep", "Sweep", ["/"], beside=(SweepConfig, ClusterConfig), several=_ONE_OR_A_RANGE),
        "@overload",
        "def sweep(*, resume: str | Path, **settings: Any) -> Sweep: ...",
    ]
    return _SWEEPS_HEAD + "".join(f"{line}\n" for line in calls)


STUBS: dict[str, Callable[[], str]] = {
    "client/cluster/recipe_calls.pyi": cluster_stub,
    "client/scaling/starting.pyi": studies_stub,
    "client/sweeps/starting.pyi": sweeps_stub,
}
"""The function that returns the text of each stub, by the stub's path in the package."""


def write(package: Path) -> None:
    """Write all stubs into the package in this folder."""
    for path, text in STUBS.items():
        (package / path).write_text(text())


def _overloads(
    name: str,
    returns: str,
    given: Sequence[str] = (),
    *,
    beside: Sequence[type[BaseModel]] = (),
    within: str = "",
    several: str = "",
    varied: Sequence[str] = (),
    is_explained: bool = False,
) -> Iterator[str]:
    """The lines of a call: an overload for each recipe, and one for recipes of a person's own.

    Args:
        name: the call.
        returns: the type of its result.
        given: its parameters behind the recipe.
        beside: the settings that it takes beside those of a recipe.
        within: the first parameter of a method.
        several: what it takes in place of one value of a recipe's setting.
        varied: the settings of `beside` of which it takes that, too.
        is_explained: whether the parameters are explained in a docstring. That of one call does for all.
    """
    first = [within] if within else []
    names_given = {text.partition(":")[0] for text in given}
    for recipe, model in TRAIN_CONFIGS.items():
        of_preset = [f'"{each}"' for each in ("", *presets.names(recipe))]
        yield "@overload"
        yield f"def {name}("
        for text in [*first, f'recipe: Literal["{recipe}"]', *given, "*"]:
            yield f"    {text},"
        yield f'    preset: Literal[{", ".join(of_preset)}] = "",'
        for setting in signatures.names_of(model):
            yield f"    {signatures.parameter(model, setting, several)},"
        for other in beside:
            for setting in signatures.names_of(other):
                if setting not in names_given:
                    yield f"    {signatures.parameter(other, setting, several if setting in varied else '')},"
        if is_explained:
            yield f") -> {returns}:"
            yield from _explained(model)
        else:
            yield f") -> {returns}: ..."
    yield "@overload"
    yield f"def {name}({', '.join([*first, 'recipe: str', *given, '**settings: Any'])}) -> {returns}: ..."


def _explained(model: type[TrainConfig]) -> Iterator[str]:
    yield f'    """{(model.__doc__ or "").strip()}'
    yield ""
    yield "    Args:"
    yield "        preset: the name of values for the settings that are not given"
    for setting in signatures.names_of(model):
        yield f"        {setting}: {signatures.help_for(model, setting)}"
    yield '    """'


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[1] / "nbgpu")
