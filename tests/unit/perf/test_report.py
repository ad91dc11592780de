"""Accounts of perf.data files read directly, against the handler's of the same samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksym_plugin.history.locate import Choice
from ksym_plugin.history.reader import History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import MONOTONIC
from ksym_plugin.perf import report, session
from ksym_plugin.perf.data import DataError, Recorded
from ksym_plugin.perf.handler import Handler, Options
from ksym_plugin.timeline.program import ProgramDetails
from ksym_plugin.timeline.symbols import Loss
from ksym_plugin.timeline.timeline import Timeline
from tests import demo
from tests.unit import perf_files as pf
from tests.unit.helpers import BASE, load
from tests.unit.perf.test_handler_lines import HOUR, RETURN, SUB_AT, TRAMPOLINE_AT, write
from tests.unit.perf_events import CORE, SECOND, VMLINUX, bpf, event, node
from tests.unit.perf_files import PerfEvent, PerfFile

IN_KERNEL, IN_USER, IN_GUEST = 2**64 - 128, 2**64 - 512, 2**64 - 2048
USER, OTHER_CORE = 0x5555_0000_1000, CORE + 0x1234
#: Within the history, and while MAIN is there; after its unload, but within its grace time.
THEN, AFTER = 5 * SECOND, 10 * SECOND + 1000


class One(NamedTuple):
    """A sample: addresses leaf first, the kernel's and then the user's."""

    kernel: tuple[int, ...] = ()
    user: tuple[int, ...] = ()
    time: int = THEN
    comm: str = "work"
    event: str = "cpu-clock"
    has_chain: bool = True

    @property
    def leaf(self) -> int:
        return (*self.kernel, *self.user)[0]

    def words(self) -> tuple[int, ...]:
        """As the kernel writes the callchain."""
        kernel = (IN_KERNEL, *self.kernel) if self.kernel else ()
        return (*kernel, IN_USER, *self.user) if self.user else kernel


def events_of(samples: list[One]) -> list[dict]:
    """The same as perf hands it to a script; it knows nothing of BPF."""
    made = []
    for one in samples:
        chain = [
            node(address, "kernel_function", 4, VMLINUX) if address in (CORE, OTHER_CORE)
            else node(address)
            for address in (*one.kernel, *one.user)
        ]  # fmt: skip
        if not one.has_chain:
            chain = []
        made.append(
            event(*chain, time=one.time, comm=one.comm, ev_name=one.event, ip=one.leaf)
        )  # fmt: skip
    return made


def file_of(samples: list[One], **changed: object) -> PerfFile:
    """A perf.data of them."""
    names = sorted({one.event for one in samples})
    chained = [
        PerfEvent(
            name,
            pf.USUAL | pf.IDENTIFIER,
            ids=(at,),
            flags=(pf.SAMPLE_ID_ALL, pf.USE_CLOCKID),
            clockid=1,
            **changed,  # type: ignore[arg-type]
        )
        for at, name in enumerate(names, 1)
    ]
    file = PerfFile(*chained)
    tids = {comm: 100 + at for at, comm in enumerate(sorted({one.comm for one in samples}))}
    for comm, tid in tids.items():
        file.comm(tid, tid, comm.encode(), time=1, event_id=1)
    for one in samples:
        file.sample(
            chained[names.index(one.event)],
            pf.KERNEL_MODE if one.kernel else pf.USER_MODE,
            ip=one.leaf,
            pid=tids[one.comm],
            tid=tids[one.comm],
            time=one.time,
            event_id=1 + names.index(one.event),
            chain=one.words() if one.has_chain else (),
        )
    return file


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(str(tmp_path_factory.mktemp("report") / "h.db"))


def by_handler(capsys: pytest.CaptureFixture[str], path: str, *events: dict) -> list[dict]:
    capsys.readouterr()
    handler = Handler(Options(path, MONOTONIC, "report"), None)
    for one in events:
        handler.process_event(one)
    handler.trace_end()
    documents: list[dict] = json.loads(capsys.readouterr().out)
    return documents


def directly(folder: Path, history: str, file: PerfFile, form: str = "file") -> list[dict]:
    path = folder / "perf.data"
    path.write_bytes(getattr(file, form)())
    return report.read(str(path), Choice(history), None)


EVERY_KIND = [
    One((SUB_AT + 16, RETURN, CORE), (USER,)),
    One((SUB_AT + 16, RETURN, CORE), (USER,), comm="other"),
    One((CORE, RETURN, TRAMPOLINE_AT + 9, OTHER_CORE), (USER, USER + 8)),
    One((BASE + 8, BASE + 8)),
    One((CORE, OTHER_CORE)),
    One((), (USER,)),
    One((BASE + 4, CORE), time=AFTER),
    One((BASE + 4,), has_chain=False),
    One((CORE,), has_chain=False),
    One((), (USER,), has_chain=False),
    One((SUB_AT, CORE), (USER,), event="page-faults"),
    One((), (USER,), event="page-faults"),
]


@pytest.mark.parametrize("form", ["file", "pipe"])
def test_samples_of_every_kind_count_as_the_handler_counts_them(
    tmp_path: Path, history: str, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    ours = directly(tmp_path, history, file_of(EVERY_KIND), form)
    assert ours == by_handler(capsys, history, *events_of(EVERY_KIND))
    assert [document["samples"] for document in ours] == [10, 2]
    assert [document["bpf_samples"] for document in ours] == [5, 1]
    assert ours[0]["programs"][0]["lines"]


def test_the_shipped_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.shipped(str(tmp_path))
    history = str(tmp_path / "ksym.db")
    theirs = [json.loads(line) for line in demo.unpacked("events.jsonl").splitlines()]
    file = PerfFile(PerfEvent("cpu-clock"))
    with History(history) as past:
        file.features[pf.RELEASE] = file.string(past.boots()[0].release)
    for comm, tid in {(one["comm"], one["sample"]["tid"]) for one in theirs}:
        file.comm(tid, tid, comm.encode(), time=1)
    comms: dict[int, str] = {}
    for one in theirs:
        one["attr"] = bytes.fromhex(one["attr"])
        sample, addresses = one["sample"], [entry["ip"] for entry in one["callchain"]]
        if comms.get(sample["tid"]) != one["comm"]:
            comms[sample["tid"]] = one["comm"]
            file.comm(sample["tid"], sample["tid"], one["comm"].encode(), sample["time"])
        kernel = tuple(address for address in addresses if address >> 63)
        words = One(kernel, tuple(addresses[len(kernel) :])).words() if addresses else ()
        mode = pf.KERNEL_MODE if sample["ip"] >> 63 else pf.USER_MODE
        fields = {key: sample[key] for key in ("ip", "pid", "tid", "time", "period")}
        file.sample(misc=mode, chain=words, **fields)
    ours = directly(tmp_path, history, file)
    assert ours[0]["samples"] == 2321
    assert ours[0]["bpf_samples"] > 1000
    capsys.readouterr()
    demo.call_boot(history, identity.boot_id())
    handler = Handler(Options(history, None, "report"), None)
    for one in theirs:
        handler.process_event(one)
    handler.trace_end()
    assert ours == json.loads(capsys.readouterr().out)


ADDRESSES = st.sampled_from(
    [CORE, OTHER_CORE, BASE, BASE + 8, RETURN, SUB_AT + 16, TRAMPOLINE_AT + 9, BASE + 0x180]
)
SAMPLES = st.builds(
    One,
    st.lists(ADDRESSES, max_size=4).map(tuple),
    st.lists(st.sampled_from([USER, USER + 8]), min_size=1, max_size=2).map(tuple),
    st.sampled_from([SECOND // 2, SECOND, THEN, 10 * SECOND, AFTER, 20 * SECOND, 2 * HOUR]),
    st.sampled_from(["work", "other"]),
    st.sampled_from(["cpu-clock", "page-faults"]),
    st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(samples=st.lists(SAMPLES, min_size=1, max_size=6), names=st.sampled_from(["", "wrong"]))
def test_any_samples_count_alike_or_are_left_to_perf(
    tmp_path: Path,
    history: str,
    capsys: pytest.CaptureFixture[str],
    samples: list[One],
    names: str,
) -> None:
    try:
        ours = directly(tmp_path, history, file_of(samples))
    except DataError:
        return
    events = events_of(samples)
    for one in events if names else ():
        # What perf takes for a program is one that had the place at another time.
        one["callchain"] = [
            entry if "sym" in entry or not entry["ip"] >> 63
            else bpf(entry["ip"], "bpf_prog_00000000000000ff_wrong")
            for entry in one["callchain"]
        ]  # fmt: skip
    assert ours == by_handler(capsys, history, *events)


def test_programs_that_share_a_subprogram_have_their_own_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples ended in the subprogram, and there are no callchains; one main has no name."""
    names = [f"bpf_prog_{at:016x}_{name}" for at, name in enumerate(("acl", "limit", "lb"), 1)]
    shared, path = "bpf_prog_00000000000000cc_mix_hash", str(tmp_path / "shared.db")
    writer, timeline = HistoryWriter(path, "test", 0, None), Timeline()
    for at, name in enumerate([*names, ""], 1):
        main, sub = BASE + 0x1000 * at, BASE + 0x1000 * at + 0x100
        details = ProgramDetails(at, "")
        details.tag = "00000000000000aa"
        details.functions = [(main, 64, name), (sub, 64, shared)]
        for start, function in ((sub, shared), (main, name)):
            lifetime = timeline.apply(load(start, 64, function, SECOND, at))
            assert lifetime is not None
            writer.note(lifetime)
        writer.note_program(details)
    writer.close(HOUR)
    samples = [
        One((BASE + 0x1000 * at + 0x110,), has_chain=has_chain)
        for at in (1, 2, 3, 4)
        for has_chain in (False, True)
    ]
    (document,) = directly(tmp_path, path, file_of(samples))
    found = {row["program"]: (row["name"], row["functions"]) for row in document["programs"]}
    assert found == {at: (name, {shared: 2}) for at, name in enumerate([*names, shared], 1)}
    assert [document] == by_handler(capsys, path, *events_of(samples))


