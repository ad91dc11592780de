"""The account of BPF programs: against counts made by hand, and of the shipped recording."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.cli import report
from ksym_plugin.kernel import identity
from ksym_plugin.perf.handler import Handler, Options
from ksym_plugin.perf.stack_output import ReportOutput
from ksym_plugin.stacks.account import ELSEWHERE, KERNEL, Account, share
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    EXACT,
    GAP,
    OTHER_BPF,
    Frame,
    Lifetime,
    Load,
)
from tests import demo
from tests.unit.cli.test_cli import ksym
from tests.unit.helpers import BASE, load
from tests.unit.perf_events import CORE, GUEST_KERNEL, SECOND, VMLINUX, event, node

MAIN, SUB, OTHER = (f"bpf_prog_{n:016x}_{name}" for n, name in enumerate(("main", "sub", "other")))
TRAMPOLINE = "bpf_trampoline_7"
NOTHING: dict[str, Any] = {"programs": [], "kernel_samples": 0}


def life(name: str, prog_id: int | None = None, open_ended: bool = False) -> Frame:
    known = load(BASE, 64, name, SECOND, prog_id, open_ended)
    lifetime = Lifetime(Load(known.symbol, SECOND, SECOND, prog_id, open_ended, 12, "agent"))
    return Frame(BASE, name, 0, BPF_MODULE, known.symbol.kind, EXACT, lifetime)


def rows(account: Account) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in only(account)["programs"]}


def only(account: Account) -> dict[str, Any]:
    """The document of the only event there is."""
    (document,) = account.documents() or [NOTHING]
    return document


def counts(account: Account) -> dict[str, tuple[int, int]]:
    return {
        name: (row["own"]["samples"], row["total"]["samples"])
        for name, row in rows(account).items()
    }


def test_own_and_total() -> None:
    account = Account()
    main, other = account.frame(MAIN, life(MAIN, 1)), account.frame(OTHER, life(OTHER, 2))
    account.add("e", "sh", [main, KERNEL, ELSEWHERE])
    account.add("e", "sh", [KERNEL, main, KERNEL])
    account.add("e", "top", [other, KERNEL, main, KERNEL])
    account.add("e", "sh", [KERNEL, ELSEWHERE])
    account.add("e", "sh", [ELSEWHERE])
    account.add("e", "sh", [])
    document = only(account)
    assert counts(account) == {MAIN: (1, 3), OTHER: (1, 1)}
    assert (document["samples"], document["kernel_samples"], document["bpf_samples"]) == (6, 4, 2)
    assert rows(account)[MAIN]["tasks"] == {"sh": 2, "top": 1}
    assert rows(account)[MAIN]["total"]["of_kernel"]["share"] == 3 / 4
    assert rows(account)[MAIN]["total"]["of_all"]["share"] == 3 / 6


def test_events_are_counted_apart() -> None:
    account = Account()
    main = account.frame(MAIN, life(MAIN, 1))
    account.add("faults", "sh", [main])
    for _ in range(3):
        account.add("cycles", "sh", [KERNEL, main])
    found = [(one["event"], one["samples"], one["bpf_samples"]) for one in account.documents()]
    assert found == [("cycles", 3, 0), ("faults", 1, 1)]
    assert [len(one["programs"]) for one in account.documents()] == [1, 1]


def test_recursion_counts_once() -> None:
    account = Account()
    main = account.frame(MAIN, life(MAIN, 1))
    account.add("e", "sh", [main, KERNEL, main, KERNEL, main])
    assert counts(account) == {MAIN: (1, 1)}


def test_functions_of_a_program_are_one_and_it_has_the_entry_s_name() -> None:
    account = Account()
    main, sub = account.frame(MAIN, life(MAIN, 1)), account.frame(SUB, life(SUB, 1))
    for _ in range(3):
        account.add("e", "sh", [sub, main, KERNEL])
    account.add("e", "sh", [main, KERNEL])
    assert counts(account) == {MAIN: (4, 4)}
    assert rows(account)[MAIN]["functions"] == {SUB: 3, MAIN: 1}


def test_a_program_whose_main_function_is_known_has_its_name() -> None:
    account = Account()
    for name, certainty in ((SUB, EXACT), (OTHER, GAP), (OTHER, GAP)):
        place = life(name, 1 if certainty == EXACT else 2)
        frame = Frame(*place[:5], certainty, place.lifetime).at(None, MAIN)
        mark = "" if certainty == EXACT else "?"
        account.add("e", "sh", [account.frame(name + mark, frame)])
    assert counts(account) == {MAIN: (1, 1), MAIN + "?": (2, 2)}
    assert rows(account)[MAIN + "?"]["functions"] == {OTHER + "?": 2}


def test_programs_of_one_name_are_told_apart() -> None:
    account = Account()
    for prog_id in (1, 2):
        account.add("e", "sh", [account.frame(MAIN, life(MAIN, prog_id))])
    account.add("e", "sh", [account.frame(MAIN, None)])
    assert sorted(str(row["program"]) for row in only(account)["programs"]) == [
        "1",
        "2",
        "None",
    ]


def test_images_stand_for_themselves() -> None:
    account = Account()
    main = account.frame(MAIN, life(MAIN, 1))
    image = account.frame(TRAMPOLINE, life(TRAMPOLINE, open_ended=True))
    account.add("e", "sh", [main, image, KERNEL])
    assert counts(account) == {MAIN: (1, 1), TRAMPOLINE: (0, 1)}
    assert rows(account)[TRAMPOLINE]["kind"] == "bpf_trampoline"


def test_what_is_known_of_a_program_is_told() -> None:
    account = Account()
    place = life(MAIN, 1)
    gone = place.lifetime
    assert gone is not None
    gone.unloaded_earliest, gone.unloaded_latest = 3 * SECOND, 4 * SECOND
    account.add("e", "sh", [account.frame(MAIN, place)])
    account.add("e", "sh", [account.frame(OTHER, life(OTHER, 2))])
    row = rows(account)[MAIN]
    assert (row["pid"], row["comm"]) == (12, "agent")
    assert (row["loaded"], row["unloaded"]) == ([SECOND, SECOND], [3 * SECOND, 4 * SECOND])
    assert row["lived"] == [2 * SECOND, 3 * SECOND]
    assert rows(account)[OTHER]["lived"] == [None, None]


@given(st.lists(st.lists(st.sampled_from("ukab"), max_size=5)))
def test_against_a_count_by_hand(samples: list[list[str]]) -> None:
    account = Account()
    frames = {"u": ELSEWHERE, "k": KERNEL}
    frames.update({n: account.frame(n, life(n, number)) for number, n in enumerate("ab")})
    for sample in samples:
        account.add("e", "sh", [frames[name] for name in sample])
    samples = [sample for sample in samples if sample and sample[0] != "u"]
    own = Counter(sample[0] for sample in samples)
    total = Counter(name for sample in samples for name in set(sample))
    assert counts(account) == {n: (own[n], total[n]) for n in "ab" if total[n]}
    assert only(account)["kernel_samples"] == sum(own[n] for n in "kab")


@pytest.mark.parametrize(
    "count, whole, low, high",
    # By the formula in Wilson's paper, worked out to three digits.
    [(0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (1, 100, 0.002, 0.054), (10, 10, 0.722, 1.0)],
)
def test_the_error_of_sampling(count: int, whole: int, low: float, high: float) -> None:
    found = share(count, whole)
    assert (round(found["low"], 3), round(found["high"], 3)) == (low, high)
    assert found["share"] == count / whole


def test_of_nothing_everything_is_possible() -> None:
    assert share(0, 0) == {"share": 0.0, "low": 0.0, "high": 1.0}


# From the handler


def test_frames_as_the_handler_hands_them_over() -> None:
    output = ReportOutput(io.StringIO())
    assert output.user(node(0x1000, "main")) == ELSEWHERE
    assert output.kernel(CORE, "start", 4, VMLINUX) == KERNEL
    assert output.kernel(CORE, "", None, "") == KERNEL
    assert output.kernel(CORE, "start", 4, "[guest.kernel.kallsyms]") == ELSEWHERE
    assert output.kernel(BASE, MAIN, 4, MAIN) == output.kernel(BASE, MAIN, 4, "[bpf]") != KERNEL


def test_code_without_a_name_among_bpf_programs_is_accounted_for_as_such() -> None:
    stream = io.StringIO()
    output = ReportOutput(stream)
    output.sample(event(node(BASE)), [output.kernel(BASE, "", None, "[bpf]")])
    output.close()
    (document,) = json.loads(stream.getvalue())
    (row,) = document["programs"]
    assert (row["name"], row["kind"], row["own"]["samples"]) == ("[bpf]", OTHER_BPF, 1)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The account of the shipped recording."""
    path = str(tmp_path_factory.mktemp("report") / "ksym.db")
    Path(path).write_bytes(demo.unpacked("ksym.db"))
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE boot SET boot_id = ?", (identity.boot_id(),))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        handler = Handler(Options(path, None, "report"), None)
        for line in demo.unpacked("events.jsonl").splitlines():
            one = json.loads(line)
            handler.process_event({**one, "attr": bytes.fromhex(one["attr"])})
        guest = event(node(CORE, "f", 4, VMLINUX), cpumode=GUEST_KERNEL, comm="guest")
        guest["callchain"][0]["dso"] = "[guest.kernel.kallsyms]"
        handler.process_event(guest)
        handler.trace_end()
    (document,) = json.loads(out.getvalue())
    return document


