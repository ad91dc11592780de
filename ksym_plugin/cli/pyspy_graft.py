"""Files of perf and py-spy, read, checked and put together: for ``ksym pyspy``."""

from __future__ import annotations

import contextlib
import json
import subprocess

from ksym_plugin.cli import flamegraph, inputs
from ksym_plugin.cli.output import plural, say
from ksym_plugin.history import locate
from ksym_plugin.perf.data import MAGIC
from ksym_plugin.python import pyspy, pyspy_graft, pyspy_match, pyspy_perf
from ksym_plugin.stacks import flamegraph as picture
from ksym_plugin.stacks import speedscope as speedscope_file
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Final

    from ksym_plugin.python.pyspy import Log
    from ksym_plugin.python.pyspy_graft import Grafted
    from ksym_plugin.python.pyspy_perf import Hit, Reader

#: What ``ksym pyspy record --keep`` calls its files.
PERF_DATA: Final = "perf.data"
PYSPY: Final = "pyspy.json"
LOG: Final = "pyspy.log"
SESSION: Final = "session.json"
_SCRIPT: Final = [
    "perf",
    "script",
    "--ns",
    "--header",
    "-F",
    "comm,pid,tid,time,event,ip,sym,symoff,dso",
]
#: UTC is py-spy's clock: a step of it, in ns, would misplace every sample after it.
_STEP: Final = 100_000
_MONOTONIC: Final = "record with: perf record -k CLOCK_MONOTONIC"


class Session:
    """What was seen of a recording besides its files.

    ``clocks`` are UTC and CLOCK_MONOTONIC in ns, read together before and after; ``outer``
    maps ids of threads in a PID namespace to the host's; ``rate`` is what py-spy was asked.
    """

    __slots__ = ("clocks", "outer", "rate")

    def __init__(self) -> None:
        self.clocks: list[tuple[int, int]] = []
        self.outer: dict[int, int] = {}
        self.rate: float | None = None

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"clocks": self.clocks, "outer": self.outer, "rate": self.rate}, file)

    def shift(self) -> int | None:
        """What to add to UTC for CLOCK_MONOTONIC; KsymError if UTC was set meanwhile."""
        shifts = [monotonic - utc for utc, monotonic in self.clocks]
        if not shifts:
            return None
        if max(shifts) - min(shifts) > _STEP:
            raise KsymError(
                "the clock was set during the recording, which cannot be undone", pyspy.AGAIN
            )
        return shifts[0]


