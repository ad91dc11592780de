"""Source lines of the programs that are loaded now, and what is traced now."""

from __future__ import annotations

from ksym_plugin.sources import bpf_details
from ksym_plugin.sources.traced import Targets
from ksym_plugin.timeline.packed import unpack_lines
from ksym_plugin.timeline.symbols import trampoline_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.packed import Line, LineTable
    from ksym_plugin.timeline.symbols import Lifetime


class LiveLines:
    """Asks the running kernel by bpf(2), once a program."""

    def __init__(self) -> None:
        self._reader = bpf_details.Reader()
        self._targets = Targets()
        self._known: dict[int, tuple[list[int], LineTable]] = {}

    def traced(self, lifetime: Lifetime, /) -> str | None:
        """The kernel function whose calls a trampoline takes to programs."""
        key = trampoline_key(lifetime.symbol.name)
        return None if key is None else self._targets.name(key) or None

    def line(self, lifetime: Lifetime, offset: int, /) -> Line | None:
        """The source line of the instruction at an offset into a symbol."""
        if lifetime.prog_id is None:
            return None
        starts, table = self._known.get(lifetime.prog_id) or self._read(lifetime.prog_id)
        start = lifetime.symbol.start
        return table.find(starts.index(start), offset) if start in starts else None

    def _read(self, prog_id: int) -> tuple[list[int], LineTable]:
        try:
            details = self._reader.read(prog_id)
        except OSError:
            return [], unpack_lines(b"")
        starts = [start for start, _, _ in details.functions]
        self._known[prog_id] = known = (starts, unpack_lines(details.lines))
        return known
