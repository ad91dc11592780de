"""How the handler starts: inside a perf that embeds Python, or as a program of its own.

perf once embedded Python and called a script's functions. It now starts scripts as
programs, which ``import perf`` and drive a session themselves; what that module offers is
in tools/perf/python/perf.pyi and tools/perf/util/python.c of Linux. Without it there is
still what ``perf script`` prints.
"""

from __future__ import annotations

import gc
import os
import signal
import stat
import struct
import sys

from ksym_plugin.perf import data
from ksym_plugin.perf.handler import Handler, Options, parse
from ksym_plugin.perf.output import give_up_output, say
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType
    from typing import IO, Any, Protocol

    from ksym_plugin.perf.repaint import Renamer

    class Evsel(Protocol):
        """``perf.evsel``; its ``str`` is ``evsel(name)``."""

        type: int
        size: int
        config: int
        sample_period: int
        sample_type: int

    class Named(Protocol):
        """``perf.callchain_node``; what has no name is ``[unknown]``."""

        @property
        def symbol(self) -> str | None: ...
        @property
        def dso(self) -> str | None: ...

    class Node(Named, Protocol):
        """``perf.callchain_node``."""

        ip: int

    class Sample(Named, Protocol):
        """``perf.sample_event``: what is read of it; leaf first."""

        evsel: Evsel
        callchain: Sequence[Node] | None
        sample_pid: int
        sample_tid: int
        sample_cpu: int
        sample_ip: int
        sample_time: int
        sample_period: int
        sym_start: int | None
        sym_end: int | None


#: Built into perf's own interpreter and no other.
_PERF_MODULE = "perf_trace_context"
_PIECE = 1 << 20
#: What the module gives for a frame or a file without a name.
_UNKNOWN = "[unknown]"
#: The beginning of a perf_event_attr: type, size, config, sample_period, sample_type.
_ATTR = struct.Struct("=IIQQQ")


def start(arguments: list[str]) -> Handler:
    """The handler for the perf this runs inside of; exits with a sentence if it cannot be.

    Where there is no perf around it, it is a program: that runs, and exits at its end.
    """
    is_embedded = _PERF_MODULE in sys.builtin_module_names
    options = parse(arguments, is_embedded)
    _prepare()
    try:
        if is_embedded:
            return Handler(options, data.path_of_running_perf())
        sys.exit(run(options))
    except KsymError as error:
        say(str(error))
        sys.exit(1)


def _prepare() -> None:
    """Set up the interpreter, which does nothing but handle samples."""
    # Every sample is a tree of dicts without cycles: looking for some costs a twentieth.
    gc.disable()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As perf itself: a closed pipe ends it.
    if sys.stdout is None:  # closed by whoever started perf
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]


def run(options: Options) -> int:
    """The exit status. KsymError if there is nothing to read, or it cannot be read."""
    perf = _module()
    if perf is None:
        return run_over_text(options)
    path = options.input or ("-" if is_fed() else "perf.data")
    try:
        source = perf.data(path)
    except (OSError, ValueError) as error:
        raise KsymError(f"{path} cannot be read ({error})") from error
    handler = Handler(options, path)
    Samples(perf, source, handler).process()
    return int(handler.is_cut_short)


def _module() -> ModuleType | None:
    """perf's module; another module of that name (PyPI has had one) has no sessions."""
    try:
        import perf
    except ImportError:
        return None
    return perf if hasattr(perf, "session") else None


