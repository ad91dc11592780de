"""perf script text to folded stacks."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksym_plugin.cli import fold
from ksym_plugin.kernel.worker import Worker
from ksym_plugin.perf import repaint
from ksym_plugin.perf.fold import Folder, FoldOptions, Sums, format_function
from ksym_plugin.perf.namer import Tally
from ksym_plugin.perf.repaint import Renamer
from ksym_plugin.timeline.errors import HistoryError, KsymError
from tests.unit.texts import (
    REFERENCE,
    A,
    B,
    annotated,
    corpus,
    folded,
    folder_of,
    one_place,
    renamer,
)

SLOW_MACHINE = [HealthCheck.too_slow]
REPO = Path(__file__).parents[3]
USER = b"\t          401000 main+0x4 (/bin/x)\n"


def sample(*frames: bytes, head: bytes = b"demo  77/78 [000] 5.500000:  3 cycles: ") -> bytes:
    return head + b"\n" + b"".join(frames) + b"\n"


def lines_of(text: bytes, **how: object) -> bytes:
    sums = folder_of(text, **how).sums
    return b"".join(sums.lines(sums.counts.choose(None)))


@pytest.mark.parametrize(
    "how, stack",
    [
        ({}, "demo;main"),
        ({"pid": True}, "demo-77;main"),
        ({"tid": True}, "demo-77/78;main"),
        ({"pid": True, "tid": True}, "demo-77/78;main"),
    ],
)
def test_tasks_are_told_apart_as_asked(how: dict[str, bool], stack: str) -> None:
    assert folded(sample(USER) + sample(USER), **how) == {stack: 6}


@pytest.mark.parametrize(
    "frame, how, spelled",
    [
        (b"ffffffff81000404 f+0x4 ([kernel.kallsyms])", {}, "f"),
        (b"ffffffff81000404 f+0x4 ([kernel.kallsyms])", {"kernel": True}, "f_[k]"),
        (b"ffffffff81000404 f+0x4 ([kernel.kallsyms])", {"bpf": True}, "f"),
        (b"ffffffff81000404 [unknown] ([kernel.kallsyms])", {}, "[[kernel.kallsyms]]"),
        (
            b"ffffffff81000404 [unknown] ([nf])",
            {"addrs": True, "kernel": True},
            "[[nf] <ffffffff81000404>]_[k]",
        ),
        (b"ffffffff81000404 [unknown] ([unknown])", {"kernel": True}, "[unknown]"),
        (
            b"ffffffff81000404 [unknown] ([unknown])",
            {"addrs": True},
            "[unknown <ffffffff81000404>]",
        ),
        (b"ffffffff81000404 f+0x4 ([bpf])", {"kernel": True}, "f_[k]"),
        (b"ffffffff81000404 f+0x4 ([bpf])", {"kernel": True, "bpf": True}, "f_[b]"),
        (
            b"ffffffff81000404 bpf_trampoline_6 (bpf_trampoline_6)",
            {"bpf": True},
            "bpf_trampoline_6_[b]",
        ),
        (
            b"ffffffff81000404 bpf_trampoline_6? (bpf_trampoline_6)",
            {"bpf": True},
            "bpf_trampoline_6?_[b]",
        ),
        (b"ffffffff81000404 %s+0x4 ([kernel.kallsyms])" % A.encode(), {"bpf": True}, A + "_[b]"),
        (b"          401000 %s+0x4 (/bin/x)" % A.encode(), {"bpf": True}, A),
        (b"          401000 f (/tmp/perf-7.map)", {"jit": True}, "f_[j]"),
        (b"          401000 f (/tmp/jitted-7-1.so)", {"jit": True}, "f_[j]"),
        (b"          401000 f (/tmp/perf-7.map)", {"kernel": True}, "f"),
        (b"          401000 a->b->c (/tmp/perf-7.map)", {"jit": True}, "a_[j];b_[i];c_[i]"),
        (b"          401000 p::operator->() const (/bin/x)", {}, "p::operator->"),
        (
            b"          401000 (anonymous namespace)::f(int) (/bin/x)",
            {},
            "(anonymous namespace)::f",
        ),
        (b"          401000 [unknown] (/lib/libc.so.6)", {}, "[libc.so.6]"),
        (b"          401000 [unknown] (/memfd:jit (deleted))", {}, "[memfd:jit (deleted)]"),
        (b"          401000  (/lib/libc.so.6)", {}, " "),
    ],
)
def test_how_a_frame_is_spelled(frame: bytes, how: dict[str, bool], spelled: str) -> None:
    assert folded(sample(b"\t" + frame + b"\n"), **how) == {f"demo;{spelled}": 3}


@pytest.mark.parametrize(
    "name, tidy",
    [
        (b"f(int)", b"f"),
        (b"net/http.(*Client).Do", b"net/http.(*Client).Do"),
        (
            b"std::function<void (int)>::operator()(int) const",
            b"std::function<void (int)>::operator",
        ),
        (b"{lambda(int)#2}::f(int)", b"{lambda(int)#2}::f"),
        (b"Lx/Y;.<init>(Lz;)V", b"Lx/Y:.<init>"),
        (b"a\"b'c", b"abc"),
        (b"a\x01b\rc", b"a b c"),
        (b"(((((", b"((((("),
        (b")))(x", b")))"),
        (b"operator<<(int)", b"operator<<"),
        (b"A<B>::operator<(B<C> const&)", b"A<B>::operator<"),
        (b"py::f:/a (1).py", b"py::f:/a (1).py"),
    ],
)
def test_what_is_left_of_a_name(name: bytes, tidy: bytes) -> None:
    assert format_function(name) == tidy


def test_frames_are_repaired_first_where_there_is_a_history() -> None:
    unnamed = b"\tffffffffc0001004 [unknown] ([unknown])\n"
    late = b"demo 77/78 6.500000: 1 cycles: "
    text = sample(unnamed, USER) + sample(unnamed, USER, head=late)
    by = renamer(one_place())
    assert folded(text, by, kernel=True) == {f"demo;main;{A}_[k]": 3, f"demo;main;{B}_[k]": 1}
    assert folded(text, renamer(one_place()), bpf=True) == {
        f"demo;main;{A}_[b]": 3,
        f"demo;main;{B}_[b]": 1,
    }
    assert (by.tally.added, by.tally.confirmed) == (2, 0)
    core = b"\tffffffff81000404 f+0x4 ([kernel.kallsyms])\n"
    by = renamer(one_place())
    assert folded(sample(core, unnamed) + sample(core), by) == {f"demo;{A};f": 3, "demo;f": 3}
    assert (by.tally.added, by.tally.confirmed) == (1, 2)


def test_a_line_of_blanks_ends_no_stack() -> None:
    blanks = b"   \n"
    core = b"\tffffffff81000010 a+0x0 ([kernel.kallsyms])\n"
    assert folded(sample(core, blanks, USER)) == {"demo;main;a": 3}
    assert folded(sample(core, b"  \n", b"  x.c:1\n", USER), srcline=True) == {"demo;main;a": 3}
    # What follows tells: a header begins a sample.
    assert folded(sample(core, blanks) + sample(USER), piece=30) == {"demo;a": 3, "demo;main": 3}
    assert folded(sample(core)[:-1] + blanks + sample(USER)) == {"demo;a": 3, "demo;main": 3}


def test_samples_without_a_task_have_a_name() -> None:
    # perf script -F time,event,ip,sym
    assert folded(sample(USER, head=b"  5.500000: cycles: ")) == {"[unknown];main": 1}


def test_an_address_behind_another_in_columns() -> None:
    head = b"app 7 5.5: 1 cycles: "
    for before in (b"    7ffd1234abcd", b"               0", b""):
        line = head + before + b"           401136 main+0x4 (/bin/x)\n"
        assert folded(line + line) == {"app;main": 2}


def test_samples_or_their_periods_are_counted() -> None:
    assert folded(sample(USER) * 2) == {"demo;main": 6}
    assert folded(sample(USER) * 2, samples=True) == {"demo;main": 2}


def test_samples_that_nothing_separates() -> None:
    head = b"           false 39654 19115.489713:          1 cycles:  %s [unknown] ([unknown])\n"
    text = head % b"ffffffff9b201293" + head % b"    7fa68b1f2d84"
    assert folded(text) == {"false;[unknown]": 2}
    text = b"a 1 5.0: 1 e: \n" + USER + b"b 2 6.0: 1 e: \n" + USER
    assert folded(text) == {"a;main": 1, "b;main": 1}


def test_samples_without_a_stack_are_their_task_s() -> None:
    head = b"demo 77 5.500000:  3 cycles: \n"
    assert folded(head) == {"demo": 3}
    assert folded(head + head) == {"demo": 6}
    assert folded(head + b"\n" + head + b"\n") == {"demo": 6}


def test_numbers_that_are_none() -> None:
    for period, count in ((b"", 1), (b"0 ", 1), (b"12 ", 12), (b"9" * 400 + b" ", 1)):
        head = b"demo 77 5.500000: " + period + b"cycles: "
        assert folded(sample(USER, head=head)) == {"demo;main": count}


def test_frames_without_a_file_wherever_they_stand() -> None:
    bare = b"\t          401000 main+0x4\n\tffffffff81000404 f\n"
    for text in (sample(bare), sample(bare).rstrip(b"\n"), sample(b"\n" + bare)):
        assert folded(text, kernel=True) == {"demo;f_[k];main": 3}


def test_source_lines() -> None:
    text = (
        b"a.out 35081 252436.005167:     667783 cycles:\n"
        b"\t          408ebb some_method+0x8b (/full/path/to/a.out)\n  uniform.h:300\n"
        b"\t    7f6d2148eb25 start_main+0xd5 (/lib64/libc-2.33.so)\n  libc-2.33.so[27b25]\n"
        b"\t    7ffc71ee9580 [unknown] ([unknown])\n\n"
    )
    assert folded(text, srcline=True) == {
        "a.out;[unknown];start_main:libc-2.33.so;some_method:uniform.h:300": 667783
    }
    assert folder_of(text).sums.unparsed == 0


@pytest.mark.parametrize("path", corpus())
def test_every_text_folds_the_same_however_it_comes(path: Path) -> None:
    text = path.read_bytes()
    whole = lines_of(text, kernel=True)
    assert lines_of(text, kernel=True, piece=37) == whole
    assert lines_of(text.replace(b"\n", b"\r\n"), kernel=True) == whole


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    b"\n",
                    b"demo 77 5.500000: 1 cycles: \n",
                    b"java 7/8 6.5: 2 cycles:\n",
                    b"x 1 6.5: 2 other: \n",
                    USER,
                    b"\tffffffffc0001004 [unknown] ([unknown])\n",
                    b"\t 1 a->b;c (/tmp/perf-1.map)\n",
                    b"#\n",
                    b"\t   \n",
                    b"\tffffffff81000404 without_a_file\n",
                    b"\tffffffff81000404 f ([kernel.kallsyms])\n",
                    b"  file.c:1\n",
                ]
            ),
            st.binary(max_size=12),
        ),
        max_size=40,
    ).map(b"".join),
    st.integers(1, 99),
)
@settings(deadline=None, suppress_health_check=SLOW_MACHINE, max_examples=200)
def test_any_bytes_are_folded_the_same_however_they_come(text: bytes, piece: int) -> None:
    whole = lines_of(text, kernel=True, by=renamer(one_place()))
    assert lines_of(text, kernel=True, by=renamer(one_place()), piece=piece) == whole
    # Repaired while folding, or before.
    assert lines_of(annotated(text, renamer(one_place())), kernel=True) == whole
    for line in whole.splitlines():
        assert re.fullmatch(rb".*[^ ]? \d+", line)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [b"          401000", b"                ", b"ffffffff81000404", b" 12 34"]
            ),
            st.sampled_from([b"f", b"[unknown]", b"a (b) c", b"", b"f+", b"f+0x1 g"]),
            st.sampled_from([b"", b"+0x1f", b"+0x2e", b"+0x", b"+0xg"]),
            st.sampled_from(
                [b" (/bin/x)", b" (/memfd:a (deleted))", b" ()", b"", b" (/a+0x2 (b))"]
            ),
        ),
        max_size=30,
    )
)
@settings(deadline=None)
def test_what_is_kept_of_a_function_is_true_of_all_its_frames(
    frames: list[tuple[bytes, bytes, bytes, bytes]],
) -> None:
    lines = [b"\t%s %s%s%s\n" % frame for frame in frames]
    text = sample(USER, *lines) + sample(USER, *lines[::-1])
    keeping, other = Folder(FoldOptions()), Folder(FoldOptions())
    other.by_function = False
    for folder in (keeping, other):
        folder.read(text)
        folder.end()
    assert list(keeping.sums.lines(b"cycles")) == list(other.sums.lines(b"cycles"))


def test_hostile_text_takes_linear_time() -> None:
    started = time.process_time()
    for name in (b"(" * 200_000, b"->" * 100_000, b"<(" * 100_000, b";" * 200_000, b"\0" * 200_000):
        text = sample(b"\t          401000 " + name + b" (/bin/x)\n")
        assert len(folded(text)) == 1
    text = b"".join(b"%d 1 5.0: 1 e: \n" % number for number in range(20_000))
    assert len(folded(text)) == 20_000
    assert time.process_time() - started < 10


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A text big enough to be folded in parts, every sample of it another."""
    head = b"demo %d 5.500000:  3 cycles: "
    path = tmp_path / "big.txt"
    with path.open("wb") as file:
        file.write(sample(USER, head=b"first 1 5.000000: 1 instructions: "))
        for number in range(120_000):
            frame = b"\t          40%04x f%d+0x4 (/bin/x)\n" % (number % 65536, number % 999)
            event = head if number % 3 else b"demo %d 5.500000:  3 instructions: "
            file.write(sample(frame, USER, head=event % (number % 7)))
    return path


