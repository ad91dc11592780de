"""``ksym record`` around commands and signals, and every command without privileges."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pytest

from tests.oracle import procs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SECONDS = 120
SECOND = 1_000_000_000
NOBODY = 65534
KSYM = [sys.executable, "-m", "ksym_plugin.cli"]

#: Loads one program, says what the kernel calls it and when it was there, and ends.
ONE_PROGRAM = """
import json, time
from tests.oracle import programs, rawbpf
fd = programs.plain("one", 5)
loaded = time.monotonic_ns()
info = rawbpf.info(fd)
name = rawbpf.kallsyms_bpf()[info.starts[0]]
print(json.dumps([name, info.id, info.starts[0], info.lens[0], loaded, time.monotonic_ns()]))
"""
#: Ends with the number of SIGINTs it got within a second of the first.
COUNT_INTERRUPTS = """
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
print("ready", flush=True)
while not got:
    time.sleep(10)
end = time.monotonic() + 1
while time.monotonic() < end:
    time.sleep(0.1)
sys.exit(40 + len(got))
"""


def record(*words: str, status: int | None = 0) -> procs.Done:
    return procs.run([*KSYM, "record", *words], SECONDS, status=status)


def shown(history: str) -> dict[str, Any]:
    words = ["show", "--all", "--json", "--clock", "monotonic", "-H", history]
    found: dict[str, Any] = json.loads(procs.run([*KSYM, *words], SECONDS).out)
    return found


def assert_closed(history: str, sessions: int = 1) -> None:
    """Every session ended in order, and the file is a single private one again."""
    assert [session["closed"] for session in shown(history)["sessions"]] == [True] * sessions
    assert os.stat(history).st_mode & 0o777 == 0o600
    names = os.listdir(os.path.dirname(history))
    assert [name for name in names if name.startswith("x.db")] == ["x.db"]


@pytest.fixture
def history(tmp_path: Path) -> str:
    return str(tmp_path / "x.db")


@contextlib.contextmanager
def recording(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A recorder at work: it has said so, and a command of its own says ``ready``."""
    child = procs.start([*KSYM, "record", *words], out=subprocess.PIPE, err=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stderr is not None
        assert b"recording with" in procs.read_line(child.stderr.fileno(), SECONDS)
        if "--" in words:
            assert procs.read_line(child.stdout.fileno(), SECONDS) == b"ready\n"
        yield child
    finally:
        procs.end_group(child)


@pytest.mark.parametrize(
    "command, status",
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-command"], 127),
        (["/"], 126),
    ],
)
def test_the_status_is_the_commands(history: str, command: list[str], status: int) -> None:
    done = record("-o", history, "--", *command, status=status)
    assert done.out == ""
    assert ("cannot be run" in done.err) == (status in (126, 127))
    assert_closed(history)


def test_the_command_runs_within_what_is_covered(history: str) -> None:
    clock = [sys.executable, "-c", "import time; print(time.monotonic_ns())"]
    now = int(record("-o", history, "--", *clock).out)
    (session,) = shown(history)["sessions"]
    assert session["started"] < now < session["covered"]


def test_the_command_inherits_nothing(history: str) -> None:
    listing = "import os; print(sorted(os.listdir('/proc/self/fd'), key=int))"
    around = [sys.executable, "-c", listing]
    assert record("-o", history, "--", *around).out == procs.run(around, SECONDS).out
    state = ["grep", "-E", "^Sig(Blk|Ign):", "/proc/self/status"]
    assert record("-o", history, "--", *state).out == procs.run(state, SECONDS).out
    assert_closed(history, sessions=2)


