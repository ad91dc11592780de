"""The static symbols: the core image, modules, and what else /proc/kallsyms lists.

The table is kept as the file's own lines, sorted: a look-up is one bisection and a close
look at the few lines that share the address found. kallsyms has no lengths, so where a symbol
ends is worked out by each look-up:

- at the next symbol of any type: data is no answer for a frame, but it ends a function;
- at ``_etext`` and ``_einittext``, whatever their type: some kernels list these as data.
  Names of sections' ends own no bytes: behind ``__entry_text_end`` can be a megabyte of
  padding. ``__stop_NAME`` is one only where data or such an end has the same address:
  ``__stop_tty`` is a function;
- a module's symbols at the module's end, known from /proc/modules. A function that is not
  within its module was freed with the module's init, and is not in the table;
- after at most one page where nothing of the same image or module follows, and for
  ``[bpf]`` lines and the pages of kprobes and ftrace, whose neighbours say nothing.

Reading addresses takes CAP_SYSLOG and a ``kernel.kptr_restrict`` below 2; without them the
kernel prints zeros (``hidden``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import groupby

from ksym_plugin.kernel import modules, privileges
from ksym_plugin.timeline.errors import KallsymsError
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    HIDDEN,
    IN_MODULE,
    KERNEL,
    MODULE,
    OOL,
    UNKNOWN_ADDRESS,
    VSYSCALL_PAGE,
    Symbol,
    bpf_kind,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ksym_plugin.timeline.packed import FunctionRow
    from ksym_plugin.timeline.symbols import Reason

KALLSYMS = "/proc/kallsyms"
#: How far a symbol reaches at most where nothing better bounds it.
PAGE = 4096

#: The kernel's largest tables are some 30 MB. What is larger may have no end (a device).
MAX_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 17
#: ``_text`` comes early, after per-CPU symbols at the most.
_START_BYTES = 4 << 20
_START_BLOCK = 1 << 13

_BOM = b"\xef\xbb\xbf"
_BPF_SUFFIX = b"\t[bpf]"
#: The modules the kernel makes up for pages of kprobes and ftrace (kernel/kallsyms.c).
_PSEUDO = "__builtin__"
#: What ends the lines of BPF, and of out-of-line code.
_TAIL_MARKS = (b"\t[bpf]\n", b"\t[__builtin__")
_MADE_UP = (b"[bpf]", b"[__builtin__")
_PADDING = b"00000000"

# What the kernel does not print, in text that begins with a newline and does not end with one:
# a line that begins otherwise, or a TAB that does not introduce the module's name at its end.
_ODD_START = re.compile(rb"\n(?![0-9a-f]{16} [!-~] [^\s])")
_ODD_TAB = re.compile(rb"\t(?!\[[^\]\s]+\](?:\n|\Z))")
# ARM's marks of where code and literals begin.
_MAPPING_NAME = re.compile(rb"\$[adtx](?:\.|\Z)")
_LINE = re.compile(
    rb"\s*(?:0[xX])?(0*[0-9a-fA-F]{1,16})\s+([!-~])\s+([^\s]+)(?:\s+\[([^\]\s]+)\])?\s*\Z"
)

# Where the type and the name begin in a line.
_TYPE = 17
_NAME = 19
_FUNCTIONS = frozenset(b"tTwW")
_TEXT_ENDS = frozenset((b"_etext", b"_einittext"))
#: Where the image begins, by the name that is preferred (as perf prefers it).
ANCHORS = ("_text", "_stext")
_STARTS = (b" _text", b" _stext")
_MARKER = re.compile(
    rb"_[se]?(?:init)?text|_end|__(?:start|stop)_.*|__init_(?:begin|end)"
    rb"|__(?:.*_)?(?:text|initcall|vectors|stubs|thunk)_(?:start|end)"
)
#: Of those, the ends: a frame behind one is not in that section.
_END = re.compile(
    rb"_e(?:init)?text|_end|__init_end"
    rb"|__(?:.*_)?(?:text|initcall|vectors|stubs|thunk)_end"
)

_TOP = (1 << 64) - 1
_HALF = 1 << 63
# The usual beginning of kernel space on 32 bits, for a table that gives no hint.
_NARROW_FLOOR = 0xBF000000
_MODULE_AREA = 1 << 24
# More names than this at one address are looked through once, not once a look-up.
_CROWD = 32


class KallsymsText:
    """Collects the lines of one table; those that are no symbols are left out.

    ``lines`` are in the file's order, and all in one form: 16 digits, type, name, perhaps a
    tab and the module. ``bpf_tail`` are the lines from the first ``[bpf]`` line on, in the
    file's order also after ``lines`` have been sorted. ``narrow`` says that addresses of 32
    bits were seen.
    """

    def __init__(self, module_sizes: dict[str, tuple[int, int]] | None = None) -> None:
        """``module_sizes`` has (base address, bytes) of modules, by name."""
        self._bounds = {
            b"[%b]" % name.encode(): (b"%016x" % base, b"%016x" % (base + size))
            for name, (base, size) in (module_sizes or {}).items()
        }
        # The module of the last lines, those before it, and the highest line of all.
        self._module = self._highest = b""
        self._left: set[bytes] = set()
        self.lines: list[bytes] = []
        self.bpf_tail: list[bytes] = []
        self.narrow = False

    def add(self, block: bytes) -> None:
        """Take in some whole lines; the last may lack its newline."""
        if not self.lines and block.startswith(_BOM):
            block = block[len(_BOM) :]
        text = b"\n" + block[: -1 if block.endswith(b"\n") else None]
        lines = self._regular(text)
        if lines is None:
            matches = filter(None, map(_LINE.match, text[1:].split(b"\n")))
            lines = [self._rewrite(match) for match in matches if not _MAPPING_NAME.match(match[3])]
        if b"\t[" in text:
            groups = groupby(lines, lambda line: line.partition(b"\t")[2])
            lines = [line for module, of_one in groups for line in self._current(module, of_one)]
        if self.bpf_tail:
            self.bpf_tail += lines
        elif b"[bpf]" in text:
            first = next((at for at, line in enumerate(lines) if is_bpf(line)), len(lines))
            self.bpf_tail = lines[first:]
        self.lines += lines

    def _current(self, module: bytes, lines: Iterable[bytes]) -> list[bytes]:
        """Lines of one module without the functions that it had for its init.

        The memory of those is others' by now. ftrace keeps their names (kernel/trace/ftrace.c,
        ``save_ftrace_mod_rec``), and they are listed after all modules.
        """
        lines = list(lines)
        if not module or module.startswith(_MADE_UP):
            return lines
        if module != self._module:
            self._left.add(self._module)
            self._module = module
        low, high = self._bounds.get(module, (b"", b"g"))
        if module in self._left:
            # In a copy that was sorted a module can come twice as well.
            low = max(low, self._highest)
        if not low <= min(lines) <= max(lines) < high:
            lines = [line for line in lines if not is_function(line) or low <= line < high]
        self._highest = max(self._highest, *lines, b"")
        return lines

    def _regular(self, text: bytes) -> list[bytes] | None:
        """The lines of text as the kernel prints it, or None for any other text."""
        narrow = text[9:10] == b" "
        if narrow:
            text = text.replace(b"\n", b"\n" + _PADDING)
        if b"\r" in text or b"$" in text or _ODD_START.search(text) or _ODD_TAB.search(text):
            return None
        lines = text.split(b"\n")
        del lines[0]
        if text.count(b" ") != 2 * len(lines):
            return None
        self.narrow |= narrow
        return lines

    def _rewrite(self, match: re.Match[bytes]) -> bytes:
        printed, kind, name, module = match.groups()
        address = printed.lstrip(b"0")
        # Not by zero: a 64-bit table has it for what is relative to a CPU's area.
        if address and len(printed) <= 8:
            self.narrow = True
        suffix = b"\t[%b]" % module if module else b""
        return b"%b %b %b%b" % (address.lower().rjust(16, b"0"), kind, name, suffix)


def blocks(path: str, size: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """A table's text, some whole lines at a time: the whole of it beside all its lines would
    double a load's memory. OSError; KallsymsError if it is too long."""
    total = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(size)
            if not block:
                return
            total += len(block)
            if total > MAX_BYTES:
                raise KallsymsError(
                    f"the kallsyms table is larger than {MAX_BYTES >> 20} MB",
                    "name a copy of /proc/kallsyms",
                )
            if not block.endswith(b"\n"):
                block += file.readline(size)
            yield block