def ksym(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ksym_plugin.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "KSYM_HISTORY": ""}
    return subprocess.run(command, capture_output=True, env=environment, cwd=REPO, check=True)


def test_few_of_many_short_stacks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repaint, "_MOST_BYTES", 1 << 12)
    samples = (sample(b"\t          401000 f (/x)\n  %d\n" % number) for number in range(100))
    folder = folder_of(b"".join(samples))
    assert sum(map(len, folder._stacks)) <= 16
    assert sum(folder.sums.folded(b"cycles").values()) == 300


def test_jobs_do_not_change_the_result(big: Path) -> None:
    ranges = fold.ranges_of(str(big), 2)
    assert len(ranges) == 2
    assert ranges[0][1] == ranges[1][0]
    one, two = ksym("fold", "--tid", str(big)), ksym("fold", "--tid", "--jobs", "2", str(big))
    assert one.stdout == two.stdout
    assert one.stderr == two.stderr
    assert b"only cycles (80,000 samples) is counted" in one.stderr
    assert one.stdout.count(b"\n") > 999
    assert fold.ranges_of(str(big), 1) == []


def in_parts(
    part: Callable[..., object], monkeypatch: pytest.MonkeyPatch, by: Renamer | None = None
) -> None:
    """Fold two parts, with another function for what a part's process does."""
    monkeypatch.setattr(fold, "_fold_part", part)
    how = FoldOptions()
    fold.fold(Folder(how), how, os.devnull, [(0, 1), (1, 2)], (None, None), by)


