"""The order of the rooms, read from the imports: ``python -m tests.house`` prints it.

Every import counts, also one inside a function or under ``TYPE_CHECKING``: it is what a
reader has to know. ``tests/unit/test_house.py`` fails where a rule is broken.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
PACKAGE = "ksym_plugin"
HOOKS = "ksym_hooks"

#: What each room may import of ours. The public names of the package are in ``names``.
MAY_IMPORT = {
    "timeline": "",
    "kernel": "timeline",
    "sources": "timeline kernel",
    "history": "timeline kernel",
    "stacks": "timeline",
    "perf": "timeline kernel history stacks",
    "plugin": "timeline kernel sources history hooks",
    "bcc": "timeline kernel sources plugin hooks",
    "python": "timeline kernel sources history stacks perf plugin",
    "cli": "timeline kernel sources history stacks perf plugin python names",
    "names": "timeline",
    "hooks": "",
    "contrib/perf-script": "perf",
    "contrib/sampler": "hooks names",
}
#: Rooms that perf's interpreter may load: it has the standard library and no more.
LOADED_BY_PERF = ("timeline", "kernel", "history", "stacks", "perf")
#: Third-party modules that those rooms import inside a function, where the user asks for what
#: needs them: a vmlinux needs pyelftools, and the other two are perf's own.
LATE = {"elftools": "kernel perf", "perf_trace_context": "perf"}
#: Third-party modules of the other rooms.
ELSEWHERE = {
    "pluggy": "hooks",
    "click": "cli",
    "bcc": "sources bcc",
    "elftools": "cli",
}
#: Names for type checkers alone, imported under TYPE_CHECKING.
TYPE_ONLY = {"typing_extensions": "hooks"}


class Import(NamedTuple):
    """One import: where it stands, what it names, and whether loading the file runs it."""

    path: Path
    line: int
    module: str
    is_eager: bool


class Arrow(NamedTuple):
    """A file of ours that imports another."""

    path: Path
    line: int
    source: str
    target: str


def files() -> list[Path]:
    """What is read: the package, the hooks and the contributed programs."""
    folders = (PACKAGE, "hooks", "contrib")
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


def package_texts() -> dict[Path, int]:
    """Every text file of the package, and how many lines it has."""
    found = (path for path in (REPO / PACKAGE).rglob("*") if path.is_file())
    return {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in found
        if "__pycache__" not in path.parts
    }


def module_of(path: Path) -> str:
    """The dotted name of a file; a contributed program goes by its path."""
    parts = path.relative_to(REPO).with_suffix("").parts
    if parts[0] == "contrib":
        return "/".join(parts)
    if parts[0] == "hooks":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module of ours is in."""
    if module.startswith("contrib/"):
        return "/".join(module.split("/")[:2])
    parts = module.split(".")
    if parts[0] == HOOKS:
        return "hooks"
    return parts[1] if len(parts) > 1 else "names"


