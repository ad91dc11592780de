"""The command line over histories of a made-up boot, on any machine.

Program 7 sits at BASE from 110 s to 150 s, program 8 there from 160 s on. Changes were
lost from 170 s to 171 s. perf's clock is one second behind CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ksym_plugin.cli import cli, script
from ksym_plugin.history import locate
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity, snapshot
from ksym_plugin.kernel.clocks import Instant
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.kernel.worker import ask
from ksym_plugin.timeline.symbols import BPF_PROG, NOT_LOADED, Load, Loss, Symbol, Unload
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.perf_files import RELEASE, PerfFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from click.testing import Result

REPO = Path(__file__).parents[3]
SECOND = 1_000_000_000
BASE = 0xFFFF_FFFF_C010_0000
OLD = "bpf_prog_0000000000000007_old"
NEW = "bpf_prog_0000000000000008_new"
EVIL = "bpf_prog_0000000000000009_\x1b[2J\nevil\u202e"
KALLSYMS = b"ffffffff81000000 T _text\nffffffff81000040 T schedule\nffffffff81000080 T _etext\n"
THIS_BOOT = "11111111-2222-3333-4444-555555555555"


def ksym(
    *words: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None
) -> Result:
    """A command in this process, with its stdout and stderr apart."""
    try:
        runner = CliRunner(mix_stderr=False)  # click before 8.2
    except TypeError:
        runner = CliRunner()
    result = runner.invoke(cli, words, input=stdin, env=env, prog_name="ksym")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(result: Result, *parts: str) -> None:
    """One plain sentence on stderr and nothing else."""
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("ksym: ") and result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


class Machine:
    """What the command line finds where it runs, in place of this machine's kernel."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.delenv("KSYM_HISTORY", raising=False)
        monkeypatch.setattr(locate, "SYSTEM", str(folder / "system.db"))
        self.boot(THIS_BOOT)
        self.kallsyms(KALLSYMS)

    def boot(self, boot_id: str) -> None:
        self._monkeypatch.setattr(identity, "boot_id", lambda: boot_id)

    def kallsyms(self, table: bytes) -> None:
        self._monkeypatch.setattr(Kallsyms, "load", lambda: Kallsyms.parse(table))

    def loaded(self, *loads: Load) -> None:
        self._monkeypatch.setattr(snapshot, "take", lambda: snapshot.Snapshot(list(loads), ""))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A working directory of its own on a machine whose boot and symbols are made up."""
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def place(machine: Machine, tmp_path: Path) -> Path:
    return tmp_path


def write(path: str, *, name: str = NEW, close: bool = True, whole: bool = False) -> str:
    writer = HistoryWriter(path, "made up", 100 * SECOND, None)
    timeline = Timeline()
    changes = (
        Load(symbol(OLD), 110 * SECOND - 5_000_000, 110 * SECOND, 7),
        Unload(BASE, 150 * SECOND, 150 * SECOND, OLD, 7),
        Load(symbol(name), 160 * SECOND, 160 * SECOND, 8, pid=42, comm="loader"),
    )
    for change in changes:
        lifetime = timeline.apply(change)
        assert lifetime is not None
        writer.note(lifetime)
    if not whole:
        writer.lost(Loss(170 * SECOND, 171 * SECOND, "ring full", 3))
    for at in (100, 200):
        time_ns = at * SECOND
        writer.tick(Instant(time_ns, time_ns + 5, 10**18 + time_ns, time_ns - SECOND))
    if close:
        writer.close(200 * SECOND)
    else:
        writer.commit(200 * SECOND)
        writer._database.close()
    return path


def symbol(name: str) -> Symbol:
    return Symbol(BASE, BASE + 0x40, name, BPF_PROG, "[bpf]")


# resolve


@pytest.mark.parametrize(
    "at, answer",
    [
        ("111", f"{OLD}+0x12 ([bpf])"),
        ("151", f"{OLD}+0x12 ([bpf])  grace"),
        ("165", f"{NEW}+0x12 ([bpf])"),
        ("170.5", f"{NEW}+0x12 ([bpf])  gap"),
        ("105", f"[unknown]  {NOT_LOADED.text}"),
        ("50", "[unknown]  the history does not cover that time"),
    ],
)
def test_resolve_answers_as_of_the_time(at: str, answer: str) -> None:
    write("ksym.db")
    result = ksym("resolve", "--clock", "monotonic", "--at", at, f"{BASE + 0x12:x}")
    assert result.stdout == f"{BASE + 0x12:#x}  {answer}\n"
    assert result.exit_code == 0
    assert "changes were lost" in result.stderr


def test_resolve_reads_times_on_every_clock() -> None:
    write("ksym.db")
    # The same instant, 149 s of CLOCK_MONOTONIC, when the old program was there.
    for words in (
        ("--at", "148.000000"),
        ("--at", "148.0", "--clock", "perf"),
        ("--at", "149.000000005", "--clock", "boottime"),
        ("--at", "1000000149", "--clock", "realtime"),
    ):
        assert OLD in ksym("resolve", *words, hex(BASE)).stdout


def test_resolve_takes_addresses_from_stdin_and_keeps_their_order() -> None:
    write("ksym.db")
    result = ksym(
        "resolve", "--json", "0xffffffff81000044", "-", "FFFFFFFF81000041", stdin=f"10 {BASE:x}\n"
    )
    assert json.loads(result.stdout) == [
        {
            "address": "0xffffffff81000044",
            "name": "schedule",
            "offset": 4,
            "module": None,
            "kind": "kernel",
            "certainty": "exact",
        },
        {"address": "0x0000000000000010", "name": None, "reason": "a user address"},
        {
            "address": hex(BASE),
            "name": NEW,
            "offset": 0,
            "module": "[bpf]",
            "kind": "bpf_prog",
            "certainty": "exact",
        },
        {
            "address": "0xffffffff81000041",
            "name": "schedule",
            "offset": 1,
            "module": None,
            "kind": "kernel",
            "certainty": "exact",
        },
    ]
    assert "as of 199.000000 on the perf clock" in result.stderr


@pytest.mark.parametrize("word", ["zz", "0x", "", "-5", "1_0", "0x11111111111111111", "0x0x1"])
def test_resolve_refuses_what_is_no_address(word: str) -> None:
    write("ksym.db", whole=True)
    refused(ksym("resolve", "--at", "150", "--", word), "is no address")


def test_static_names_are_of_one_boot_only(machine: Machine) -> None:
    machine.boot("another boot")
    write("ksym.db")
    machine.boot(THIS_BOOT)
    result = ksym("resolve", "--at", "164", "ffffffff81000044", hex(BASE))
    assert "schedule" not in result.stdout and NEW in result.stdout
    assert "only BPF symbols have names here" in result.stderr


def test_hidden_addresses_leave_the_names_of_the_history(machine: Machine) -> None:
    machine.kallsyms(b"0000000000000000 T _text\n")
    write("ksym.db")
    result = ksym("resolve", "--at", "164", hex(BASE))
    assert NEW in result.stdout and "CAP_SYSLOG" in result.stderr
    os.unlink("ksym.db")
    refused(ksym("resolve", hex(BASE)), "hidden", "CAP_SYSLOG", "kptr_restrict")


def test_without_a_history_the_past_of_bpf_is_not_guessed(machine: Machine) -> None:
    table = KALLSYMS + b"%x t bpf_prog_1111111111111111_now\t[bpf]\n" % BASE
    machine.kallsyms(table)
    result = ksym("resolve", "--at", "5", hex(BASE), "ffffffff81000044")
    assert "bpf_prog" not in result.stdout and "schedule+0x4" in result.stdout


# show


def test_show_lists_what_is_live_at_a_time() -> None:
    write("ksym.db")
    shown = ksym("show", "--at", "120").stdout
    assert OLD in shown and NEW not in shown
    assert "109.000000 (-5 ms)" in shown and "149.000000" in shown
    now = ksym("show").stdout
    assert NEW in now and OLD not in now
    assert "gap 169.000000 to 170.000000  ring full, 3 lost" in now
    assert "99.000000 to 199.000000  made up, closed" in now
    assert "not covered" not in now and "which is not covered" in ksym("show", "--at", "300").stdout


def test_show_all_and_patterns() -> None:
    write("ksym.db")
    for words, names in (
        ((), [OLD, NEW]),
        (("_old",), [OLD]),
        (("bpf_prog_*_new",), [NEW]),
        (("bpf_prog_*_ne",), []),
        (("*[78]_new",), [NEW]),
        (("bpf?prog*",), [OLD, NEW]),
        (("BPF_PROG",), []),
    ):
        found = json.loads(ksym("show", "--all", "--json", *words).stdout)["symbols"]
        assert [entry["name"] for entry in found] == names, words


def test_show_json_has_all_there_is() -> None:
    write("ksym.db")
    shown = json.loads(ksym("show", "--json", "--clock", "monotonic").stdout)
    assert shown["symbols"] == [
        {
            "start": hex(BASE),
            "end": hex(BASE + 0x40),
            "end_is_bound": False,
            "name": NEW,
            "kind": "bpf_prog",
            "module": "[bpf]",
            "program": 8,
            "pid": 42,
            "comm": "loader",
            "loaded": [160 * SECOND, 160 * SECOND],
            "unloaded": None,
        }
    ]
    assert shown["gaps"] == [
        {"since": 170 * SECOND, "until": 171 * SECOND, "cause": "ring full", "count": 3}
    ]
    assert (shown["clock"], shown["at"], shown["covered"]) == ("monotonic", 200 * SECOND, True)
    assert [session["closed"] for session in shown["sessions"]] == [True]


def test_a_killed_recorder_is_shown(machine: Machine) -> None:
    machine.boot("another boot")
    write("ksym.db", close=False)
    machine.boot(THIS_BOOT)
    result = ksym("show")
    assert "99.000000 to 199.000000  made up, recorder killed" in result.stdout
    assert "killed" in result.stderr
    assert "killed" in ksym("resolve", "--at", "120", hex(BASE)).stderr
    shown = json.loads(ksym("show", "--json").stdout)
    assert [session["killed"] for session in shown["sessions"]] == [True]


def test_names_cannot_command_the_terminal() -> None:
    write("ksym.db", name=EVIL)
    for words in (("show",), ("resolve", "--at", "164", hex(BASE))):
        shown = ksym(*words).stdout
        assert "\x1b" not in shown and "\u202e" not in shown and "9_[2Jevil" in shown
    assert json.loads(ksym("show", "--json").stdout)["symbols"][0]["name"] == EVIL


def test_several_boots_are_said(machine: Machine) -> None:
    write("ksym.db")
    machine.boot("another boot")
    write("ksym.db")
    machine.boot(THIS_BOOT)
    result = ksym("show", "--at", "120")
    assert "holds 2 boots" in result.stderr and f"boot {THIS_BOOT[:8]}" in result.stderr
    assert f"boot {THIS_BOOT[:8]}" in result.stdout
    for asked in ("2", "another"):
        assert "boot another" in ksym("show", "--boot", asked, "-H", "ksym.db").stdout
    refused(ksym("resolve", "--boot", "3", "0"), "no boot 3", "1 (", f"boot {THIS_BOOT[:8]}", "2 (")


@pytest.mark.parametrize("name", sorted(set(cli.commands) - {"record"}))
def test_where_a_history_is_named_a_boot_is(name: str) -> None:
    options = {name for option in cli.commands[name].params for name in option.opts}
    assert ("--history" in options) == ("--boot" in options)


# What cannot be used


@pytest.mark.parametrize("command", [("show",), ("resolve", "ffffffff81000000")])
def test_unusable_histories_are_one_sentence(place: Path, command: tuple[str, ...]) -> None:
    refused(ksym(*command, "-H", "none.db"), "none.db", "ksym record -o none.db")
    (place / "foreign").write_bytes(b"SQLite format 3\0" + bytes(200))
    refused(ksym(*command, "-H", "foreign"), "is not a ksym history")
    refused(ksym(*command, "-H", "."), "cannot be read")
    write("damaged.db")
    with open("damaged.db", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)
    result = ksym(*command, "-H", "damaged.db")
    assert result.exit_code == 1 and "damaged.db cannot be read as a history" in result.stderr


def test_perfs_clock_may_be_missing() -> None:
    HistoryWriter("ksym.db", "made up", 0, None).close(SECOND)
    refused(ksym("show", "--at", "1"), "perf clock", "perf record -k CLOCK_MONOTONIC")
    assert "times on the monotonic clock" in ksym("show").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("resolve",),
        ("resolve", "--at", "noon", "1"),
        ("show", "--clock", "cuckoo"),
        ("show", "--all", "--at", "1"),
        ("record", "--source", "rumour"),
        ("record", "--for", "ever"),
        ("record", "--ring", "8G"),
        ("record", "--max-size", "1"),
        ("script", "--format", "opera"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_status_2(words: tuple[str, ...]) -> None:
    result = ksym(*words)
    assert result.exit_code == 2
    assert "Usage: ksym" in result.stderr and result.stdout == ""


@pytest.mark.parametrize("command", ["annotate", "fold"])
def test_what_perf_recorded_is_not_its_text(command: str) -> None:
    with open("perf.data", "wb") as file:
        file.write(b"PERFILE2" + bytes(200))
    refused(ksym(command, "perf.data"), "not the text", "ksym script -i")


def test_show_needs_a_history_to_look_back() -> None:
    refused(ksym("show", "--all"), "no history", "ksym record")


def test_the_live_system_is_listed_without_a_history(machine: Machine) -> None:
    machine.loaded(Load(symbol(NEW), 0, SECOND, 8))
    shown = ksym("show", "--clock", "monotonic").stdout
    assert NEW in shown and "before 1.000000" in shown
    assert NEW in ksym("resolve", hex(BASE + 4)).stdout


# script


def test_perfs_options_stay_perfs() -> None:
    words = ["-Fip,sym", "-i", "x.data", "--comm", "a", "-Hy.db", "--format=folded", "-f"]
    ours, theirs = script.split(words)
    assert ours == ["-i", "x.data", "-Hy.db", "--format=folded"]
    assert theirs == ["-Fip,sym", "--comm", "a", "-f"]
    assert script.split(["-i", "x", "--", "-i", "--comms"]) == (["-i", "x"], ["-i", "--comms"])


@pytest.mark.parametrize(
    "words, ours, theirs",
    [
        (["-fi", "x", "-v"], ["-i", "x"], ["-f", "-v"]),
        (["-Gvix"], ["-ix"], ["-Gv"]),
        (["--inp", "x"], ["--input", "x"], []),
        (["--inpu=x"], ["--input=x"], []),
        (["--inline", "--insn-trace"], [], ["--inline", "--insn-trace"]),
    ],
)
def test_perf_s_ways_to_name_its_input_name_ours(
    words: list[str], ours: list[str], theirs: list[str]
) -> None:
    """perf takes all of these for -i (tools/lib/subcmd/parse-options.c)."""
    assert script.split(words) == (ours, theirs)


@pytest.mark.parametrize("option", ["-F", "-fF", "--fields", "--fi"])
def test_a_field_that_is_taken_away_is_no_option_of_ours(option: str) -> None:
    assert script.split([option, "-ip", "-i", "x"]) == (["-i", "x"], [option, "-ip"])
    assert script.split([f"{option}=-ip", "-v"])[1] == [f"{option}=-ip", "-v"]
    assert script.split([option]) == ([], [option])


#: Prints a sample in a program, tells how it was called, and ends as it is told to.
FAKE_PERF = """#!{python}
import os, signal, sys
print("\\t".join(sys.argv[1:]), file=sys.stderr)
print("app 77 [000]  120.000000500: 1 cycles:\\n\\t{address:16x} [unknown] ([kernel.kallsyms])\\n")
sys.stdout.flush()
{end}
"""


def run_script(place: Path, end: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """``ksym script`` as a process of its own, over a perf that is none."""
    path = place / "bin"
    path.mkdir()
    if end is not None:
        text = FAKE_PERF.format(python=sys.executable, address=BASE + 0x10, end=end)
        (path / "perf").write_text(text)
        (path / "perf").chmod(0o755)
    command = [sys.executable, "-m", "ksym_plugin.cli", "script", *words]
    env = {**os.environ, "PATH": str(path), "PYTHONPATH": str(REPO)}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_script_repairs_what_perf_prints_and_passes_its_status_on(
    place: Path, machine: Machine
) -> None:
    machine.boot("an earlier one")  # This one may not have come to the time of the sample.
    (place / "data").mkdir()
    write("data/ksym.db")
    data = PerfFile()
    data.features[RELEASE] = data.string(os.uname().release)
    (place / "data" / "p").write_bytes(data.file())
    words = ("-i", "data/p", "--comm", "x", "--clock", "monotonic")
    done = run_script(place, "sys.exit(3)", *words)
    assert done.returncode == 3
    assert done.stderr.splitlines()[1] == "script\t-i\tdata/p\t--comm\tx\t--ns"
    assert (
        done.stdout
        == f"app 77 [000]  120.000000: 1 cycles:\n\t{BASE + 0x10:x} {OLD}+0x10 ([bpf])\n\n"
    )


def test_script_says_that_perf_died(place: Path) -> None:
    done = run_script(place, "os.kill(os.getpid(), signal.SIGSEGV)", "-i", "p")
    assert done.returncode == 128 + 11
    assert done.stdout.startswith("app 77 [000]  120.000000: 1 cycles:")
    assert "perf was ended by SIGSEGV" in done.stderr


@pytest.mark.parametrize("end, is_there", [("", True), ("sys.exit(1)", False)])
def test_a_file_is_written_whole_or_not_at_all(place: Path, end: str, is_there: bool) -> None:
    done = run_script(place, end, "-i", "p", "-o", "out.txt")
    assert done.stdout == ""
    assert (place / "out.txt").exists() == is_there
    assert not [name for name in os.listdir(place) if name.startswith(".ksym")]


def test_script_says_that_there_is_no_perf(place: Path) -> None:
    done = run_script(place, None, "-i", "p")
    assert (done.returncode, done.stdout) == (1, "")
    assert "perf cannot be run" in done.stderr and "apt install" in done.stderr


@pytest.mark.parametrize("command", ["script", "report"])
def test_a_perf_data_is_named_with_i(place: Path, command: str) -> None:
    done = ksym(command, "perf.data")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        "ksym: 'perf.data' is no option of perf script; name a perf.data with -i\n"
    )


# The whole


def test_help_lists_the_commands_in_the_order_of_use() -> None:
    shown = ksym("--help").stdout
    places = [shown.index(f"\n  {name} ") for name in ("doctor", "record", "show", "resolve")]
    assert places == sorted(places)
    assert len(shown.splitlines()) <= 24


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_and_an_example(name: str) -> None:
    shown = ksym(name, "--help").stdout
    assert f"Example: ksym {name}" in shown
    assert all(parameter.help for parameter in cli.commands[name].params if parameter.opts[0] < "a")


def test_version() -> None:
    assert ksym("--version").stdout.startswith("ksym 0.")


def test_a_broken_pipe_ends_quietly(place: Path) -> None:
    write("ksym.db")
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ksym_plugin.cli", "show", "-H", "ksym.db"]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with os.fdopen(write_end, "w") as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=env, check=False
        )
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert done.returncode == 141


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["doctor"], ["show", "--help"], ["fold"]]
)
@pytest.mark.parametrize(
    ("to", "why"), [(">&-", "output is closed"), (">/dev/full", "No space left on device")]
)
def test_what_cannot_be_written_is_an_error(words: list[str], to: str, why: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = ["sh", "-c", f'exec "$@" {to}', "sh", sys.executable, "-m", "ksym_plugin.cli", *words]
    done = subprocess.run(
        line,
        input="a 1 1.000000: 1 e: \n\n",
        capture_output=True,
        text=True,
        cwd=REPO,
        env=environment,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ksym: ")
    assert done.stderr.endswith(f"{why}\n")


def test_a_closed_stdin_is_an_error() -> None:
    line = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "ksym_plugin.cli", "annotate"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPO, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ksym: standard input or output is closed\n"


def test_doctor_says_of_each_thing_what_and_how() -> None:
    result = ksym("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["recording"] else 1)
    for check in found["checks"]:
        assert check["state"] in ("ok", "missing")
        assert check["finding"]
        assert bool(check["remedy"]) <= (check["state"] == "missing")
    lines = ksym("doctor").stdout.splitlines()
    assert len(lines) == len(found["checks"])


@pytest.mark.parametrize(
    ("line", "is_lost"),
    [("libpython: [ on  ]", False), ("libpython: [ OFF ]", True), ("libelf: [ on  ]", True)],
)
def test_doctor_says_what_is_lost_without_libpython(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, is_lost: bool
) -> None:
    perf = place / "perf"
    perf.write_text(f"#!/bin/sh\necho '             {line}  # HAVE_IT'\n")
    perf.chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    checks = json.loads(ksym("doctor", "--json").stdout)["checks"]
    (found,) = [check for check in checks if check["name"] == "perf"]
    assert found["state"] == "ok"
    assert ("all works but perf script -s" in found["finding"]) == is_lost


def test_doctor_tells_the_state_of_the_history() -> None:
    write("ksym.db")
    checks = json.loads(ksym("doctor", "--json").stdout)["checks"]
    (history,) = [check for check in checks if check["name"] == "history"]
    assert history["state"] == "ok"
    assert history["finding"] == "ksym.db covers 100 s in 1 session, 1 gap"


def test_what_never_answers_is_given_up() -> None:
    read, write_end = os.pipe()
    try:
        with pytest.raises(TimeoutError):
            ask(lambda: os.read(read, 1), 0.2)
    finally:
        os.close(read)
        os.close(write_end)
    assert ask(lambda: (True, "yes", ""), 20) == (True, "yes", "")
    with pytest.raises(EOFError):
        ask(lambda: 1 // 0, 20)