def test_what_a_user_s_stack_holds_is_no_program_s(tmp_path: Path, history: str) -> None:
    (document,) = directly(tmp_path, history, file_of([One((CORE,), (USER, BASE + 8))]))
    assert (document["samples"], document["programs"]) == (1, [])


def test_of_a_callchain_that_perf_drops_the_leaf_counts(tmp_path: Path, history: str) -> None:
    samples = [One((BASE + 8, SUB_AT), (USER, 2**64 - 1)), One((CORE, SUB_AT), (2**64 - 9,))]
    (document,) = directly(tmp_path, history, file_of(samples))
    (row,) = document["programs"]
    assert (row["total"]["samples"], row["own"]["samples"]) == (1, 1)
    assert document["kernel_samples"] == 2


def left(folder: Path, history: str, file: PerfFile) -> str:
    with pytest.raises(DataError) as caught:
        directly(folder, history, file)
    return caught.value.problem


def test_what_the_history_does_not_decide_is_left_to_perf(tmp_path: Path, history: str) -> None:
    for one in (
        One((CORE,), time=2 * HOUR),
        *(One((TRAMPOLINE_AT + 9,), time=time) for time in (2**63 + 5, 2**64 - 1, 0)),
        One((BASE + 8,), time=2 * HOUR),
        One((BASE + 0x8000,)),  # Among programs, but of none.
        One((BASE + 8,), time=20 * SECOND),  # Another may be there.
    ):
        assert left(tmp_path, history, file_of([EVERY_KIND[0], one])), one
    # Nothing of the user's has a name here.
    assert directly(tmp_path, history, file_of([One((), (USER,), time=2 * HOUR)]))