def test_a_part_that_is_killed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KsymError, match="was killed; take fewer --jobs"):
        in_parts(lambda *_: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("error", [HistoryError("no", "do"), FileNotFoundError(2, "gone", "x")])
def test_what_goes_wrong_in_a_part_is_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises((KsymError, FileNotFoundError)) as raised:
        in_parts(fail, monkeypatch)
    assert str(raised.value) == str(error)


def test_what_the_parts_report_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tally, by = Tally(), renamer()
    tally.confirmed = 3
    in_parts(lambda *given: given[-1].send((Sums(), tally, "not asked")), monkeypatch, by)
    assert by.tally.confirmed == 6
    assert by.report()[-1] == "not asked"


def test_a_part_that_finds_no_history_any_more_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KsymError, match="the history went away"):
        in_parts(lambda *given: given[-1].send((Sums(), None, "")), monkeypatch, renamer())


def test_what_has_no_name_is_no_bpf() -> None:
    sample = b"a 1 1.000000: 1 e: \n\tffffffffc0000404 %s\n\n"
    assert folded(sample % b"[unknown] ([unknown])", bpf=True) == {"a;[unknown]": 1}
    assert folded(sample % b"hook_demo (hook_demo)", bpf=True) == {"a;hook_demo_[b]": 1}