def test_the_shipped_recording_against_its_truth(shipped: dict[str, Any]) -> None:
    """Each program ran while its runner had a name for it: leaves are counted by that name."""
    truth = json.loads(demo.unpacked("truth.json"))
    symbols = [(start, end) for one in truth["programs"] for start, end, _ in one["symbols"]]
    expected: Counter[str] = Counter()
    for line in demo.unpacked("events.jsonl").splitlines():
        one = json.loads(line)
        ip = one["callchain"][0]["ip"] if one["callchain"] else one["sample"]["ip"]
        if any(start <= ip < end for start, end in symbols):
            expected[one["comm"]] += 1
    comm_of = {one["id"]: one["comm"] for one in truth["programs"]}
    found = {comm_of[row["program"]]: row["own"]["samples"] for row in shipped["programs"]}
    assert found == {comm: count for comm, count in expected.items() if comm in found}
    assert sum(expected.values()) - sum(found.values()) <= 2


def test_guests_are_not_this_kernel(shipped: dict[str, Any]) -> None:
    kernel = sum(
        json.loads(line)["callchain"][0]["ip"] >= 1 << 63
        for line in demo.unpacked("events.jsonl").splitlines()
    )
    assert shipped["kernel_samples"] == kernel


# The command


@pytest.fixture
def run_perf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command over a perf.data that is none, with a shell script in perf's place."""

    def runner(script: str, *words: str) -> Any:
        perf = tmp_path / "perf"
        perf.write_text(f"#!/bin/sh\n{script}\n")
        perf.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
        return ksym("report", "-i", str(tmp_path / "none.data"), *words)

    return runner


