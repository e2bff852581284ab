"""Who may import whom, what `import nbgpu` costs, and which names are public."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import nbgpu

PACKAGE = Path(__file__).resolve().parents[2] / "nbgpu"

BASE = {"version", "errors", "records", "settings", "config", "palette", "sizes", "symmetry"}
BASE |= {"recipe_files", "lines", "protocol", "text"}
MIDDLE = {
    "devices",
    "telemetry",
    "runs",
    "flags",
    "manifest",
    "resume",
    "signals",
    "vigil",
    "descendants",
    "suitability",
}
MIDDLE |= {
    "obstacles",
    "shared_memory",
    "extras",
    "ledger",
    "logbook",
    "backends",
    "epochs",
    "workers",
    "sweeps",
    "streams",
    "interpreter",
    "unix_sockets",
}

MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(MIDDLE, BASE | MIDDLE),
    # How a tensor is built is known on both sides; the kernel loads it when one travels.
    "tensors": BASE,
    "parcels": BASE | MIDDLE | {"tensors"},
    "client": BASE | MIDDLE | {"client", "parcels"},
    # What a recipe is stands in engine/workload; the recipes themselves are named by strings there.
    "engine": BASE | MIDDLE | {"engine", "parcels"},
    "recipes": BASE | MIDDLE | {"engine", "recipes"},
    "ui": BASE | MIDDLE | {"client", "ui"},
    "cli": BASE | MIDDLE | {"client", "ui"},
    "__init__": BASE | {"client", "ui"},
}
"""For each part of the package, the parts that it may import. A part is a top-level module or folder."""

NEVER_TORCH = {"client", "ui", "cli", "parcels", "__init__"} | BASE | MIDDLE


@dataclass(frozen=True)
class Import:
    """One import in the package's code."""

    importer: str
    """The module, such as 'client.cluster'."""
    imported: str
    """'engine.boot' for a module of the package, '/torch' for one of another."""
    line: int
    deferred: bool
    """It stands in a function, and so runs later."""

    def __str__(self) -> str:
        return f"nbgpu/{self.importer.replace('.', '/')}.py:{self.line} imports {self.imported.lstrip('/')}"


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _import_nodes(
    node: ast.AST, deferred: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement below `node` but those for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, deferred
        elif isinstance(child, ast.If) and _is_type_checking(child):
            for other in child.orelse:
                yield from _import_nodes(ast.Module([other], []), deferred)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _import_nodes(child, deferred or is_function)


def _imports(importer: str, tree: ast.AST) -> Iterator[Import]:
    for node, deferred in _import_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"nbgpu/{importer}: imports here name the whole path"
            # `from nbgpu import config` names a module; `from nbgpu.config import bounds` a thing in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(importer, _resolve(name), node.lineno, deferred)


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


IMPORTS = [
    found
    for name, path in MODULES.items()
    for found in _imports(name, ast.parse(path.read_text(), filename=str(path)))
]


def _part(module: str) -> str:
    return module.split(".")[0]


def test_every_module_belongs_to_a_part_with_a_rule() -> None:
    assert {_part(module) for module in MODULES} == set(MAY_IMPORT)


def test_imports_go_only_in_the_allowed_directions() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if not found.imported.startswith("/")
        and _part(found.imported) not in MAY_IMPORT[_part(found.importer)]
        and found.imported.replace(".", "/") not in MAY_IMPORT[_part(found.importer)]
    ]
    assert not wrong


def test_what_runs_in_the_notebook_never_imports_torch() -> None:
    torch_users = {"/torch", "/monai", "/torchvision"}
    wrong = [str(f) for f in IMPORTS if f.imported in torch_users and _part(f.importer) in NEVER_TORCH]
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    # The root package loads its names when they are used, and so may name any module.
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if not found.imported.startswith("/") and found.importer != "__init__":
            edges[found.importer].add(found.imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for imported in sorted(edges[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch", ["/torch"]),
        ("import torch.nn as nn", ["/torch"]),
        ("from nbgpu import sizes, errors", ["sizes", "errors"]),
        ("from nbgpu.client.cluster import Cluster", ["client.cluster"]),
        ("from nbgpu.recipes import nothing", ["recipes.__init__"]),
        ("def f():\n    import torch", ["/torch"]),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ["/torch"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", ["/typing"]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import torch", ["/torch"]),
    ],
)
def test_the_reading_of_imports_itself(code: str, expected: list[str]) -> None:
    assert [found.imported for found in _imports("x", ast.parse(code))] == expected


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


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


def test_the_notebooks_side_loads_without_torch() -> None:
    """Neither directly nor through a library that it imports."""
    modules = [f"nbgpu.{m}".removesuffix(".__init__") for m in MODULES if _part(m) in NEVER_TORCH]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(modules)!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "    print(name)"
    )
    assert _python(code).split() == sorted(modules)


@pytest.mark.parametrize("module", ["train", "data_workers"])
def test_what_trains_needs_no_notebook(module: str) -> None:
    """A rank under torchrun, and each worker process that reads data, would load it for nothing."""
    code = f"import json, sys, nbgpu.engine.{module}; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.split(".")[0] for name in json.loads(_python(code))}
    assert loaded & {"IPython", "ipykernel", "ipyparallel", "jupyter_client"} == set()


def test_the_public_names_are_these() -> None:
    """Adding a name is a promise to keep it: change this list in the same commit, and the changelog."""
    assert sorted(nbgpu.__all__) == [
        "Cluster",
        "ClusterConfig",
        "ClusterError",
        "ConfigError",
        "DataError",
        "NbgpuError",
        "NoClusterError",
        "OutOfMemoryError",
        "RankError",
        "Run",
        "RunError",
        "Sweep",
        "TrainConfig",
        "TransferError",
        "attach",
        "controls",
        "current",
        "sweep",
    ]


def test_every_public_name_is_there_and_documented() -> None:
    assert set(nbgpu.__all__) <= set(dir(nbgpu))
    for name in nbgpu.__all__:
        assert getattr(nbgpu, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clutser'"):
        _ = nbgpu.Clutser