def text_start(path: str = KALLSYMS) -> int | None:
    """The address of ``_text``, else of ``_stext``; None where it is hidden or not listed.

    The same answer as ``Kallsyms.text_start``, at a hundredth of the cost.
    """
    found: dict[str, int] = {}
    total = 0
    try:
        for block in blocks(path, _START_BLOCK):
            text = KallsymsText()
            text.add(block)
            found = {**_anchors(text.lines), **found}
            total += len(block)
            if ANCHORS[0] in found or total > _START_BYTES:
                break
    except OSError:
        return None
    return _first_anchor(found)


def _anchors(lines: Iterable[bytes]) -> dict[str, int]:
    """Where ``_text`` and ``_stext`` are."""
    found: dict[str, int] = {}
    for line in lines:
        if line.endswith(_STARTS):
            found.setdefault(line[_NAME:].decode(), address_of(line))
            if len(found) == len(_STARTS):
                break
    return found


def _first_anchor(found: dict[str, int]) -> int | None:
    """The address of the preferred one; None where it is hidden."""
    return next((found[name] or None for name in ANCHORS if name in found), None)


class Tail:
    """The last part of kallsyms: BPF and out-of-line code.

    ``bpf`` are (start, name), and ``ool`` (start, name, module), by start. Both are empty
    where there is no kallsyms and where addresses are hidden (they are all zero then);
    ``bpf`` is where net.core.bpf_jit_kallsyms is 0.
    """

    def __init__(self, lines: list[bytes]) -> None:
        split_lines = ((address_of(line), *split(line)) for line in lines)
        listed = sorted((at, name, module or "") for at, name, module in split_lines if at)
        self.bpf = [(at, name) for at, name, module in listed if module == BPF_MODULE]
        self.ool = [each for each in listed if each[2].startswith(_PSEUDO)]