def imports_of(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[Import] = []
    _walk(tree, path, True, found)
    return found


def _walk(node: ast.AST, path: Path, is_eager: bool, found: list[Import]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found += [Import(path, child.lineno, name.name, is_eager) for name in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{path}:{child.lineno}: a relative import"
            base = child.module or ""
            found += [
                Import(path, child.lineno, f"{base}.{name.name}", is_eager) for name in child.names
            ]
        else:
            _walk(child, path, is_eager and not _is_late(child), found)


def _is_late(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        test = node.test
        return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _is_beside(one: Import, room: str, top: str) -> bool:
    """Whether a contributed program imports a file of its own folder."""
    return room.startswith("contrib/") and (one.path.parent / f"{top}.py").exists()


class House:
    """All imports of ours, as arrows between files."""

    def __init__(self) -> None:
        self.paths = {module_of(path): path for path in files()}
        self.lines = {
            name: len(path.read_text(encoding="utf-8").splitlines())
            for name, path in self.paths.items()
        }
        self.foreign: list[Import] = []
        self.arrows: list[Arrow] = []
        self.eager: dict[str, set[str]] = defaultdict(set)
        for name, path in self.paths.items():
            for one in imports_of(path):
                self._enter(name, one)

    def _enter(self, name: str, one: Import) -> None:
        if one.module.split(".")[0] not in (PACKAGE, HOOKS):
            self.foreign.append(one)
            return
        # ``from package.module import name`` ends in a name, ``from package import module`` not.
        target = one.module
        if target not in self.paths:
            target = target.rpartition(".")[0]
        if target == name:
            return
        self.arrows.append(Arrow(one.path, one.line, name, target))
        if one.is_eager:
            self.eager[name].add(target)

    def broken(self) -> list[str]:
        """Every import that a rule forbids, as ``file:line: which rule``."""
        return [*self._upward(), *self._circles_in_words(), *self._third_party()]

    def _upward(self) -> list[str]:
        return [
            f"{arrow.path.relative_to(REPO)}:{arrow.line}: {room_of(arrow.source)} may not import"
            f" {arrow.target}; it may import: {MAY_IMPORT.get(room_of(arrow.source)) or 'nothing'}"
            for arrow in self.arrows
            if self.is_forbidden(arrow)
        ]

    def is_forbidden(self, arrow: Arrow) -> bool:
        source, target = room_of(arrow.source), room_of(arrow.target)
        return source != target and target not in MAY_IMPORT.get(source, "").split()

    def circles(self) -> list[list[str]]:
        """Groups of files that import each other, by Tarjan's algorithm."""
        ahead: dict[str, set[str]] = defaultdict(set)
        for arrow in self.arrows:
            ahead[arrow.source].add(arrow.target)
        return [group for group in components(ahead) if len(group) > 1]

    def _circles_in_words(self) -> list[str]:
        words = []
        for circle in self.circles():
            for arrow in self.arrows:
                if arrow.source in circle and arrow.target in circle:
                    where = f"{arrow.path.relative_to(REPO)}:{arrow.line}"
                    words.append(f"{where}: {arrow.target} is part of a circle: {circle}")
        return words

    def _third_party(self) -> list[str]:
        words = []
        for one in self.foreign:
            top = one.module.split(".")[0]
            room = room_of(module_of(one.path))
            if top in sys.stdlib_module_names or _is_beside(one, room, top):
                continue
            allowed = LATE if room in LOADED_BY_PERF else ELSEWHERE
            if not one.is_eager and room in TYPE_ONLY.get(top, "").split():
                continue
            if room in LOADED_BY_PERF and one.is_eager:
                rule = f"{room} is loaded by perf's interpreter, which lacks {top}"
            elif room in allowed.get(top, "").split():
                continue
            else:
                rule = f"{room} may not import {top}"
            words.append(f"{one.path.relative_to(REPO)}:{one.line}: {rule}")
        return words

    def floors(self) -> dict[str, int]:
        """For each room how many rooms its longest chain of imports has, itself included."""
        ahead: dict[str, set[str]] = defaultdict(set)
        for arrow in self.arrows:
            source, target = room_of(arrow.source), room_of(arrow.target)
            if source != target:
                ahead[source].add(target)
        known: dict[str, int] = {}

        def floor(room: str, seen: tuple[str, ...] = ()) -> int:
            if room not in known:
                below = [floor(one, (*seen, room)) for one in ahead[room] if one not in seen]
                known[room] = 1 + max(below, default=0)
            return known[room]

        for name in self.paths:
            floor(room_of(name))
        return known


def components(ahead: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of a graph."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(ahead.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(ahead):
        if node not in index:
            visit(node)
    return found


def report(house: House) -> str:
    rows = []
    floors = house.floors()
    rooms = sorted({room_of(name) for name in house.paths}, key=lambda room: (floors[room], room))
    for room in rooms:
        names = [name for name in house.paths if room_of(name) == room]
        lines = sum(house.lines[name] for name in names)
        may = MAY_IMPORT.get(room, "")
        rows.append(f"{floors[room]:>5}  {room:<20} {len(names):>3} files {lines:>6} lines  {may}")
    upward = [arrow for arrow in house.arrows if house.is_forbidden(arrow)]
    pairs = {(arrow.source, arrow.target) for arrow in house.arrows}
    texts = package_texts()
    entries = {path.relative_to(REPO / PACKAGE).parts[0] for path in texts}
    return "\n".join(
        [
            "floor  room                                     may import",
            *rows,
            "",
            (
                f"files {len(house.paths)}, lines {sum(house.lines.values())}, arrows {len(pairs)},"
                f" arrows upward {len(upward)}, circles {len(house.circles())},"
                f" floors {max(floors.values())}"
            ),
            (
                f"{PACKAGE} alone, with what is not Python: files {len(texts)},"
                f" lines {sum(texts.values())}, entries at its top {len(entries)}"
            ),
        ]
    )


def main() -> int:
    house = House()
    print(report(house))
    broken = house.broken()
    print(*broken, sep="\n", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
