"""Count files and lines of src/foretrain; fail on shared class names and import cycles: ``python tools/house.py``.

A public class name stands in one file only, so that a name in a message or a page leads to one place; stand-ins for
other libraries have the names of those. Files do not
import each other in a circle at module level; imports for type checking count, imports inside functions do not. Nor do
those of ``foretrain/__init__.py``: it names what users import, and imports it on first use.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx

PACKAGE = Path(__file__).parents[1] / "src" / "foretrain"


def main() -> None:
    """Print what was counted and every violation; exit with 1 if there is one."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in trees)
    shared = shared_class_names(trees)
    cycles = import_cycles(trees)
    for name, files in shared.items():
        print(f"class {name} is defined in {' and '.join(files)}")
    for cycle in cycles:
        print(f"import cycle: {' -> '.join(cycle)}")
    print(f"RESULT name=house files={len(trees)} lines={lines} shared_class_names={len(shared)} cycles={len(cycles)}")
    sys.exit(1 if shared or cycles else 0)


def shared_class_names(trees: Mapping[Path, ast.Module]) -> dict[str, list[str]]:
    """Return each public class name that several files define at module level, with those files."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        if "stand_ins" in path.parts:
            continue
        for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
            if not name.startswith("_"):
                files[name].append(path.relative_to(PACKAGE).as_posix())
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def import_cycles(trees: Mapping[Path, ast.Module]) -> list[list[str]]:
    """Return a shortest cycle of each group of modules that import each other at module level."""
    modules = {module_name(path): path for path in trees}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in modules.items():
        if name == PACKAGE.name:
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph.add_edges_from((name, other) for other in imported(trees[path], package, modules) if other != name)
    found: list[list[str]] = []
    for group in nx.strongly_connected_components(graph):
        if len(group) > 1:
            edges = sorted(graph.subgraph(group).edges)
            shortest = min((nx.shortest_path(graph, end, start) for start, end in edges), key=len)
            found.append([shortest[-1], *shortest])
    return sorted(found)


def module_name(path: Path) -> str:
    """Return the dotted name of the module at ``path``."""
    parts = ("foretrain", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the project's modules that ``tree`` imports outside functions."""
    for node in outside_functions(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if (target := whole if whole in modules else base) in modules:
                    yield target


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below ``node`` that runs when its module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from outside_functions(child)


if __name__ == "__main__":
    main()
