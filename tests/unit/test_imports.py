"""Who may import whom, what `import nbgpu` costs, and which names are public."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import nbgpu

PACKAGE = Path(__file__).resolve().parents[2] / "nbgpu"

HOUSE = [
    "__init__",
    "cli",
    "server",
    "ui.__init__",
    "ui.presenter",
    "ui.controls",
    "ui.devices",
    "ui.overlap",
    "ui.reports",
    "ui.table_in_terminal",
    "ui.sweep",
    "ui.study",
    "ui.prediction",
    "ui.run",
    "ui.followed",
    "ui.cell",
    "ui.slot",
    "client.demo",
    "client.notebook",
    "client.sweeps",
    "client.scaling",
    "client.cluster",
    "client.cells",
    "client.variables",
    "client.runs",
    "client.faults",
    "client.state",
    "client.host",
    "client.engines",
    "client.launchers",
    "client.ipykernel",
    "client.presenting",
    "client.__init__",
    "recipes",
    "engine.process",
    "engine.measurements",
    "engine.train",
    "engine.training",
    "engine.scaling",
    "engine.dry_run",
    "engine.saved_variables",
    "engine.checkpoints",
    "engine.data",
    "engine.variables",
    "engine.model",
    "engine.ipykernel",
    "engine.workload",
    "engine.logs",
    "engine.memory",
    "engine.group",
    "engine.frames",
    "engine.__init__",
    "exports",
    "run_folder",
    "saved_folder",
    "planning",
    "performance",
    "host",
    "machine",
    "conversion",
    "config.__init__",
    "config.prediction",
    "config.characterization",
    "config.signatures",
    "config.written",
    "config.flags",
    "config.flags_help",
    "config.site",
    "config.recipes",
    "config.presets",
    "config.recipe_packages",
    "config.training",
    "config.own_file",
    "config.data",
    "config.cluster",
    "config.launchers",
    "config.settings",
    "config.conditions",
    "config.site_file",
    "machine.cgroups",
    "machine.gpus.setting",
    "machine.links",
    "machine.slurm_job",
    "serialization",
    "errors",
    "protocol",
    "text",
    "package",
    "version",
]
"""The rooms of the package, from top to bottom: a module imports from its own room and from those below, and
no others. A room is a folder with all that is in it, or one module."""

NOTEBOOKS_SIDE = {"__init__", "cli", "server", "ui", "client"}
RANKS_SIDE = {"recipes", "engine"}
"""Two processes, which never import each other's code."""