def read_tail(path: str = KALLSYMS) -> Tail:
    """The last part of kallsyms; the lines before it are not looked at."""
    text = KallsymsText()
    try:
        for block in blocks(path):
            if text.lines:
                text.add(block)
                continue
            found = [at for at in map(block.find, _TAIL_MARKS) if at >= 0]
            if found:
                text.add(block[block.rfind(b"\n", 0, min(found)) + 1 :])
    except (OSError, KallsymsError):
        return Tail([])
    return Tail(text.lines)


def functions_by_module(path: str, listing: str) -> dict[str, list[FunctionRow]]:
    """Start, length and name of each function of all modules, by module.

    Nothing is read from BPF's lines on, which alone make reading slow. ``listing`` is
    /proc/modules. OSError; KallsymsError if the table is too long.
    """
    sizes = modules.extents(listing)
    text = KallsymsText(sizes)
    for block in blocks(path):
        end = block.find(_BPF_SUFFIX)
        before = block if end < 0 else block[: block.rfind(b"\n", 0, end) + 1]
        if b"\t[" in before:
            text.add(b"".join(line for line in before.splitlines(True) if b"\t[" in line))
        if end >= 0:
            break
    table = Kallsyms(text, sizes)
    starts: dict[str, set[int]] = {}
    for line in filter(is_function, text.lines):
        name, module = split(line)
        if module is not None and kind_of(name, module) == MODULE:
            starts.setdefault(module, set()).add(address_of(line))
    return {module: _bounded(table, of_one) for module, of_one in starts.items()}


def _bounded(table: Kallsyms, starts: set[int]) -> list[FunctionRow]:
    """The functions that begin at ``starts``. One that no other of the module follows goes on
    to the end of its page, which is the module's in any case."""
    rows = []
    for start in sorted(starts):
        symbol = table.find(start)
        if isinstance(symbol, Symbol):
            end = symbol.end if symbol.end in starts else min(symbol.end, (start | (PAGE - 1)) + 1)
            rows += [(start, end - start, name) for name in table.aliases(start)]
    return rows