def load_session(path: str) -> Session:
    """The session in a file. KsymError for another file."""
    session = Session()
    try:
        with open(path, encoding="utf-8") as file:
            held = json.load(file)
        session.clocks = [(int(utc), int(monotonic)) for utc, monotonic in held["clocks"]]
        session.outer = {int(inner): int(outer) for inner, outer in held["outer"].items()}
        session.rate = None if held["rate"] is None else float(held["rate"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise KsymError(f"{path} is no session of ksym pyspy record", pyspy.AGAIN) from None
    return session


class Targets:
    """Where results go: speedscope, folded stacks, a picture; None for not at all."""

    __slots__ = ("folded", "speedscope", "svg")

    def __init__(self, speedscope: str | None, folded: str | None, svg: str | None) -> None:
        self.speedscope = speedscope
        self.folded = folded
        self.svg = svg

    def write(self, grafted: Grafted, title: str) -> None:
        if self.speedscope:
            flamegraph.write(speedscope_file.write(title, grafted.profiles()), self.speedscope)
        if self.folded:
            with open(self.folded, "wb") as file:
                file.writelines(
                    line.encode("utf-8", "surrogateescape") for line in grafted.folded()
                )
        if self.svg:
            flamegraph.write(picture.draw(grafted.counts, picture.Picture(title)), self.svg)


class Files:
    """One recording: perf's data or text, py-spy's file and log, the history."""

    __slots__ = ("history", "log", "perf", "pyspy", "session")

    def __init__(
        self, perf: str, pyspy: str, log: str | None, session: Session, history: str | None
    ) -> None:
        self.perf = perf
        self.pyspy = pyspy
        self.log = log
        self.session = session
        self.history = history


def graft(files: Files, force: bool) -> Grafted:
    """Both sides together, with all that is to be known of how well they fit said."""
    log = _log(files.log)
    if log.settings.get("gil_only") == "true":
        raise KsymError(
            "py-spy was told --gil: it never sees a thread inside a system call",
            "record without --gil",
        )
    with open(files.pyspy, "rb") as file:
        document = pyspy.load(file.read())
    reader, hits = _perf_samples(files)
    threads = pyspy_graft.by_thread(hits)
    shift = _shift(files, reader)
    grafted = _graft(files, document, log, shift, threads, force)
    if not any(hit.kernel for hit in hits):
        say("no sample of perf has kernel frames: see what this user may see with: ksym doctor")
    if reader.passed_over:
        say(f"{reader.passed_over:,} samples of other events left out")
    return grafted


def _graft(
    files: Files,
    document: object,
    log: Log,
    shift: int,
    threads: Mapping[int, Sequence[Hit]],
    force: bool,
) -> Grafted:
    """By the instants at which py-spy stopped the process."""
    _refuse(log)
    profile = pyspy.parse(document)
    _note_version(profile.version)
    session = files.session
    # Who has a session had py-spy started by us, with --idle.
    dating = pyspy_match.date(profile, log, shift, session.outer, bool(session.clocks))
    verdict = pyspy_graft.check(threads, dating.threads)
    answers = pyspy_graft.matchers(dating, not (verdict.passes or force))
    natives = log.tids - set(dating.threads) - dating.misfits
    if dating.misfits - log.tids:
        # Python threads under ids of a namespace that were not noted: they may be any of these.
        natives = set()
    grafted = pyspy_graft.graft(threads, answers, dating.misfits, natives)
    say(pyspy_graft.run_line(dating, files.session.rate))
    say(grafted.tally.line())
    say(pyspy_graft.verdict_line(verdict, force))
    if log.errors:
        say(
            f"py-spy failed at {plural(log.errors, 'sample')}, nobody knows which: frames are"
            " given only where it makes no difference"
        )
    if dating.misfits:
        say(f"{plural(len(dating.misfits), 'thread')} unknown: samples and log do not fit")
    return grafted


def _log(path: str | None) -> Log:
    if path is None:
        return pyspy.Log()
    with open(path, "rb") as file:
        return pyspy.parse_log(file)


def _refuse(log: Log) -> None:
    """KsymError for recordings that nothing right can come of."""
    if not log.locks:
        raise KsymError(
            "py-spy's log does not date its samples",
            "record with: RUST_LOG=py_spy=info,remoteprocess=debug py-spy record"
            " -f speedscope --idle --threads … > LOG 2>&1, and give --pyspy-log LOG",
        )
    if log.errors > pyspy_match.MOST_SLACK:
        raise KsymError(
            f"py-spy failed at {log.errors} samples, so that the order of the others tells no time",
            "record again at a lower --rate",
        )


def _note_version(version: str) -> None:
    if version not in pyspy.TRIED:
        tried = ", ".join(pyspy.TRIED)
        say(
            f"py-spy {version or 'of unknown version'} is none of those tried ({tried}); its log"
            " is believed as far as it fits the samples in number"
        )


def _shift(files: Files, reader: Reader) -> int:
    if reader.is_monotonic is False:
        raise KsymError("perf's samples are not on CLOCK_MONOTONIC", _MONOTONIC)
    shift = files.session.shift()
    if shift is None:
        shift = reader.shift
    if shift is None or not reader.is_monotonic:
        raise KsymError(
            "nothing tells how perf's clock stands to py-spy's",
            f"{_MONOTONIC}, and print text with: perf script --header --ns",
        )
    return shift


def _perf_samples(files: Files) -> tuple[Reader, list[Hit]]:
    """perf's samples, kernel frames named by the history if there is one."""
    history = locate.find(files.history, files.perf)
    with _perf_text(files.perf) as text, contextlib.ExitStack() as stack:
        renamer = stack.enter_context(inputs.renamer(text, history, None)) if history else None
        reader = pyspy_perf.Reader(renamer)
        return reader, list(reader.read(text.pieces()))


@contextlib.contextmanager
def _perf_text(path: str) -> Iterator[inputs.Text]:
    """The text of a perf.data, or the file itself if it is such text."""
    with open(path, "rb") as file:
        is_data = file.read(len(MAGIC)) == MAGIC
        file.seek(0)
        if not is_data:
            yield inputs.Text(file)
            return
    call = [*_SCRIPT, "-i", path]
    try:
        child = subprocess.Popen(
            call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise KsymError(
            f"perf cannot be run ({error.strerror})",
            "install it, or give the text that perf script --ns --header prints elsewhere",
        ) from error
    with child:
        if child.stdout is not None:
            yield inputs.Text(child.stdout)
    if child.returncode:
        raise KsymError(f"perf script cannot read {path}", f"see: {' '.join(call)}")