def is_fed() -> bool:
    """Whether standard input holds something: a pipe, or a file."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def run_over_text(options: Options) -> int:
    """The exit status. KsymError if there is no text, or it cannot be read."""
    if options.input is None and not is_fed():
        say("this is a script for perf; run: perf script -s ksym_handler.py, or: ksym script")
        return 1
    if options.format == "report":
        raise KsymError("text is not enough for a report", "run: ksym report")
    if options.lines or options.vmlinux is not None:
        raise KsymError("text gets no source lines", "run: ksym script --lines")
    handler = Handler(options, options.input)
    try:
        return _print_named(options, handler.renamer())
    finally:
        handler.close()


def _print_named(options: Options, renamer: Renamer) -> int:
    try:
        if options.input is None:
            _print(sys.stdin.buffer, options.format, renamer)
            status = 0
        else:
            status = _print_file(options.input, options.format, renamer)
        sys.stdout.flush()
    except OSError as error:
        give_up_output(error)
        status = 1
    for line in renamer.report():
        say(line)
    return status


def _print_file(path: str, form: str, renamer: Renamer) -> int:
    """What perf script prints of a perf.data; its exit status."""
    import subprocess

    call = ["perf", "script", "--ns", "-i", path]
    try:
        child = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        raise KsymError(f"perf cannot be run ({error.strerror})", "install it") from error
    with child:
        if child.stdout is not None:
            _print(child.stdout, form, renamer)
    return child.returncode


def _print(stream: IO[bytes], form: str, renamer: Renamer) -> None:
    out = sys.stdout.buffer
    if form == "text":
        from ksym_plugin.perf.repaint import Annotator

        annotator = Annotator(renamer)
        for piece in _pieces(stream):
            out.write(annotator.feed(piece))
            out.flush()
        out.write(annotator.close())
        return
    from ksym_plugin.perf import fold
    from ksym_plugin.stacks import flamegraph, folded, speedscope

    folder = fold.Folder(fold.FoldOptions(kernel=True, bpf=form != "folded"), renamer)
    for piece in _pieces(stream):
        folder.feed(piece)
    folder.close()
    if form == "folded":
        out.writelines(folder.sums.lines())
        return
    stacks = folded.parse(folder.sums.lines())
    if form == "svg":
        sys.stdout.writelines(flamegraph.draw(stacks, flamegraph.Picture("perf script")))
    else:
        profiles = [("all", stacks.ordered())]
        sys.stdout.writelines(speedscope.write("perf script", stacks.table, profiles))


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """The stream in pieces, each as soon as it is there."""
    try:
        while piece := os.read(stream.fileno(), _PIECE):
            yield piece
    except OSError as error:
        raise KsymError(f"the text cannot be read ({error.strerror})") from error


class Samples:
    """The samples of a ``perf.data``, handed on in the shape embedding perfs gave them.

    OSError or ValueError of the module's are KsymErrors here. A name that is not UTF-8
    cannot be had from it, and counts as none.
    """

    def __init__(self, perf: ModuleType, source: object, handler: Handler) -> None:
        self._handler = handler
        try:
            self._session: Any = perf.session(source, sample=self._sample)
        except (OSError, ValueError) as error:
            handler.close()
            raise KsymError(f"{source} cannot be read ({error})") from error

    def process(self) -> None:
        try:
            self._session.process_events()
        except (OSError, ValueError) as error:
            raise KsymError(f"perf stopped reading ({error})") from error
        finally:
            self._session = None  # It holds this object's method.
            self._handler.trace_end()

    def _sample(self, sample: Sample) -> None:
        try:
            event = self._event(sample)
        except Exception as error:  # noqa: BLE001 - it would end the session
            self._handler.tally.failed("left out", error)
        else:
            self._handler.process_event(event)

    def _event(self, sample: Sample) -> dict[str, Any]:
        chain = sample.callchain
        name = _event_name(sample.evsel)
        event: dict[str, Any] = {
            "ev_name": name,
            "attr": self._handler.recorded.attrs.get(name) or _attr(sample.evsel),
            "comm": self._comm(sample),
            "callchain": None if chain is None else [_node(entry) for entry in chain],
            "sample": {
                "pid": sample.sample_pid,
                "tid": sample.sample_tid,
                "cpu": sample.sample_cpu & 0xFFFF_FFFF,
                "ip": sample.sample_ip,
                "time": sample.sample_time,
                "period": sample.sample_period,
            },
        }
        if not chain:
            symbol, dso = _name(sample, "symbol"), _name(sample, "dso")
            event.update(symbol=symbol, symoff=_offset(sample), dso=dso)
        return event

    def _comm(self, sample: Sample) -> str | None:
        """The task's name; the module finds the first thread of a process, and may lack others."""
        for number in (sample.sample_tid, sample.sample_pid):
            try:
                comm: str | None = self._session.find_thread(number).comm()
            except (TypeError, ValueError, OverflowError):
                continue
            if comm is not None:
                return comm
        return None


def _node(entry: Node) -> dict[str, Any]:
    """A frame; the module has no offset in its function."""
    node: dict[str, Any] = {"ip": entry.ip}
    name, dso = _name(entry, "symbol"), _name(entry, "dso")
    if name is not None:
        node["sym"] = {"name": name}
    if dso is not None:
        node["dso"] = dso
    return node


def _name(thing: Named, field: str) -> str | None:
    """A symbol or a dso; None for what has no name, or one that is not UTF-8."""
    try:
        name: str = getattr(thing, field)
    except UnicodeDecodeError:
        return None
    return None if name == _UNKNOWN else name


def _offset(sample: Sample) -> int | None:
    """Where in its function a sample is; of a file's function perf tells it in the file only."""
    start, end = sample.sym_start, sample.sym_end
    if start is None or end is None or not start <= sample.sample_ip < end:
        return None
    return sample.sample_ip - start


def _event_name(evsel: Evsel) -> str:
    """The name out of ``evsel(name)``."""
    text = str(evsel)
    return text[len("evsel(") : -1] if text.startswith("evsel(") and text.endswith(")") else text


def _attr(evsel: Evsel) -> bytes:
    """As much of a perf_event_attr as the module tells; its clock is not in it."""
    return _ATTR.pack(evsel.type, evsel.size, evsel.config, evsel.sample_period, evsel.sample_type)
