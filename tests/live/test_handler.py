"""The handler inside the perf that is here, on what that perf recorded on the spot."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ksym_plugin.kernel import identity
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf import data
from tests.oracle import procs

HANDLER = f"{procs.REPO}/contrib/perf-script/ksym_handler.py"
#: Something that is in the kernel and in user space, in two processes.
OWN_COMMS = ("sh ", "find ", "perf ")
WORK = ["sh", "-c", "find /usr/lib -name none; find /usr/share -maxdepth 3 -name none"]
ODD_COMM = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"a b [1]: 2.5:", 0, 0, 0)
while time.process_time() < 0.2: pass
"""
#: Of several files (--threads) maps are not read: where a user frame without a name lies in its
#: file is lost.
_NAMELESS = re.compile(r"^\t +[0-9a-f]+ (\[unknown\] \((?:/|\[vdso|//anon).*)$")
TALLY = re.compile(r"^ksym: ([\d,]+) kernel frames: ", re.MULTILINE)

pytestmark = pytest.mark.usefixtures("perf", "perf_python")


@pytest.fixture(scope="module", autouse=True)
def no_history(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The live system serves; a history that lies around does not."""
    os.environ.pop("KSYM_HISTORY", None)


def record(path: Path, *options: str) -> str:
    words = ["-q", "-e", "cpu-clock", *options, "-o", str(path), "--", *WORK]
    procs.run(["perf", "record", *words], 60)
    return str(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("handler") / "perf.data", "-g")


def handle(
    recorded: str, *words: str, script: str = HANDLER, status: int | None = 0, **variables: str
) -> procs.Done:
    line = ["perf", "script", "-i", recorded, "-s", script, "--", *words]
    return procs.run(line, 60, status=status, env={"PYTHONPATH": "", **variables})


def comparable(text: str, options: list[str]) -> list[str]:
    """Lines without what cannot be the same."""
    is_in_parts = "--threads" in options
    return [_NAMELESS.sub(r"\1", line) if is_in_parts else line for line in text.splitlines()]


def without_others_user_frames(text: str) -> str:
    """perf looks them up anew each time, in files and maps that may be gone or have changed."""
    kept, is_ours = [], True
    for line in text.splitlines():
        if not line.startswith("\t"):
            is_ours = line.lstrip().startswith(OWN_COMMS)
        elif not is_ours and not line.lstrip().startswith("ffff"):
            continue
        kept.append(line)
    return "\n".join(kept)


@pytest.mark.parametrize(
    "options",
    [
        ["-g"],
        ["-g", "-a"],
        [],
        ["-a"],
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                ["--no-timestamp"],
                ["-c", "300000"],
                ["-g", "-d"],
                ["-g", "-e", "task-clock,page-faults,context-switches"],
                ["-e", "task-clock/call-graph=fp/"],
                ["-g", "--buildid-mmap"],
                ["-g", "--threads"],
            )
        ),
    ],
    ids=" ".join,
)
def test_the_text_is_perf_s_own(tmp_path: Path, options: list[str]) -> None:
    path = record(tmp_path / "perf.data", *options)
    plain = procs.run(["perf", "script", "-i", path], 60)
    handled = handle(path)
    lines = comparable(without_others_user_frames(handled.out), options)
    assert len(lines) > 100
    # Unless a program is loaded that perf does not know, nothing is renamed here.
    assert "0 renamed" in handled.err
    expected = comparable(without_others_user_frames(plain.out), options)
    wrong = [
        pair
        for pair in itertools.zip_longest(expected, lines)
        if pair[0] != pair[1] and "([bpf])" not in str(pair[1])
    ]
    assert wrong == []


def test_a_comm_that_looks_like_a_header(tmp_path: Path) -> None:
    path = str(tmp_path / "perf.data")
    words = ["perf", "record", "-q", "-e", "cpu-clock", "-g", "-o", path, "--"]
    procs.run([*words, shutil.which("python3") or "python3", "-c", ODD_COMM], 60)
    plain = procs.run(["perf", "script", "-i", path], 60).out.splitlines()
    assert handle(path).out.splitlines() == plain
    assert any(line.startswith("a b [1]: 2.5: ") for line in plain)


def test_folded_stacks_hold_every_sample(recorded: str) -> None:
    samples = procs.run(["perf", "script", "-i", recorded, "-F", "time"], 60).out.split()
    lines = handle(recorded, "--format", "folded").out.splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == len(samples)
    assert any(line.rpartition(" ")[0].endswith("_[k]") for line in lines)


# The header of perf.data


@pytest.mark.parametrize("options", [["-g"], ["--buildid-mmap"], ["--threads"]], ids=" ".join)
def test_the_header_says_what_perf_reads_in_it(tmp_path: Path, options: list[str]) -> None:
    path = record(tmp_path / "perf.data", *options)
    found = data.read(path)
    header = procs.run(["perf", "script", "-i", path, "--header-only"], 60).out
    told = dict(re.findall(r"^# (hostname|os release) : (.*)$", header, re.MULTILINE))
    assert (found.host, found.release) == (told["hostname"], told["os release"])
    ids = procs.run(["perf", "buildid-list", "-i", path], 60).out
    kernel = re.search(r"^([0-9a-f]+) \[kernel\.kallsyms\]$", ids, re.MULTILINE)
    assert kernel is not None
    assert found.build_id == kernel[1] == identity.build_id()
    assert found.text_start == Kallsyms.load().text_start
    assert found.width == len("cpu-clock")


# Where the script and its package are


def assert_ran(done: procs.Done) -> None:
    assert done.out.count("cpu-clock") > 20
    assert TALLY.search(done.err), done.err


def test_through_a_link_elsewhere(recorded: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").symlink_to(HANDLER)
    assert_ran(handle(recorded, script=str(tmp_path / "other.py")))


def test_a_copy_finds_the_package_by_name(recorded: str, tmp_path: Path) -> None:
    copy = shutil.copy(HANDLER, tmp_path)
    assert_ran(handle(recorded, script=copy, KSYM_PACKAGE=procs.REPO))
    assert_ran(handle(recorded, script=copy, PYTHONPATH=procs.REPO))


def test_a_copy_without_the_package_says_so(recorded: str, tmp_path: Path) -> None:
    done = handle(recorded, script=shutil.copy(HANDLER, tmp_path), status=1)
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert done.err.startswith("ksym: No module named")
    assert "PYTHONPATH" in done.err


@pytest.mark.parametrize("words", [["-H", "/nonexistent.db"], ["-H", "/etc/passwd"]])
def test_a_history_that_cannot_be_used(recorded: str, words: list[str]) -> None:
    done = handle(recorded, *words, status=1)
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert words[1] in done.err


def test_usage_errors(recorded: str) -> None:
    done = handle(recorded, "--format", "png", status=2)
    assert done.out == ""
    assert "invalid choice" in done.err


def test_by_hand_it_says_what_runs_it() -> None:
    done = procs.run(["/usr/bin/python3", HANDLER], 30, status=1)
    assert done.out == ""
    assert "perf script -s" in done.err


# What must not abort perf


def injected(tmp_path: Path, body: str) -> str:
    """The handler, and after it a body that gets at its names."""
    script = tmp_path / "injected.py"
    text = Path(HANDLER).read_text(encoding="utf-8")
    script.write_text(f"{text}\n{body}\n", encoding="utf-8")
    return str(script)


def test_an_exception_in_a_sample_does_not_abort_perf(recorded: str, tmp_path: Path) -> None:
    body = """
at = 0
def raising(event, _inner=_handler._pieces):
    global at
    at += 1
    if at % 2:
        raise RuntimeError("injected")
    return _inner(event)
_handler._pieces = raising
"""
    script = injected(tmp_path, body)
    done = handle(recorded, script=script, KSYM_PACKAGE=procs.REPO)
    assert_ran(done)
    assert re.search(r"samples passed on as perf had them: RuntimeError: injected", done.err)
    plain = procs.run(["perf", "script", "-i", recorded], 60).out
    assert done.out.splitlines() == plain.splitlines()


def test_an_exception_in_the_output_does_not_abort_perf(recorded: str, tmp_path: Path) -> None:
    body = "def raising(*_): raise KeyError('injected')\n_handler._output.sample = raising"
    done = handle(recorded, script=injected(tmp_path, body), KSYM_PACKAGE=procs.REPO)
    assert done.out == ""
    assert "samples left out: KeyError: 'injected'" in done.err
    assert TALLY.search(done.err)


def test_tracepoints_are_taken_as_perf_hands_them_over(recorded: str, tmp_path: Path) -> None:
    """There may be no tracefs here: other samples are handed over in their way."""
    body = """
# perf counts the arguments of a function and leaves out the last one if there are not four.
assert trace_unhandled.__code__.co_argcount == 4
def process_event(event):
    trace_unhandled("sched__sched_switch", None, {"common_pid": 1}, event)
"""
    done = handle(recorded, script=injected(tmp_path, body), KSYM_PACKAGE=procs.REPO)
    assert_ran(done)
    plain = procs.run(["perf", "script", "-i", recorded], 60).out
    assert done.out.splitlines() == plain.splitlines()


def shell(line: str, recorded: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "bash", recorded, HANDLER],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60 * procs.PATIENCE,
        check=False,
        text=True,
    )


RUN = 'perf script -i "$1" -s "$2"'


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    path = record(tmp_path / "perf.data", "-g", "-F", "20000")
    done = shell(f"{RUN} | head -1", path)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert done.returncode in (0, 141)


@pytest.mark.parametrize("form", ["text", "folded", "svg", "speedscope", "report"])
def test_a_full_disk_is_said(recorded: str, form: str) -> None:
    done = shell(f"{RUN} -- --format {form} >/dev/full", recorded)
    assert done.returncode == 1
    assert done.stderr.count("the output cannot be written (No space left on device)") == 1
    assert TALLY.search(done.stderr)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">/dev/null 2>&-"])
def test_closed_streams(recorded: str, closed: str) -> None:
    done = shell(f"{RUN} {closed}", recorded)
    assert done.returncode == int(closed == ">&-")
    assert "Traceback" not in done.stderr


def test_from_a_pipe(recorded: str) -> None:
    work = " ".join(f"'{word}'" for word in WORK)
    done = shell(f'perf record -q -e cpu-clock -g -o - -- {work} | perf script -s "$2"', recorded)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cpu-clock") > 20
    assert TALLY.search(done.stderr)