def address_of(line: bytes) -> int:
    """The address a line begins with."""
    return int(line[:16], 16)


def after_all_of(address: int) -> bytes:
    """What sorts behind all lines of an address and before those of the next."""
    return b"%016x!" % address  # "!" follows the blank that ends the digits


def is_function(line: bytes) -> bool:
    """Whether the type is text or weak; other types are data, or no addresses at all."""
    return line[_TYPE] in _FUNCTIONS


def is_marker(line: bytes) -> bool:
    """Whether the name is that of a section's start or end rather than of a function."""
    return _MARKER.fullmatch(_name(line)) is not None


def is_bpf(line: bytes) -> bool:
    """Whether the line is one of BPF's."""
    return line.endswith(_BPF_SUFFIX)


def split(line: bytes) -> tuple[str, str | None]:
    """The name and the module; of the modules only ``[bpf]`` keeps its brackets."""
    name, _, module = line[_NAME:].decode(errors="backslashreplace").partition("\t")
    if not module:
        return name, None
    return name, module if module == BPF_MODULE else module[1:-1]


def kind_of(name: str, module: str | None) -> str:
    """The kind of a symbol from where it is listed."""
    if module is None:
        return KERNEL
    if module == BPF_MODULE:
        return bpf_kind(name)
    return OOL if module.startswith(_PSEUDO) else MODULE


def preference(line: bytes) -> tuple[bool, bool, bool, bool, int, int, bytes]:
    """Sorts the names of one address: functions before whole pages of kprobes and ftrace,
    strong before weak, global before local, functions before sections' starts and ends, few
    leading underscores first, then the longer."""
    kind, name = line[_TYPE : _TYPE + 1], _name(line)
    underscores = len(name) - len(name.lstrip(b"_"))
    is_page = _TAIL_MARKS[1] in line
    return is_page, kind in b"wW", kind.islower(), is_marker(line), underscores, -len(name), name


def _name(line: bytes) -> bytes:
    return line[_NAME:].partition(b"\t")[0]


