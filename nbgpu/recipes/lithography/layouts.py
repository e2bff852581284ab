"""Layout files (.glp, GDSII and OASIS), read as polygons in nm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nbgpu.errors import DataError
from nbgpu.recipes.lithography.rasterise import Polygon, is_manhattan

if TYPE_CHECKING:
    import gdstk

GLP = ".glp"
SUFFIXES = (GLP, ".gds", ".gds2", ".oas")
_MAX_SHOWN = 5


def read_layout(path: str | Path, layer: str = "", cell: str = "") -> list[Polygon]:
    """Return the polygons of one layer of a layout, in nm, with cell references and arrays expanded.

    Args:
        path: a .glp file of the ICCAD 2013 contest, or a GDSII or OASIS file, which gdstk reads.
        layer: the layer: such as 'M1' for a .glp file, '17' or '17/0' (layer, or layer and datatype) for the
            other formats. Empty selects the only layer.
        cell: the cell of a GDSII or OASIS file. Empty selects the only top cell.

    Raises:
        DataError: everything that is wrong with the file; if a layer has to be named, the message lists the
            layers in the file.
    """
    path = Path(path)
    by_layer = _read_glp(path, cell) if path.suffix.lower() == GLP else _read_gds(path, cell)
    if not by_layer:
        raise DataError(f"{path}: has no polygon")
    if "/" in layer or path.suffix.lower() == GLP:
        names = [name for name in by_layer if layer in ("", name)]
    else:
        names = [name for name in by_layer if layer in ("", name.split("/")[0])]
    all_layers = ", ".join(sorted(by_layer))
    if not names:
        raise DataError(f"{path}: has no layer {layer}. Layers: {all_layers}")
    if not layer and len(names) > 1:
        raise DataError(f"{path}: has several layers. Name one with layer=: {all_layers}")
    polygons = [polygon for name in names for polygon in by_layer[name]]
    if find_spec("gdstk") is None and any(not is_manhattan(polygon) for polygon in polygons):
        raise DataError(
            f"{path}: has slanted edges, which gdstk takes, and that is not installed. Run: pip install "
            "'nbgpu[gdsii]'"
        )
    return polygons


def _read_glp(path: Path, cell: str) -> dict[str, list[Polygon]]:
    """Return the polygons of each layer of a .glp file.

    Its lines are RECT N layer x y width height, and PGON N layer x y x y ..., with coordinates in nm. The
    line EQUIV 1 1000 MICRON states this unit.

    Raises:
        DataError: lists the first problems of the file, one per line.
    """
    if cell:
        raise DataError(f"{path}: has no cells to choose from, and cell is {cell!r}. Leave it out")
    by_layer: dict[str, list[Polygon]] = {}
    problems = []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as .glp: {error}") from None
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0] not in ("RECT", "PGON", "EQUIV"):
            continue
        try:
            if words[0] == "EQUIV":
                if words[1:4] != ["1", "1000", "MICRON"]:
                    raise ValueError("only EQUIV 1 1000 MICRON, which is nm, is known")
                continue
            polygon = _glp_polygon(words[0], [float(word) for word in words[3:]])
            by_layer.setdefault(words[2], []).append(polygon)
        except (ValueError, IndexError) as error:
            problems.append(f"{path}: line {number}: {error}")
    if problems:
        more = [f"{path}: and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise DataError("\n".join([*problems[:_MAX_SHOWN], *more]))
    return by_layer


def _glp_polygon(kind: str, numbers: list[float]) -> Polygon:
    """Return the corners (N, 2) of a RECT or PGON from the numbers of its line; ValueError if they are too
    few or do not fit."""
    if not np.isfinite(numbers).all():
        raise ValueError("coordinates must be finite numbers")
    if kind == "RECT":
        if len(numbers) != 4 or min(numbers[2:]) <= 0:
            raise ValueError("a RECT needs x, y, and a width and a height above 0")
        x, y, width, height = numbers
        return np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])
    if len(numbers) < 8 or len(numbers) % 2:
        raise ValueError("a PGON needs at least four corners, each with x and y")
    return np.array(numbers).reshape(-1, 2)


def _read_gds(path: Path, cell: str) -> dict[str, list[Polygon]]:
    """Return the polygons of each 'layer/datatype' of a GDSII or OASIS file, in nm, with cell references
    expanded.

    Raises:
        DataError: gdstk is missing, the file cannot be read, or the cell does not exist.
    """
    try:
        import gdstk
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: GDSII and OASIS are read with gdstk, which is not installed. Run: pip install "
            "'nbgpu[gdsii]'"
        ) from None
    try:
        # gdstk converts lengths to nm, whatever unit the file uses.
        read = gdstk.read_oas if path.suffix.lower() == ".oas" else gdstk.read_gds
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            library = read(path, unit=1e-9)
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as GDSII or OASIS: {error}") from None
    # A missing cell is an error only if the chosen cell refers to it, which `_chosen_cell` checks.
    for message in dict.fromkeys(str(w.message) for w in warned):
        if "Missing reference" not in message:
            warnings.warn(f"{path}: polygons may be missing. gdstk says: {message}", stacklevel=2)
    by_layer: dict[str, list[Polygon]] = {}
    for polygon in _chosen_cell(path, library, cell).get_polygons():
        name = f"{polygon.layer}/{polygon.datatype}"
        # Round to a thousandth of a nm: the residue of rotations and of floating-point units would make
        # slanted edges.
        by_layer.setdefault(name, []).append(np.round(polygon.points, 3))
    return by_layer


def _chosen_cell(path: Path, library: gdstk.Library, name: str) -> gdstk.Cell:
    """Return the cell of this name, or the only top cell.

    Raises:
        DataError: there is no such cell; several top cells, which would lie over one another; or a cell that
            it refers to is missing.
    """
    import gdstk

    top = [cell for cell in library.top_level() if isinstance(cell, gdstk.Cell)]
    cells = [cell for cell in library.cells if isinstance(cell, gdstk.Cell)]
    chosen = [cell for cell in cells if cell.name == name] if name else top
    top_names = _shown([cell.name for cell in top])
    if not chosen:
        raise DataError(
            f"{path}: has no cell {name!r}. Top cells: {top_names}" if name else f"{path}: has no polygon"
        )
    if len(chosen) > 1:
        raise DataError(
            f"{path}: has {len(chosen)} top cells, each a layout of its own. Name one with cell=: {top_names}"
        )
    below = [*chosen, *chosen[0].dependencies(recursive=True)]
    references = [r for one in below if isinstance(one, gdstk.Cell) for r in one.references]
    # A reference to a cell that the file lacks has the cell's name instead of the cell.
    missing = sorted({r.cell for r in references if isinstance(r.cell, str)})
    if missing:
        raise DataError(
            f"{path}: refers to cells that it lacks: {_shown(missing)}. Export it again with all that it refers to, or name a "
            "cell that is whole with cell="
        )
    return chosen[0]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