@pytest.mark.parametrize("form", ["file", "pipe"])
@pytest.mark.parametrize("words", [[], ["--", "--comms", "work"]])
def test_other_kernels_are_refused_in_a_true_sentence(
    tmp_path: Path, history: str, form: str, words: list[str]
) -> None:
    for arch in ("armv7l", "i686", "s390x", "sparc64"):
        file = PerfFile(PerfEvent(), arch=arch)
        file.sample(ip=0xC017_3B60, time=THEN)
        (tmp_path / "perf.data").write_bytes(getattr(file, form)())
        done = ksym_report(tmp_path, history, *words, status=1)
        assert f"addresses are not told by the highest of 64 bits ({arch})" in done.stderr
        assert (done.stderr.count("\n"), done.stdout) == (1, "")


def test_frames_of_other_kernels_stay_as_perf_has_them_and_it_is_said(
    history: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded()
    recorded.arch = "i686"
    with session.open_session(Choice(history), None, recorded) as known:
        assert (known.lookup, known.clock_map, known.is_this_boot) == (None, None, False)
    assert "stay as perf has them" in capsys.readouterr().err


def test_a_virtual_machine_s_kernel_is_left_to_perf(tmp_path: Path, history: str) -> None:
    file = file_of([EVERY_KIND[0]])
    file.sample(file.events[0], pf.GUEST_KERNEL_MODE, ip=BASE + 8, time=THEN, event_id=1)
    assert "virtual machine" in left(tmp_path, history, file)


@pytest.mark.parametrize("changed", [{"clockid": 4}, {"sample_type": pf.USUAL & ~pf.TIME}])
def test_times_that_mean_nothing_are_left_to_perf(
    tmp_path: Path, history: str, changed: dict
) -> None:
    fields = {"clockid": 1, "flags": (pf.SAMPLE_ID_ALL, pf.USE_CLOCKID), **changed}
    file = PerfFile(PerfEvent(**fields))
    file.sample(ip=BASE + 8, time=THEN, chain=(IN_KERNEL, BASE + 8))
    assert "time" in left(tmp_path, history, file)


def test_a_hypervisor_and_what_is_deeper_than_perf_prints_are_left_to_perf(
    tmp_path: Path, history: str
) -> None:
    file = file_of([EVERY_KIND[0]])
    chain = (IN_KERNEL, CORE, 2**64 - 32, BASE + 8)
    file.sample(ip=CORE, time=THEN, event_id=1, chain=chain)
    assert "virtual machine" in left(tmp_path, history, file)
    assert "deeper" in left(tmp_path, history, file_of([One((CORE,) * 127 + (BASE + 8,))]))
    assert directly(tmp_path, history, file_of([One((CORE,) * 126 + (BASE + 8,))]))


def test_samples_that_are_no_event_s_or_not_as_recorded_are_left_to_perf(
    tmp_path: Path, history: str
) -> None:
    file = file_of([*EVERY_KIND])
    file.sample(file.events[0], ip=BASE + 8, time=THEN, event_id=77, chain=(IN_KERNEL, BASE + 8))
    assert "no event" in left(tmp_path, history, file)
    apart = [
        PerfEvent("a", pf.USUAL | pf.ID, (1,)),
        PerfEvent("b", pf.USUAL | pf.ADDR | pf.ID, (2,)),
    ]
    file = PerfFile(*apart)
    file.sample(apart[0], ip=CORE, time=THEN, event_id=1)
    file.sample(apart[1], ip=CORE, time=THEN, event_id=2)
    assert "which event" in left(tmp_path, history, file)
    # perf record --off-cpu: perf puts what a BPF program has put out in a sample's place.
    file = PerfFile(PerfEvent("offcpu-time", pf.USUAL & ~pf.CALLCHAIN | 1 << 10, config=10))
    file.sample(ip=BASE + 8, time=THEN, tail=bytes(8))
    assert "put out" in left(tmp_path, history, file)


def test_many_ranges_and_many_programs_after_their_unload_take_no_time(
    tmp_path: Path, history: str
) -> None:
    file = file_of([One((BASE + at,), time=AFTER) for at in range(1, 64)])
    for at in range(20_000):
        body = file.pack("iiQQQ", -1, 0, CORE + 4096 * at, 16, 0) + b"[veth]\0\0"
        file.add(pf.MMAP, body, pf.KERNEL_MODE)
    assert directly(tmp_path, history, file)[0]["bpf_samples"] == 63


@pytest.mark.parametrize("is_module", [True, False])
def test_other_code_where_a_program_has_gone_is_left_to_perf(
    tmp_path: Path, history: str, is_module: bool
) -> None:
    for begin, is_there in ((BASE, True), (BASE + 0x4000, False)):
        file = file_of([One((BASE + 8,), time=AFTER)])
        if is_module:
            body = file.pack("iiQQQ", -1, 0, begin, 4096, 0) + b"[veth]\0\0"
            file.add(pf.MMAP, body, pf.KERNEL_MODE)
        else:
            file.add(pf.KSYMBOL, file.pack("QIHH", begin, 64, 2, 0) + b"kprobe_insn_page")
        if is_there:
            assert "other code" in left(tmp_path, history, file)
        else:
            assert directly(tmp_path, history, file)[0]["bpf_samples"] == 1


def test_a_history_with_losses_is_left_to_perf(tmp_path: Path) -> None:
    path = str(tmp_path / "lost.db")
    writer = HistoryWriter(path, "test", 0, None)
    writer.lost(Loss(20 * SECOND, 21 * SECOND, "lost", 3))
    writer.close(HOUR)
    assert "not know all" in left(tmp_path, path, file_of([One((CORE,))]))


def test_only_a_file_is_read_and_with_a_history(
    tmp_path: Path, history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "none", tmp_path):
        with pytest.raises(DataError):
            report.read(str(path), Choice(history), None)
    monkeypatch.delenv("KSYM_HISTORY", raising=False)
    monkeypatch.setattr("ksym_plugin.history.locate.SYSTEM", str(tmp_path / "none.db"))
    (tmp_path / "perf.data").write_bytes(file_of(EVERY_KIND).file())
    with pytest.raises(DataError, match="history"):
        report.read(str(tmp_path / "perf.data"), Choice(), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_user_s_file_is_for_perf_to_refuse(tmp_path: Path, history: str) -> None:
    path = tmp_path / "perf.data"
    path.write_bytes(file_of(EVERY_KIND).file())
    os.chown(path, 65534, 65534)
    with pytest.raises(DataError, match="another user"):
        report.read(str(path), Choice(history), None)


# The command


def ksym_report(
    folder: Path, history: str, *words: str, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Where there is no perf."""
    done = subprocess.run(
        [sys.executable, "-m", "ksym_plugin.cli", "report", "-H", history, *words],
        cwd=folder,
        env={**os.environ, "PATH": str(folder / "nothing"), "PYTHONPATH": demo.REPO},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert done.returncode == status, done.stderr
    return done


def test_the_command_needs_no_perf(tmp_path: Path, history: str) -> None:
    documents = directly(tmp_path, history, file_of(EVERY_KIND))
    done = ksym_report(tmp_path, history, "--json")
    assert json.loads(done.stdout) == documents[0]
    counts, choice = done.stderr.splitlines()
    assert counts.startswith("ksym: 20 kernel frames: 11 are BPF by the history, 1 of them ran")
    assert choice.endswith("--event takes another: page-faults")


def test_perf_reads_what_it_has_to_and_what_it_has_options_for(
    tmp_path: Path, history: str
) -> None:
    directly(tmp_path, history, file_of(EVERY_KIND))
    done = ksym_report(tmp_path, history, "--", "--comms", "work", status=1)
    assert done.stderr.startswith("ksym: perf cannot be run") and done.stderr.count("\n") == 1
    (tmp_path / "perf.data").write_bytes(file_of([One((CORE,), time=2 * HOUR)]).file())
    done = ksym_report(tmp_path, history, status=1)
    assert done.stderr.startswith("ksym: perf cannot be run") and done.stderr.count("\n") == 1