@dataclass(frozen=True)
class Import:
    """One import in the package's code."""

    importer: str
    """The module, such as 'client.cluster'."""
    imported: str
    """'engine.boot' for a module of the package, '/torch' for one of another."""
    line: int
    for_types: bool
    """Only type checkers see it."""

    def __str__(self) -> str:
        return f"nbgpu/{self.importer.replace('.', '/')}.py:{self.line} imports {self.imported.lstrip('/')}"


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _import_nodes(
    node: ast.AST, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement below `node`, and whether it is for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, for_types
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from _import_nodes(ast.Module(child.body, []), True)
            yield from _import_nodes(ast.Module(child.orelse, []), for_types)
        else:
            yield from _import_nodes(child, for_types)


def _imported_by_name(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module of the package that is imported by its name in a string, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("nbgpu"):
                yield str(name.value), node.lineno


def _imports(importer: str, tree: ast.AST) -> Iterator[Import]:
    for name, line in _imported_by_name(tree):
        yield Import(importer, _resolve(name), line, False)
    for node, for_types in _import_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"nbgpu/{importer}: imports here name the whole path"
            # `from nbgpu import config` names a module; `from nbgpu.config import bounds` a thing in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(importer, _resolve(name), node.lineno, for_types)


def _resolve(name: str) -> str:
    """The module of the package that a dotted name stands for or lies in; '/...' for another package's."""
    top, *inside = name.split(".")
    if top != "nbgpu":
        return "/" + top
    while inside:
        if ".".join(inside) in MODULES:
            return ".".join(inside)
        if ".".join([*inside, "__init__"]) in MODULES:
            return ".".join([*inside, "__init__"])
        inside.pop()
    return "__init__"


@cache
def _all_imports() -> list[Import]:
    return [
        found
        for name, path in MODULES.items()
        for found in _imports(name, ast.parse(path.read_text(), filename=str(path)))
    ]


def _place(module: str) -> str:
    """A module's place in the house: a recipe's settings stand in its folder, and belong to the other
    settings, which the notebook's side reads as well."""
    return f"config.{module}" if re.fullmatch(_SETTINGS_OF_RECIPES, module) else module


_SETTINGS_OF_RECIPES = r"recipes\.\w+\.config|recipes\.lithography\.symmetry"


def _part(module: str) -> str:
    return _place(module).split(".")[0]


def _room(module: str) -> str | None:
    """The longest name in HOUSE that `module` lies in; None where there is no such room."""
    inside = _place(module).split(".")
    while inside:
        if ".".join(inside) in HOUSE:
            return ".".join(inside)
        inside.pop()
    return None


def _is_wrong(found: Import) -> bool:
    if found.imported == "/ipyparallel":
        # How ranks are reached is known in two rooms, and all others wait for replies. A third uses
        # ipyparallel's launchers, and a fourth derives a rank's kernel from that of its engines.
        knowing = {"client.engines", "engine.process", "client.launchers", "engine.ipykernel"}
        return _room(found.importer) not in knowing
    if found.imported.startswith("/"):
        # That a tensor is one may be said where torch is never loaded.
        is_torch = not found.for_types and found.imported in {"/torch", "/monai", "/torchvision"}
        # How a tensor is built is known on both sides; the kernel loads torch when one travels.
        is_without = _part(found.importer) not in RANKS_SIDE and found.importer != "serialization.tensors"
        return is_torch and is_without
    sides = {_part(found.importer), _part(found.imported)}
    if sides & NOTEBOOKS_SIDE and sides & RANKS_SIDE:
        return True
    own, other = _room(found.importer), _room(found.imported)
    assert own is not None, f"{found.importer} has no room in HOUSE"
    assert other is not None, f"{found.imported} has no room in HOUSE"
    return HOUSE.index(other) < HOUSE.index(own)


def test_every_module_has_a_room_and_every_room_a_module() -> None:
    assert {_room(module) for module in MODULES} == set(HOUSE)


def test_imports_only_go_down() -> None:
    assert [str(found) for found in _all_imports() if _is_wrong(found)] == []


def test_the_packages_around_the_settings_of_recipes_import_nothing() -> None:
    """They are imported with the settings, in the notebook's kernel."""
    around = {"recipes.__init__"} | {
        f"{module.rpartition('.')[0]}.__init__" for module in MODULES if _place(module) != module
    }
    assert len(around) > 5
    assert [str(one) for one in _all_imports() if one.importer in around] == []


@pytest.mark.parametrize("room", HOUSE[1:])
def test_an_import_that_goes_up_is_found(room: str) -> None:
    importer = next(module for module in MODULES if _room(module) == room)
    above = HOUSE[HOUSE.index(room) - 1]
    imported = next(module for module in MODULES if _room(module) == above)
    for code in (f"import nbgpu.{imported}", f"if TYPE_CHECKING:\n    import nbgpu.{imported}"):
        (found,) = _imports(importer, ast.parse(code))
        assert _is_wrong(found)


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ("client.cells.cell", "from nbgpu.engine import train"),
        ("ui.slot", "import nbgpu.recipes.own"),
        ("engine.train", "from nbgpu.client.cluster.cluster import Cluster"),
        ("recipes.own.__init__", "from nbgpu import ui"),
        ("client.engines.ranks", "import torch"),
        ("run_folder.lines", "def f():\n    import torch"),
        ("client.faults.watch", "import ipyparallel as ipp"),
    ],
)
def test_an_import_from_the_other_side_is_found(importer: str, code: str) -> None:
    (found,) = _imports(importer, ast.parse(code))
    assert _is_wrong(found)


_ELSEWHERE = {
    # These look at their own process, or say in words what the host's code does.
    "serialization.shared_memory": "two processes of one host share memory, which it checks before",
    "ui.devices.top": "Ctrl-Z stops the process itself",
}
"""Modules outside of the host's code that may name what only a process of the same host can do, and why."""


@pytest.mark.slow
def test_only_the_hosts_code_touches_processes_and_devices() -> None:
    """All else asks a `Host`, because ranks may run on another one."""
    found = []
    for name, path in MODULES.items():
        if _part(name) in {"machine", "host", "engine"} or name in _ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            words = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if words in {"os.kill", "os.killpg", "socket.AF_UNIX"} or words.startswith("pynvml."):
                found.append(f"{name}:{node.lineno} {words}")
            elif is_text and node.value.startswith("/proc/"):
                found.append(f"{name}:{node.lineno} {node.value}")
    assert found == []