@pytest.fixture
def run(shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, with documents in place of what is counted."""

    def runner(
        *words: str, document: dict[str, Any] | None = None, others: Any = (), status: int = 0
    ) -> Any:
        given = json.loads(json.dumps(shipped if document is None else document))
        monkeypatch.setattr(report, "account", lambda *_: ([given, *others], status))
        return ksym("report", *words)

    return runner


def test_table(run: Any, shipped: dict[str, Any]) -> None:
    lines = run().stdout.splitlines()
    assert lines[0].startswith("2,322 samples of cpu-clock: 2,275 in the kernel (98.0 %), 2,245 of")
    assert len(lines) == 3 + len(shipped["programs"])
    first = shipped["programs"][0]
    assert lines[3].split()[:2] == [str(first["program"]), str(first["own"]["samples"])]
    assert lines[3].endswith(first["name"])
    assert re.search(r" 5\.2 ±0\.9 % ", lines[3])


@pytest.mark.parametrize("key", ["own", "total", "program", "name", "lived"])
def test_sorted(run: Any, key: str) -> None:
    found = json.loads(run("--json", "--sort", key).stdout)["programs"]
    values = {
        "own": [-row["own"]["samples"] for row in found],
        "total": [-row["total"]["samples"] for row in found],
        "program": [row["program"] for row in found],
        "name": [row["name"] for row in found],
        "lived": [-row["lived"][0] for row in found],
    }[key]
    assert len(values) == 20
    assert values == sorted(values)


@pytest.mark.parametrize("pattern, number", [("oracle_1", 11), ("*oracle_1", 1), ("none", 0)])
def test_filtered(run: Any, pattern: str, number: int) -> None:
    found = json.loads(run("--json", "--filter", pattern).stdout)
    assert len(found["programs"]) == number
    assert found["bpf_samples"] == 2245


def test_names_are_not_obeyed_by_a_terminal(run: Any, shipped: dict[str, Any]) -> None:
    row = {
        **shipped["programs"][0],
        "name": "a\x1b[31mb",
        "comm": "\x1b]0;x\x07",
        "tasks": {"\n": 1},
    }
    out = run(document={**shipped, "programs": [row]}).stdout
    assert out.count("\n") == 4
    assert "\x1b" not in out and "\x07" not in out


def test_source_lines_stand_below_their_program(run: Any, shipped: dict[str, Any]) -> None:
    lines = [
        {"file": f"/src/a{n}.c", "line": n, "text": "\tx\x1b[31m = 1;", "samples": 90 - n, "own": n}
        for n in range(1, 8)
    ]
    rows = [
        {**shipped["programs"][0], "lines": lines},
        {**shipped["programs"][1], "name": "bpf_trampoline_7", "traces": "tcp_connect"},
    ]
    document = {**shipped, "programs": rows}
    plain, lined = run(document=document).stdout, run("--lines", document=document).stdout
    table = lined.splitlines()[3:]
    assert [line.split() for line in table[1:4]] == [
        [str(n), str(90 - n), f"a{n}.c:{n}", "x[31m", "=", "1;"] for n in (1, 2, 3)
    ]
    assert table[6].split() == "and 2 more lines".split()
    assert table[7].endswith("  bpf_trampoline_7 (traces tcp_connect)")
    own_ends, total_ends = (
        lined.splitlines()[2].index(head) + len(head) for head in ("OWN", "TOTAL")
    )
    assert table[1][own_ends - 1] == "1" and table[1][total_ends - 2 : total_ends] == "89"
    assert "a1.c" not in plain and "(traces tcp_connect)" in plain
    assert "\x1b" not in lined
    assert json.loads(run("--json", document=document).stdout)["programs"][0]["lines"] == lines


@pytest.mark.parametrize(
    "words, changed, reason",
    [
        (["--filter", "none"], {}, "no program with samples matches 'none'; there are 20"),
        ([], {"programs": [], "kernel_samples": 0}, "perf_event_paranoid"),
        ([], {"programs": []}, "no sample went through a BPF program"),
    ],
)
def test_why_there_is_nothing(
    run: Any, shipped: dict[str, Any], words: list[str], changed: dict[str, Any], reason: str
) -> None:
    done = run(*words, document={**shipped, **changed})
    assert done.exit_code == 0
    assert reason in done.stderr
    assert "PROGRAM" not in done.stdout


def test_an_event_can_be_chosen(run: Any, shipped: dict[str, Any]) -> None:
    other = {**shipped, "event": "faults", "samples": 5, "programs": []}
    done = run(others=[other])
    assert "of cpu-clock" in done.stdout
    assert "--event takes another: faults" in done.stderr
    done = run("--event", "faults", others=[other])
    assert done.stdout.startswith("5 samples of faults")
    assert "takes another" not in done.stderr
    done = run("--event", "none", others=[other])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "cpu-clock, faults" in done.stderr


#: perf's text of four samples, without and with callchains, and of one that has none.
TEXT = """\
a\\xff     7 [000]     1.000000000:  1 cycles:  ffffffff81000010 f+0x10 ([kernel.kallsyms])
app     7 [000]     1.500000000:  1 cycles:      55d0c0de1150 work+0x67 (/opt/app)
app     7 [000]     2.000000000:  1 cycles:
\tffffffffc0100008 bpf_prog_0000000000000001_sub+0x8 (bpf_prog_0000000000000001_sub)
\tffffffff81000010 f+0x10 ([kernel.kallsyms])
\t    55d0c0de1150 work+0x67 (/opt/app)
\tffffffffc0100008 [unknown] ([unknown])

app     7 [000]     3.000000000:  1 cycles:
\t    55d0c0de1150 work+0x67 (/opt/app)
\tffffffffc0100008 bpf_prog_0000000000000001_sub+0x8 (bpf_prog_0000000000000001_sub)

app     7 [000]     4.000000000:  1 cycles:
"""


@pytest.fixture
def no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KSYM_HISTORY", raising=False)
    monkeypatch.setattr("ksym_plugin.history.locate.SYSTEM", str(tmp_path / "none.db"))
    monkeypatch.setattr("ksym_plugin.perf.session.Session.ask_live", lambda _: None)


@pytest.mark.usefixtures("no_history")
def test_what_perf_s_text_tells(run_perf: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT.encode().replace(b"\\xff", b"\xff"))
    done = run_perf(
        f"echo $@ > {tmp_path}/asked; cat {tmp_path}/text", "--json", "--", "--cpu", "0"
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["samples"], found["kernel_samples"], found["bpf_samples"]) == (5, 2, 1)
    (row,) = found["programs"]
    assert (row["own"]["samples"], row["total"]["samples"], row["tasks"]) == (1, 1, {"app": 1})
    words = (tmp_path / "asked").read_text().split()
    assert words[:3] == ["script", "-i", str(tmp_path / "none.data")]
    assert words[-3:] == ["--cpu", "0", "--ns"]


@pytest.mark.usefixtures("no_history")
def test_no_samples_at_all(run_perf: Callable[..., Any]) -> None:
    done = run_perf("true")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.endswith("ksym: there are no samples in it\n")


@pytest.mark.usefixtures("no_history")
@pytest.mark.parametrize(
    "end, said", [("exit 129", "(status 129)"), ("kill -SEGV $$", "(status 139)")]
)
def test_perf_that_fails(end: str, said: str, run_perf: Callable[..., Any]) -> None:
    done = run_perf(f"echo no such file >&2\n{end}")
    assert done.exit_code == 1
    assert f"perf script failed {said}; see above" in done.stderr


@pytest.mark.parametrize("words", ["-F ip", "-S f", "--stop-bt f", "x"])
def test_options_that_a_report_has_no_use_for(run_perf: Callable[..., Any], words: str) -> None:
    done = run_perf("true", "--", *words.split())
    assert (done.exit_code, done.stdout) == (1, "")


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_perf_that_fails_half_way(run: Any, words: tuple[str, ...]) -> None:
    whole, done = run(*words), run(*words, status=234)
    assert (whole.exit_code, done.exit_code) == (0, 1)
    assert done.stdout == whole.stdout != ""
    assert done.stderr.endswith("perf script failed (status 234) before the end of the data\n")
