"""A kernel's modules as files: /proc/modules, /sys/module, uevents, and who knows functions."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ksym_plugin.sources.modules import Modules
from ksym_plugin.timeline.packed import pack_functions
from ksym_plugin.timeline.symbols import Lifetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.sources.modules import Answer, Question

BASE = 0xFFFF_FFFF_C100_0000
SIZE = 0x4000
ROWS = [(0x10, 0x40, "first"), (0x50, 0x100, "second")]
CODE = (0x10, 0x150)
INIT = 0x8000
INIT_DATA = pack_functions([(0, 0x20, "init_module")])


class Uevents:
    def __init__(self) -> None:
        self.waiting: list[tuple[bool, str]] = []
        self.lost = False
        self.reading, self.writing = os.pipe()
        self.is_closed = False

    def fileno(self) -> int:
        return self.reading

    def read(self) -> tuple[list[tuple[bool, str]], bool]:
        waiting, self.waiting = self.waiting, []
        lost, self.lost = self.lost, False
        return waiting, lost

    def close(self) -> None:
        if not self.is_closed:
            os.close(self.reading)
            os.close(self.writing)
        self.is_closed = True


class Reader:
    """Answers when it is told to, from ``rows``."""

    def __init__(self) -> None:
        self._reading = self._writing = -1
        self.asked: list[list[Question]] = []
        self.ready: list[Answer] | None = None
        self.rows: dict[str, list] = {}
        self.with_init: set[str] = set()
        self.fails = False

    def fileno(self) -> int:
        return self._reading

    def ask(self, questions: list[Question]) -> None:
        if self.fails:
            raise OSError(11, "no more processes")
        self.asked.append(questions)
        self._reading, self._writing = os.pipe()

    def answer(self, when: int = 0, has_functions: bool = True) -> None:
        """Have the answers to what was asked last ready."""
        self.ready = []
        for name, base, *_ in self.asked[-1]:
            rows = self.rows.get(name, ROWS)
            first = rows[0][0]
            length = max(start + size for start, size, _ in rows) - first
            data = pack_functions((start - first, size, word) for start, size, word in rows)
            init = (base + INIT, 0x20, INIT_DATA) if name in self.with_init else None
            known = (when, (base + first, length, data), init)
            self.ready.append(known if has_functions else None)

    def read(self) -> list[Answer] | None:
        ready, self.ready = self.ready, None
        if ready is not None:
            self.close()
        return ready

    def close(self) -> None:
        if self._reading >= 0:
            os.close(self._reading)
            os.close(self._writing)
        self._reading = self._writing = -1


class Host:
    """Modules by name: their base, state, and the order they are listed in."""

    def __init__(self, folder: Path) -> None:
        self.listing = folder / "modules"
        self.sysfs = folder / "sys"
        self.modules: dict[str, tuple[int, str]] = {}
        self.uevents = Uevents()
        self.reader = Reader()
        self.sysfs.mkdir()
        self.write()

    def write(self) -> None:
        lines = [
            f"{name} {SIZE} 0 - {state} 0x{base:016x}\n"
            for name, (base, state) in self.modules.items()
        ]
        self.listing.write_text("".join(lines))

    def add(self, name: str, slot: int, state: str = "Live", has_sysfs: bool = True) -> None:
        base = BASE + slot * 0x10000
        self.modules[name] = (base, state)
        self.write()
        if has_sysfs:
            self.add_sysfs(name, base)

    def add_sysfs(self, name: str, base: int) -> None:
        for folder in ("notes", "sections"):
            (self.sysfs / name / folder).mkdir(parents=True, exist_ok=True)
        note = struct.pack("=III4s", 4, 2, 3, b"GNU\0") + b"\x12\x34"
        (self.sysfs / name / "notes/.note.gnu.build-id").write_bytes(note)
        (self.sysfs / name / "sections/.text").write_text(f"0x{base:016x}\n")

    def announce(self, name: str) -> None:
        self.uevents.waiting.append((True, name))

    def remove(self, name: str, is_told: bool = True) -> None:
        self.modules.pop(name, None)
        self.write()
        if is_told:
            self.uevents.waiting.append((False, name))

    def follow(self, earlier: list[Lifetime] | None = None, since: int = 0) -> Modules:
        return Modules(
            earlier,
            since,
            str(self.listing),
            str(self.sysfs),
            self.uevents,  # type: ignore[arg-type]
            self.reader,  # type: ignore[arg-type]
        )