def _circles(imports: list[Import]) -> list[set[str]]:
    """The modules that import each other, directly or through others."""
    # The root package loads its names when they are used, and so may name any module.
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in imports:
        if not one.imported.startswith("/") and one.importer not in {"__init__", one.imported}:
            edges[one.importer].add(one.imported)
    # Modules that import nothing, or that nothing imports, are in no circle: take them away again and again.
    remains = set(edges)
    while outside := {
        module
        for module in remains
        if not edges[module] & remains or not any(module in edges[other] for other in remains)
    }:
        remains -= outside

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        to_visit = [start]
        while to_visit:
            new = edges[to_visit.pop()] & remains - seen
            seen |= new
            to_visit += new
        return seen

    reach = {module: reached(module) for module in remains}
    members = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in remains
        if module in reach[module]
    }
    return [set(circle) for circle in sorted(members, key=sorted)]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count, too."""
    assert _circles(_all_imports()) == []


def test_a_circle_of_files_is_found() -> None:
    three = ["text.sizes", "text.ranks", "text.similar"]
    ring = [Import(three[n - 1], name, 1, n == 0) for n, name in enumerate(three)]
    assert _circles([*ring, Import("cli.__init__", "text.sizes", 1, False)]) == [set(three)]
    assert _circles(ring[1:]) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch", ["/torch"]),
        ("import torch.nn as nn", ["/torch"]),
        ("from nbgpu.text import sizes\nfrom nbgpu import errors", ["text.sizes", "errors"]),
        ("from nbgpu.client.cluster.cluster import Cluster", ["client.cluster.cluster"]),
        ("from nbgpu.recipes import nothing", ["recipes.__init__"]),
        ('def f():\n    import_module("nbgpu.engine.train").train()', ["engine.train"]),
        ("def f():\n    import torch", ["/torch"]),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ["/torch"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", ["/typing", "/torch"]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import torch", ["/a", "/torch"]),
    ],
)
def test_the_reading_of_imports_itself(code: str, expected: list[str]) -> None:
    assert [found.imported for found in _imports("x", ast.parse(code))] == expected


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout


def test_importing_nbgpu_imports_nothing_heavy() -> None:
    modules = json.loads(_python("import sys, json, nbgpu; print(json.dumps(sorted(sys.modules)))"))
    heavy = {
        "torch",
        "numpy",
        "monai",
        "zmq",
        "ipyparallel",
        "pydantic",
        "plotly",
        "ipywidgets",
        "pandas",
        "IPython",
    }
    assert heavy & {module.split(".")[0] for module in modules} == set()


def test_importing_nbgpu_takes_no_time() -> None:
    """The promise is under 0.2 s. Best of several, because other processes share the cores."""
    code = "import time; t = time.perf_counter(); import nbgpu; print(time.perf_counter() - t)"
    assert min(float(_python(code)) for _ in range(5)) < 0.2


@pytest.mark.slow
def test_the_notebooks_side_loads_without_torch() -> None:
    """Neither directly nor through a library that it imports."""
    modules = [
        f"nbgpu.{module}".removesuffix(".__init__")
        for module in MODULES
        if _part(module) not in RANKS_SIDE and module != "serialization.tensors"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(modules)!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "    print(name)"
    )
    assert _python(code).split() == sorted(modules)


@pytest.mark.slow
def test_engines_start_without_what_only_training_needs() -> None:
    code = (
        "import json, sys\n"
        "from nbgpu.engine.process import fork_server\n"
        "fork_server.import_what_every_engine_needs()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(json.loads(_python(code)))
    assert "nbgpu.engine.group.group" in loaded
    assert loaded & {"nbgpu.config", "nbgpu.run_folder", "monai"} == set()


def test_a_script_starts_a_cluster_without_what_only_notebooks_need() -> None:
    """Its processes are launched after these imports, and a person waits for them."""
    loaded = json.loads(
        _python("import json, sys, nbgpu; nbgpu.Cluster; print(json.dumps(sorted(sys.modules)))")
    )
    needless = {
        "IPython",
        "ipykernel",
        "ipyparallel",
        "ipywidgets",
        "jupyter_client",
        "plotly",
        "pandas",
        "numpy",
    }
    assert {name.split(".")[0] for name in loaded} & needless == set()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["train", "data.workers"])
def test_what_trains_needs_no_notebook(module: str) -> None:
    """A rank under torchrun, and each worker process that reads data, would load it for nothing."""
    code = f"import json, sys, nbgpu.engine.{module}; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.split(".")[0] for name in json.loads(_python(code))}
    assert loaded & {"IPython", "ipykernel", "ipyparallel", "jupyter_client"} == set()


def test_the_public_names_are_these() -> None:
    """Adding a name is a promise to keep it: change this list in the same commit."""
    assert sorted(nbgpu.__all__) == [
        "Cluster",
        "ClusterConfig",
        "ClusterError",
        "ConfigError",
        "DataError",
        "NbgpuError",
        "NoClusterError",
        "NoFreeGpuError",
        "OutOfMemoryError",
        "RankError",
        "Run",
        "RunError",
        "Study",
        "Sweep",
        "TrainConfig",
        "TransferError",
        "attach",
        "controls",
        "current",
        "measure_links",
        "memory",
        "nccl_times",
        "overlap",
        "scaling",
        "study",
        "sweep",
        "time_step",
        "try_advice",
    ]


def test_every_public_name_is_there_and_documented() -> None:
    assert set(nbgpu.__all__) <= set(dir(nbgpu))
    for name in nbgpu.__all__:
        assert getattr(nbgpu, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clutser'"):
        _ = nbgpu.Clutser