@pytest.mark.parametrize("source", ["perf_event", "polling"])
def test_a_program_is_in_the_history(history: str, source: str) -> None:
    # Polling sees what lasts from one poll to the next.
    wait = "import time; time.sleep(0.5)\n"
    code = ONE_PROGRAM + (wait if source == "polling" else "")
    done = record("--source", source, "-o", history, "--", sys.executable, "-c", code)
    name, number, start, size, loaded, seen = json.loads(done.out)
    assert f"recording with {source} into {history}" in done.err
    (found,) = [one for one in shown(history)["symbols"] if one["program"] == number]
    assert (found["name"], int(found["start"], 16), int(found["end"], 16)) == (
        name,
        start,
        start + size,
    )
    assert found["loaded"][0] <= loaded
    assert found["unloaded"] is not None and found["unloaded"][1] >= seen
    if source == "perf_event":
        at = f"{seen // SECOND}.{seen % SECOND:09}"
        words = ["--clock", "monotonic", "--at", at, f"{start + 4:#x}"]
        answer = procs.run([*KSYM, "resolve", "-H", history, *words], SECONDS).out
        assert answer.split()[1] == f"{name}+0x4"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_recording_in_order(history: str, number: signal.Signals) -> None:
    with recording("-o", history, "--stats") as child:
        child.send_signal(number)
        _, err = child.communicate(timeout=SECONDS)
        assert child.returncode == 0
    assert b"live at the end; kept in" in err and b"s of CPU" in err
    assert_closed(history)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_to_the_command(history: str, number: signal.Signals) -> None:
    # No terminal here: what reaches the recorder alone must reach the command through it.
    script = 'trap "exit 9" INT TERM; echo ready; while :; do sleep 0.05; done'
    with recording("-o", history, "--", "sh", "-c", script) as child:
        child.send_signal(number)
        child.communicate(timeout=SECONDS)
        assert child.returncode == 9
    assert_closed(history)


def test_ctrl_c_on_a_terminal_reaches_the_command_once(history: str) -> None:
    command = [*KSYM, "record", "-o", history, "--", sys.executable, "-c", COUNT_INTERRUPTS]
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, command, procs.environment())
    try:
        _read_until(terminal, b"ready")
        os.write(terminal, b"\x03")
        _read_until(terminal, b"kept in")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 41
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
    assert_closed(history)


def _read_until(terminal: int, what: bytes) -> None:
    deadline = time.monotonic() + SECONDS
    seen = b""
    while what not in seen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], seen
        try:
            seen += os.read(terminal, 4096)
        except OSError:
            raise AssertionError(seen) from None


def test_for_ends_the_recording_and_the_command(history: str) -> None:
    began = time.monotonic()
    record("-o", history, "--for", "0.2")
    record("-o", history, "--for", "0.2", "--", "sleep", "60", status=143)
    assert time.monotonic() - began < 55
    assert_closed(history, sessions=2)
    for session in shown(history)["sessions"]:
        assert session["covered"] - session["started"] >= 0.2 * SECOND


def test_a_second_recorder_is_refused_and_the_first_goes_on(history: str) -> None:
    with recording("-o", history) as child:
        done = record("-o", history, "--", "echo", "started", status=1)
        assert done.out == "" and done.err.count("\n") == 1
        assert f"written by another recorder (process {child.pid})" in done.err
        (session,) = shown(history)["sessions"]
        assert session["writing"] and not session["closed"]
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=SECONDS)
        assert child.returncode == 0
    assert_closed(history)


def test_what_cannot_be_written_is_one_sentence_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"somebody's work")
    for path, said in (
        (tmp_path / "missing" / "x.db", "cannot be made"),
        (tmp_path / "foreign", "is not a ksym history"),
        (tmp_path, "cannot be read"),
    ):
        done = record("-o", str(path), "--", "echo", "started", status=1)
        assert done.out == "" and done.err.startswith("ksym: ") and done.err.count("\n") == 1
        assert said in done.err
    assert (tmp_path / "foreign").read_bytes() == b"somebody's work"


def test_a_full_disk_ends_the_recording_and_not_the_command(history: str) -> None:
    script = "echo ready; read -r line <&3; echo done; exit 5"
    read, write = os.pipe()
    around = ["sh", "-c", f'exec "$@" 3</proc/{os.getpid()}/fd/{read}', "sh"]
    command = [*KSYM, "record", "-o", history, "--", *around, "sh", "-c", script]
    child = procs.start(command, out=subprocess.PIPE, err=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stderr is not None
        assert b"recording with" in procs.read_line(child.stderr.fileno(), SECONDS)
        assert procs.read_line(child.stdout.fileno(), SECONDS) == b"ready\n"
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (4096, 4096))
        said = procs.read_line(child.stderr.fileno(), SECONDS)
        assert b"cannot be written" in said and b"sh goes on" in said
        os.write(write, b"\n")
        assert child.communicate(timeout=SECONDS) == (b"done\n", b"")
        assert child.returncode == 1
    finally:
        procs.end_group(child)
        os.close(read)
        os.close(write)