def test_an_interrupt_ends_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # There are children, and all run.
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        in_parts(lambda *_: signal.pause(), monkeypatch)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def reference(*folder: str) -> list:
    """Inputs, the options of their published results, and those."""
    flames, inferno = Path(REFERENCE, "FlameGraph"), Path(REFERENCE, "inferno")
    results = (
        flames / "test/results"
        if folder[0] == "FlameGraph"
        else inferno / "tests/data/collapse-perf/results"
    )
    found = []
    for path in sorted(results.glob("*-collapsed*.txt")) if REFERENCE else ():
        name, _, option = path.stem.partition("-collapsed")
        inputs = (
            flames / f"test/{name}.txt",
            inferno / f"tests/data/collapse-perf/{name}.txt",
            flames / f"{name}.txt.gz",
        )
        source = next(source for source in inputs if source.exists())
        found.append(pytest.param(source, option.strip("-"), path, id=path.stem))
    absent = pytest.mark.skip(reason=f"no checkout of {folder[0]} is in $KSYM_REFERENCE")
    return found or [pytest.param(None, "", None, marks=absent, id="absent")]


OPTIONS = {
    "": {},
    "pid": {"pid": True},
    "tid": {"tid": True},
    "kernel": {"kernel": True},
    "jit": {"jit": True},
    "all": {"kernel": True, "jit": True},
    "addrs": {"addrs": True},
}


