"""The static symbols: the core image, modules, and what else /proc/kallsyms lists.

The table is kept as the file's own lines, sorted: no object per symbol is built at load,
and a look-up is one bisection and a close look at the few lines that share the address
found. kallsyms has no lengths, so where a symbol ends is worked out then:

- at the next symbol of any type: data is no answer for a frame, but it ends a function;
- at ``_etext`` and ``_einittext``, whatever their type; these, and where other sections
  end, own nothing themselves: behind ``__entry_text_end`` can be a megabyte of padding;
- a module's symbols at the module's end, known from /proc/modules;
- after at most one page where nothing of the same image or module follows, and for
  ``[bpf]`` lines and the pages of kprobes and ftrace, whose neighbours say nothing.

What lies beyond an end has no name here. Reading addresses takes CAP_SYSLOG and a
``kernel.kptr_restrict`` below 2; without them the kernel prints zeros (``hidden``).
"""

from __future__ import annotations

from bisect import bisect_right

from ksym_plugin import kallsyms_lines as line_of
from ksym_plugin.kallsyms_text import KallsymsText, read_module_sizes, read_text
from ksym_plugin.timeline.errors import KallsymsError
from ksym_plugin.timeline.symbols import HIDDEN, IN_MODULE, KERNEL, MODULE, UNKNOWN_ADDRESS, Symbol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from ksym_plugin.timeline.symbols import Reason

#: What an address may be at most from its symbol where nothing better bounds it.
PAGE: Final = 4096

_TOP: Final = (1 << 64) - 1
_HALF: Final = 1 << 63
# The usual beginning of kernel space on 32 bits, for a table that gives no hint.
_NARROW_FLOOR: Final = 0xBF000000
_MODULE_AREA: Final = 1 << 24
# More names than this at one address are looked through once, not once a look-up.
_CROWD: Final = 32