def test_retention_keeps_the_size(history: str) -> None:
    record("-o", history, "--max-age", "1d", "--max-size", "1M", "--for", "0.2")
    assert os.path.getsize(history) < 1 << 20
    assert_closed(history)


@pytest.mark.usefixtures("perf", "perf_python")
def test_script_prints_what_perf_recorded(tmp_path: Path) -> None:
    data = str(tmp_path / "perf.data")
    busy = "import time\nwhile time.process_time() < 0.5: open('/dev/null')"
    profile = ["perf", "record", "-q", "-g", "-e", "cpu-clock", "-o", data]
    inner = [*profile, "--", sys.executable, "-c", busy]
    record("-o", str(tmp_path / "ksym.db"), "--", *inner)
    script = [*KSYM, "script", "-i", data]
    done = procs.run(script, SECONDS)
    times = procs.run(["perf", "script", "-i", data, "-F", "time"], SECONDS).out.split()
    assert [line.split()[2] for line in done.out.splitlines() if "cpu-clock" in line] == times
    assert "kernel frames" in done.err and "outside" not in done.err
    folded = procs.run([*script, "--format", "folded"], SECONDS).out
    assert sum(int(line.rpartition(" ")[2]) for line in folded.splitlines()) == len(times)
    assert procs.run([*script, "--time", "0,1"], SECONDS, status=None).out == ""


@pytest.mark.usefixtures("perf", "perf_python")
def test_script_passes_perfs_status(tmp_path: Path) -> None:
    done = procs.run([*KSYM, "script", "-i", str(tmp_path / "none")], SECONDS, status=None)
    assert done.status not in (0, 1) and "No such file" in done.err


def test_doctor_finds_recording_possible() -> None:
    told = json.loads(procs.run([*KSYM, "doctor", "--json"], 60).out)
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert told["recording"] is True
    assert states["source perf_event"] == states["bpf(2)"] == states["kallsyms"] == "ok"


# An ordinary user


@pytest.fixture(scope="module")
def everyone() -> Iterator[Path]:
    """The package and click where everyone may read them, for the system's Python."""
    folder = Path(tempfile.mkdtemp(prefix="ksym-"))
    try:
        folder.chmod(0o755)
        for package in (Path(procs.REPO) / "ksym_plugin", Path(click.__file__).parent):
            shutil.copytree(package, folder / package.name)
        yield folder
    finally:
        shutil.rmtree(folder)


def as_nobody(everyone: Path, *words: str) -> procs.Done:
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    program = f"import os, sys; sys.path.insert(0, {str(everyone)!r}); os.chdir({str(everyone)!r})"
    program += "; from ksym_plugin.cli import main; main()"
    env = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return procs.run([*user, "/usr/bin/python3", "-c", program, *words], SECONDS, env=env, status=1)


def test_an_ordinary_user_is_told_what_is_missing(everyone: Path) -> None:
    foreign = everyone / "roots.db"
    record("-o", str(foreign), "--", "true")
    for words, missing in (
        (("record", "-o", "/dev/null/x.db", "--", "echo", "started"), "CAP_"),
        (("show",), "CAP_"),
        (("resolve", "ffffffff81000000"), "CAP_SYSLOG"),
        (("show", "-H", str(foreign)), "Permission denied"),
        (("resolve", "-H", str(foreign), "ffffffff81000000"), "Permission denied"),
    ):
        done = as_nobody(everyone, *words)
        assert done.out == "", words
        assert done.err.startswith("ksym: ") and done.err.count("\n") == 1, done.err
        assert missing in done.err and "; " in done.err


def test_doctor_tells_an_ordinary_user_what_to_get(everyone: Path) -> None:
    done = as_nobody(everyone, "doctor")
    assert done.err == ""
    lines = {line.split(":")[0]: line for line in done.out.splitlines()}
    for name in ("source perf_event", "source polling", "bpf(2)", "kallsyms"):
        assert "CAP_" in lines[f"missing  {name}"]