@pytest.mark.reference
@pytest.mark.parametrize("source, option, expected", reference("FlameGraph"))
def test_as_stackcollapse_perf_published_it(source: Path, option: str, expected: Path) -> None:
    text = source.read_bytes()
    # The last sample, if no blank line follows, is counted here and not there.
    text = text[: text.rindex(b"\n\n") + 2]
    wanted = expected.read_bytes()
    if option in ("pid", "tid"):
        # These results are older than the program they are published with: with these options
        # too it takes the L off Java's classes now.
        lines = [
            re.sub(rb";L(?=[^;]*/)", b";", line) if line.startswith(b"java") else line
            for line in wanted.splitlines(True)
        ]
        wanted = b"".join(sorted(lines))
    assert lines_of(text, **OPTIONS[option]) == wanted


@pytest.mark.reference
@pytest.mark.parametrize("source, option, expected", reference("inferno"))
def test_as_inferno_published_it(source: Path, option: str, expected: Path) -> None:
    text = source.read_bytes()
    text = gzip.decompress(text) if source.suffix == ".gz" else text
    # Quotes go here, as in stackcollapse-perf.pl; so inferno's own tests have it.
    wanted = re.sub(rb"[\"']", b"", expected.read_bytes())
    if "rust" in source.name or source.name == "single-event.txt":
        pytest.skip("inferno demangles what perf left of Rust's names; this does not")
    if source.name == "single-line-stacks.txt":
        # cycles:u and cycles are two events here, as they are in stackcollapse-perf.pl.
        wanted = wanted.replace(b"false;_dl_start 1\n", b"")
    if source.name == "versioned-vmlinux.txt":
        wanted = re.sub(rb"(;bpf_prog_\w+)(?= )", rb"\1_[k]", wanted)  # BPF is kernel code.
    assert sorted(lines_of(text, **OPTIONS[option]).splitlines()) == sorted(wanted.splitlines())


#: Texts that hold what docs/stacks.md says is read otherwise: headers without a task, tasks with
#: numbers or a "#" in their names, a BOM, events beside each other, BPF and .ko as the kernel's.
READ_OTHERWISE = ("branches", "jit", "lines", "odd", "pids", "stacks")


@pytest.mark.reference
@pytest.mark.parametrize("path", [one for one in corpus() if one.id not in READ_OTHERWISE])
def test_as_stackcollapse_perf_does_it_here(path: Path) -> None:
    program = os.path.join(REFERENCE, "FlameGraph", "stackcollapse-perf.pl")
    text = path.read_bytes().rstrip(b"\n") + b"\n\n"
    for option in ("--all", "--addrs", "--tid"):
        done = subprocess.run(
            ["perl", program, option], input=text, capture_output=True, check=True
        )
        assert lines_of(text, **OPTIONS[option.strip("-")]) == done.stdout


def test_headers_without_time_and_event_begin_samples_too() -> None:
    """``perf script -F comm,pid,tid,ip,sym,dso``; stackcollapse-perf.pl gives the same."""
    frames = (
        b"\tffffffff813a4413 schedule ([kernel.kallsyms])\n\t          401000 main (/bin/app)\n\n"
    )
    text = b"my app     7/8     \n" + frames + b"swapper     0/0 [001] \n" + frames
    assert lines_of(text) == b"my_app;main;schedule 1\nswapper;main;schedule 1\n"
    assert lines_of(b"my app 8\n" + frames) == b""  # Any text can end in a number.
