"""Draw which package imports which, and check that imports only go to lower layers.

    python -m tools.import_graph [--json]

The graph has the top-level packages and the packages directly in ``baton/``, in the order of the
layers in ``pyproject.toml`` (its first import-linter contract). Within ``baton/``, a package comes
before the packages that it imports. Prints one line per package with the packages that it imports,
from the highest layer to the lowest. Exits with 1 if a package imports one from the same or a
higher layer, or if packages import each other cyclically.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
LIBRARY = "baton"

Graph = dict[str, set[str]]
"""Package -> the packages that it imports directly."""


def load_layers(pyproject: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """Return the top-level packages by layer, highest first, from import-linter's configuration."""
    linter = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]
    layers = linter["contracts"][0]["layers"]
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def ignored_imports(pyproject: Path = ROOT / "pyproject.toml") -> set[tuple[str, str]]:
    """Return the (importer, imported) module pairs that import-linter's first contract ignores."""
    linter = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]
    pairs = linter["contracts"][0].get("ignore_imports", [])
    split = (pair.split("->") for pair in pairs)
    return {(importer.strip(), imported.strip()) for importer, imported in split}


def room_of(module: str, library_rooms: set[str]) -> str:
    """Return the package of a module: ``baton.rpc`` for ``baton.rpc.framed.client``, ``router`` for
    ``router.http.server``."""
    parts = module.split(".")
    room = ".".join(parts[:2])
    return room if parts[0] == LIBRARY and room in library_rooms else parts[0]


def build_graph(packages: Sequence[str]) -> Graph:
    """Return the import graph of ``packages``, with a node for each package within ``baton``."""
    modules = grimp.build_graph(*packages)
    inside = [module for module in modules.modules if module.startswith(f"{LIBRARY}.")]
    library_rooms = {".".join(m.split(".")[:2]) for m in inside if m.count(".") >= 2}
    graph: Graph = {}
    for module in modules.modules:
        room = room_of(module, library_rooms)
        imported = graph.setdefault(room, set())
        for target in modules.find_modules_directly_imported_by(module):
            if (module, target) not in ignored_imports():
                imported.add(room_of(target, library_rooms))
    for room, imported in graph.items():
        imported.discard(room)
    return graph


def find_faults(graph: Mapping[str, set[str]], layers: Sequence[Sequence[str]]) -> list[str]:
    """Return one sentence for each import from the same or a higher layer, and one for a cycle."""
    level = {room: number for number, layer in enumerate(layers) for room in layer}
    faults = []
    for room, imported in sorted(graph.items()):
        for target in sorted(imported):
            top, target_top = room.split(".")[0], target.split(".")[0]
            if top != target_top and level[target_top] <= level[top]:
                faults.append(f"{room} imports {target}, which is not in a lower layer")
    try:
        # The modules directly in baton/ (config, errors, clock…) form the package ``baton``. It is
        # left out here: all other packages import it, and a few of its modules import baton.core.
        TopologicalSorter({r: t - {LIBRARY} for r, t in graph.items() if r != LIBRARY}).prepare()
    except CycleError as error:
        faults.append(f"packages import each other cyclically: {' -> '.join(error.args[1])}")
    return faults


def in_order(graph: Mapping[str, set[str]], layers: Sequence[Sequence[str]]) -> list[str]:
    """Return the packages from top to bottom: by layer, and within ``baton`` by imports."""
    level = {room: number for number, layer in enumerate(layers) for room in layer}
    depth: dict[str, int] = {}

    def depth_of(room: str, path: tuple[str, ...] = ()) -> int:
        if room not in depth:
            below = graph.get(room, set()) - {LIBRARY} - set(path)
            depth[room] = 1 + max((depth_of(r, (*path, room)) for r in below), default=0)
        return depth[room]

    def key(room: str) -> tuple[int, int, str]:
        is_ground = room == LIBRARY
        return (level[room.split(".")[0]] + is_ground, -depth_of(room), room)

    return sorted(graph, key=key)


def describe(graph: Mapping[str, set[str]], layers: Sequence[Sequence[str]]) -> str:
    rooms = in_order(graph, layers)
    width = max(map(len, rooms))
    lines = []
    for room in rooms:
        imported = [target for target in rooms if target in graph[room]]
        lines.append(f"{room:{width}}  ->  {', '.join(imported) or '(none)'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the graph as one JSON object")
    options = parser.parse_args(arguments)
    layers = load_layers()
    graph = build_graph([package for layer in layers for package in layer])
    if options.json:
        print(json.dumps({room: sorted(imported) for room, imported in sorted(graph.items())}))
    else:
        print(describe(graph, layers))
    faults = find_faults(graph, layers)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults and not options.json:
        print("\nNo package imports one from a higher layer, and no imports are cyclic.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