class Kallsyms:
    """The symbols of one table. ``hidden``: all addresses are zero, so ``find`` says HIDDEN."""

    def __init__(self, text: KallsymsText, module_sizes: dict[str, tuple[int, int]]) -> None:
        text.lines.sort()
        self._lines = text.lines
        self._listed = text.bpf_tail
        self._sizes = module_sizes
        self._crowded: dict[int, Symbol | Reason] = {}
        self.hidden = bool(self._lines) and not address_of(self._lines[-1])
        self._floor = self._kernel_floor(text.narrow)

    @classmethod
    def load(cls, path: str = KALLSYMS, listing: str | None = modules.LISTING) -> Kallsyms:
        """Read a table, and modules' sizes from ``listing`` where that can be read.

        Give ``listing=None`` for a saved table of another boot. Raises KallsymsError if
        the table cannot be read or has no symbol; hidden addresses are no error.
        """
        sizes = modules.extents(listing) if listing else {}
        text = KallsymsText(sizes)
        try:
            for block in blocks(path):
                text.add(block)
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
        return cls(text, sizes)

    @classmethod
    def load_shown(cls) -> Kallsyms:
        """The running kernel's table. KallsymsError, too, where it hides its addresses."""
        table = cls.load()
        if table.hidden:
            raise KallsymsError(
                "kernel addresses are hidden from this user", privileges.SHOW_ADDRESSES
            )
        return table

    @classmethod
    def parse(cls, data: bytes, module_sizes: dict[str, tuple[int, int]] | None = None) -> Kallsyms:
        """Take a table's text; ``module_sizes`` has (base address, bytes) by module name."""
        text = KallsymsText(module_sizes)
        text.add(data)
        return cls(text, module_sizes or {})

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def anchors(self) -> dict[str, int]:
        """Where ``_text`` and ``_stext`` are, if they are listed and not hidden."""
        return {} if self.hidden else _anchors(self._lines)

    @property
    def text_start(self) -> int | None:
        """The address of ``_text``, else of ``_stext``: it differs from boot to boot
        (KASLR), so it shows whether an address and this table belong together."""
        return _first_anchor(self.anchors)

    def is_kernel(self, address: int) -> bool:
        """Whether the address is in kernel space, going by this table's word size.

        On 64 bits that is bit 63. A 32-bit kernel's space begins with the image or with
        the modules, which ARM keeps in the 16 MB below it.
        """
        return self._floor <= address <= _TOP and address >> 12 != VSYSCALL_PAGE

    def find(self, address: int) -> Symbol | Reason:
        """The function that holds the address, or why there is none."""
        if self.hidden:
            return HIDDEN
        if not self.is_kernel(address):
            return UNKNOWN_ADDRESS
        after = bisect_right(self._lines, after_all_of(address))
        found = self._crowded.get(after) or self._choose(after)
        if isinstance(found, Symbol) and address < found.end:
            return found
        return IN_MODULE if self._is_in_module(address, after) else UNKNOWN_ADDRESS

    def aliases(self, address: int) -> list[str]:
        """All names of the function that holds the address, the preferred one first."""
        found = self.find(address)
        if not isinstance(found, Symbol):
            return []
        after = bisect_right(self._lines, after_all_of(found.start))
        return [split(line)[0] for line in self._ranked(self._group(after))]

    def by_name(self, name: str) -> list[Symbol]:
        """Every symbol of this name, data included, by address. Reads the whole table."""
        if self.hidden:
            return []
        plain = b" " + name.encode(errors="replace")
        with_module = plain + b"\t"
        found = []
        for index, line in enumerate(self._lines):
            if line.endswith(plain, _TYPE) or line.startswith(with_module, _NAME - 1):
                after = bisect_right(self._lines, after_all_of(address_of(line)), index)
                found.append(self._symbol(line, after))
        return found

    def _choose(self, after: int) -> Symbol | Reason:
        """The answer of the lines that share an address, the last of which precedes ``after``."""
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
        if self._sizes:
            return any(base <= address < base + size for base, size in self._sizes.values())
        if not 0 < after < len(self._lines):
            return False
        name, module = split(self._lines[after - 1])
        following = split(self._lines[after])[1]
        return module == following and kind_of(name, module) == MODULE

    def _ranked(self, group: list[bytes]) -> list[bytes]:
        """The lines of a group that can name a frame, the best first."""
        lines = [line for line in group if is_function(line) and not _END.fullmatch(_name(line))]
        if any(not is_function(line) or _name(line) in _TEXT_ENDS for line in group):
            lines = [line for line in lines if not is_marker(line)]
        if len(lines) > 1:
            lines.sort(key=preference)
            if is_bpf(lines[0]):
                # Early subprograms shared their main program's start; it came last.
                among = set(filter(is_bpf, lines))
                rest = [line for line in lines if line not in among]
                return [line for line in reversed(self._listed) if line in among] + rest
        return lines

    def _symbol(self, line: bytes, after: int) -> Symbol:
        start = address_of(line)
        name, module = split(line)
        kind = kind_of(name, module)
        return Symbol(start, self._end(start, after, kind, module), name, kind, module)

    def _end(self, start: int, after: int, kind: str, module: str | None) -> int:
        """Where a symbol ends that starts at ``start`` and before the line ``after``."""
        following, related = _TOP + 1, False
        if after < len(self._lines):
            neighbour = self._lines[after]
            following = address_of(neighbour)
            if kind == KERNEL:
                related = b"\t" not in neighbour
            elif kind == MODULE:
                related = split(neighbour)[1] == module
        base, size = self._sizes.get(module or "", (0, 0))
        if kind == MODULE and base <= start < base + size:
            return min(following, base + size)
        return following if related else min(following, start + PAGE)

    def _kernel_floor(self, narrow: bool) -> int:
        highest = self._lines[-1] if self._lines and not self.hidden else b"f"
        if not narrow and highest >= b"8":
            return _HALF
        starts = (address_of(line) for line in self._lines if is_function(line))
        lowest = next((start for start in starts if start), None)
        if lowest is None:
            return _NARROW_FLOOR if narrow else _HALF
        image = self.text_start
        if narrow and image is not None:
            lowest = min(lowest, image - image % _MODULE_AREA - _MODULE_AREA)
        return max(lowest, 1)