class Kallsyms:
    """The symbols of one kallsyms table. Use ``load`` or ``parse``.

    ``hidden``: every address is zero, so ``find`` answers HIDDEN. ``skipped``: how many
    lines were no symbols. Look-ups take a few microseconds and cache next to nothing.
    """

    __slots__ = (
        "_crowded",
        "_extents",
        "_floor",
        "_lines",
        "_listed",
        "_sizes",
        "hidden",
        "skipped",
    )

    def __init__(self, text: KallsymsText, module_sizes: dict[str, tuple[int, int]]) -> None:
        text.lines.sort()
        self._lines = text.lines
        self._listed = text.bpf_tail
        self._sizes = module_sizes
        self._extents = sorted(module_sizes.values())
        self._crowded: dict[int, Symbol | Reason] = {}
        self.hidden = bool(self._lines) and not line_of.address_of(self._lines[-1])
        self.skipped = text.skipped
        self._floor = self._kernel_floor(text.narrow)

    @classmethod
    def load(cls, path: str = "/proc/kallsyms", modules: str | None = "/proc/modules") -> Kallsyms:
        """Read a table, and modules' sizes from ``modules`` where that can be read.

        Give ``modules=None`` for a saved table of another boot. Raises KallsymsError if
        the table cannot be read or has no symbol; hidden addresses are no error.
        """
        text = KallsymsText()
        try:
            with open(path, "rb") as file:
                read_text(file, text)
        except OSError as error:
            raise KallsymsError(
                f"{path} cannot be read: {error.strerror or error}",
                "name a readable copy of /proc/kallsyms",
            ) from None
        if not text.lines:
            raise KallsymsError(
                f"{path} holds no symbols",
                "a kernel lists them with CONFIG_KALLSYMS; if this is a copy, take it again",
            )
        return cls(text, read_module_sizes(modules) if modules else {})

    @classmethod
    def parse(
        cls,
        data: bytes,
        module_sizes: dict[str, tuple[int, int]] | None = None,
        strict: bool = False,
    ) -> Kallsyms:
        """Take a table's text; ``module_sizes`` has (base address, bytes) by module name.

        Lines that are no symbols are skipped and counted; with ``strict`` the first one
        raises KallsymsError with its line number.
        """
        text = KallsymsText(strict)
        text.add(data)
        return cls(text, module_sizes or {})

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def text_start(self) -> int | None:
        """The address of ``_text``, else of ``_stext``: it differs from boot to boot
        (KASLR), so it tells whether an address and this table belong together."""
        if self.hidden:
            return None
        for name in (b" _text", b" _stext"):
            for line in self._lines:
                if line.endswith(name):
                    return line_of.address_of(line)
        return None

    def is_kernel(self, address: int) -> bool:
        """Whether the address is in kernel space, going by this table's word size.

        On 64 bits that is bit 63. A 32-bit kernel's space begins with the image or with
        the modules, which ARM keeps in the 16 MB below it.
        """
        return self._floor <= address <= _TOP

    def find(self, address: int) -> Symbol | Reason:
        """The function that holds the address, or why there is none."""
        if self.hidden:
            return HIDDEN
        if not self._floor <= address <= _TOP:
            return UNKNOWN_ADDRESS
        after = bisect_right(self._lines, line_of.past(address))
        found = self._crowded.get(after) or self._choose(after)
        if isinstance(found, Symbol) and address < found.end:
            return found
        return IN_MODULE if self._is_in_module(address, after) else UNKNOWN_ADDRESS

    def aliases(self, address: int) -> list[str]:
        """All names of the function that holds the address, the preferred one first."""
        found = self.find(address)
        if not isinstance(found, Symbol):
            return []
        after = bisect_right(self._lines, line_of.past(found.start))
        return [line_of.split(line)[0] for line in self._ranked(self._group(after))]

    def by_name(self, name: str) -> list[Symbol]:
        """Every symbol of this name, data included, by address. Reads the whole table."""
        if self.hidden:
            return []
        found = []
        for index in line_of.named(self._lines, name):
            line = self._lines[index]
            after = bisect_right(self._lines, line_of.past(line_of.address_of(line)), index)
            found.append(self._symbol(line, after))
        return found

    def _choose(self, after: int) -> Symbol | Reason:
        """The answer of the lines that share an address and end before ``after``."""
        group = self._group(after)
        ranked = self._ranked(group)
        found = self._symbol(ranked[0], after) if ranked else UNKNOWN_ADDRESS
        if len(group) > _CROWD:
            self._crowded[after] = found
        return found

    def _group(self, after: int) -> list[bytes]:
        """The lines with the address of the one before ``after``, which are the last."""
        if not after:
            return []
        lines, first = self._lines, after - 1
        digits = lines[first][:16]
        while first and lines[first - 1].startswith(digits):
            first -= 1
        return lines[first:after]

    def _is_in_module(self, address: int, after: int) -> bool:
        """Whether a module has the address; without sizes, where it is the module on both sides.

        Since Linux 6.4 /proc/modules gives the bytes of all a module's areas together, so
        that this goes somewhat past the end of its code.
        """
        if self._extents:
            at = bisect_right(self._extents, (address, _TOP)) - 1
            return at >= 0 and address < sum(self._extents[at])
        if not 0 < after < len(self._lines):
            return False
        name, module = line_of.split(self._lines[after - 1])
        following = line_of.split(self._lines[after])[1]
        return module == following and line_of.kind_of(name, module) == MODULE

    def _ranked(self, group: list[bytes]) -> list[bytes]:
        """The lines of a group that can name a frame, the best first."""
        lines = [line for line in group if line_of.is_function(line) and not line_of.is_end(line)]
        if any(map(line_of.is_text_end, group)):
            lines = [line for line in lines if not line_of.is_marker(line)]
        if len(lines) > 1:
            lines.sort(key=line_of.preference)
            if line_of.is_bpf(lines[0]):
                # Early subprograms shared their main program's start; it came last.
                among = set(lines)
                return [line for line in reversed(self._listed) if line in among]
        return lines

    def _symbol(self, line: bytes, after: int) -> Symbol:
        start = line_of.address_of(line)
        name, module = line_of.split(line)
        kind = line_of.kind_of(name, module)
        return Symbol(start, self._end(start, after, kind, module), name, kind, module)

    def _end(self, start: int, after: int, kind: str, module: str | None) -> int:
        """Where a symbol ends that starts at ``start`` and before the line ``after``."""
        following, related = _TOP + 1, False
        if after < len(self._lines):
            neighbour = self._lines[after]
            following = line_of.address_of(neighbour)
            if kind == KERNEL:
                related = line_of.in_core_image(neighbour)
            elif kind == MODULE:
                related = line_of.split(neighbour)[1] == module
        base, size = self._sizes.get(module or "", (0, 0))
        if kind == MODULE and base <= start < base + size:
            return min(following, base + size)
        return following if related else min(following, start + PAGE)

    def _kernel_floor(self, narrow: bool) -> int:
        highest = self._lines[-1] if self._lines and not self.hidden else b"f"
        if not narrow and highest >= b"8":
            return _HALF
        starts = (line_of.address_of(line) for line in self._lines if line_of.is_function(line))
        lowest = next((start for start in starts if start), None)
        if lowest is None:
            return _NARROW_FLOOR if narrow else _HALF
        image = self.text_start
        if narrow and image is not None:
            lowest = min(lowest, image - image % _MODULE_AREA - _MODULE_AREA)
        return max(lowest, 1)
