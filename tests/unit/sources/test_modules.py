"""Modules followed by their list and their uevents, over a kernel made of files."""

from __future__ import annotations

import select
import socket
import time
from pathlib import Path

import pytest

from ksym_plugin.kernel import modules
from ksym_plugin.kernel.modules import Uevents, parse, read_listing
from ksym_plugin.sources import modules as modules_source
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.symbols import MODULE, Lifetime, Load, Loss, Symbol, Unload
from tests.unit.hosts import fds
from tests.unit.module_hosts import BASE, CODE, ROWS, Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def told(change: object) -> str:
    if isinstance(change, Load):
        return f"+{change.symbol.name}@{(change.symbol.start - BASE) >> 16}"
    if isinstance(change, Unload):
        return f"-{change.name}@{(change.start - BASE) >> 16}"
    return type(change).__name__


def settled(host: Host, modules: object) -> list:
    """All changes, with everything answered that is asked."""
    changes = modules.read()  # type: ignore[attr-defined]
    while host.reader.fileno() >= 0:
        host.reader.answer()
        changes += modules.read()  # type: ignore[attr-defined]
    return changes


def test_uevents_of_modules_and_no_others() -> None:
    assert parse(b"add@/module/nf_tables\0ACTION=add\0SUBSYSTEM=module\0") == (True, "nf_tables")
    assert parse(b"remove@/module/xor\0ACTION=remove\0") == (False, "xor")
    for other in (
        b"",
        b"add@/devices/virtual/net/veth1\0ACTION=add\0",
        b"add@/module/kvm/holders/kvm_intel\0",
        b"change@/module/xor\0",
        b"libudev\0\xfe\xed\xca\xfe" + bytes(64),
        b"remove@/bus/pci/drivers/xhci_hcd\0",
    ):
        assert parse(other) is None


def test_the_list_is_read_whatever_it_holds(tmp_path: Path) -> None:
    text = (
        "xor 20480 1 btrfs, Live 0xffffffffc0e4e000\n"
        "raid6_pq 122880 1 btrfs, Loading 0xffffffffc0e2f000 (OE+)\n"
        "broken 1\n\nodd x 0 - Live 0xffffffffc0e4e000\n"
    )
    path = tmp_path / "modules"
    path.write_text(text)
    listed = read_listing(str(path))
    assert [(one.name, one.size, one.state, one.base) for one in listed.values()] == [
        ("xor", 20480, "Live", 0xFFFF_FFFF_C0E4_E000),
        ("raid6_pq", 122880, "Loading", 0xFFFF_FFFF_C0E2_F000),
    ]


class Socket:
    """Gives what it has, one after the other, and then nothing."""

    def __init__(self, *waiting: object) -> None:
        self.waiting = list(waiting)

    def recvfrom(self, _size: int) -> object:
        if not self.waiting:
            raise BlockingIOError
        one = self.waiting.pop(0)
        if isinstance(one, OSError):
            raise one
        return one


def test_uevents_that_overflow_are_a_loss_and_only_the_kernel_is_believed() -> None:
    events = Uevents.__new__(Uevents)
    events._socket = Socket(  # type: ignore[assignment]
        (b"add@/module/a\0", (0, 1)),
        (b"remove@/module/forged\0", (4711, 1)),
        OSError(105, "No buffer space available"),
        (b"remove@/module/a\0", (0, 1)),
    )
    assert events.read() == ([(True, "a"), (False, "a")], True)
    assert events.read() == ([], False)
    events._socket = Socket(OSError(9, "Bad file descriptor"))  # type: ignore[assignment]
    with pytest.raises(OSError, match="Bad file"):
        events.read()


def test_what_is_there_at_the_start_is_told_once_its_functions_are_known(host: Host) -> None:
    host.add("a", 1)
    host.add("b", 2)
    modules = host.follow()
    assert modules.unsettled == 0
    assert modules.read() == []
    ((*first, sections, build_id), (*second, _, _)) = host.reader.asked[0]
    assert first == ["a", BASE + 0x10000, 0x4000]
    assert second == ["b", BASE + 0x20000, 0x4000]
    assert (sections, build_id) == ({".text": BASE + 0x10000}, "1234")
    host.reader.answer()
    loads = modules.read()
    now = time.monotonic_ns()
    assert [told(load) for load in loads] == ["+a@1", "+b@2"]
    load = loads[0]
    assert load.symbol == Symbol(BASE + 0x10010, BASE + 0x10150, "a", MODULE, "a")
    assert load.earliest == 0 < load.latest < now
    assert load.functions.find(0x40) == (0x40, 0x140, "second")
    assert modules.unsettled is None
    assert modules.read() == []
    assert len(host.reader.asked) == 1
    modules.close()


def test_times_are_those_at_which_it_was_seen(host: Host) -> None:
    modules = host.follow()
    assert modules.read() == []
    before = time.monotonic_ns()
    assert modules.read() == []
    host.add("a", 1)
    host.announce("a")
    modules.read()
    seen = time.monotonic_ns()
    host.reader.answer()
    (load,) = modules.read()
    # The list was without it when it was read the last time, and that was after ``before``.
    assert before < load.earliest < load.latest < seen
    modules.read()
    known = time.monotonic_ns()
    host.remove("a")
    (unload,) = modules.read()
    assert seen < unload.earliest < known < unload.latest < time.monotonic_ns()
    assert (unload.start, unload.name) == (load.symbol.start, "a")
    assert modules.read() == []
    modules.close()


def test_one_whose_init_runs_for_long_is_seen_before_it_is_announced(host: Host) -> None:
    modules = host.follow()
    host.add("slow", 1, "Loading", has_sysfs=False)
    assert modules.read() == []
    # The kernel lists it before its sections can be read.
    assert host.reader.asked == []
    assert modules.unsettled is not None
    host.add_sysfs("slow", BASE + 0x10000)
    modules.read()
    assert host.reader.asked[0][0][3] == {".text": BASE + 0x10000}
    host.reader.answer()
    (load,) = modules.read()
    latest = load.latest
    host.add("slow", 1, "Live")
    host.announce("slow")
    assert settled(host, modules) == []
    assert latest < time.monotonic_ns()
    modules.close()


def test_one_that_is_being_torn_down_has_gone(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    settled(host, modules)
    # Its exit function may run for as long as it likes.
    host.add("a", 1, "Unloading")
    assert modules.read() == []
    host.uevents.waiting.append((False, "a"))
    assert [told(one) for one in modules.read()] == ["-a@1"]
    # It is not taken for a new one, until there is one.
    assert settled(host, modules) == []
    modules.close()


def test_one_that_came_again_at_the_same_place_is_another(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    (first,) = settled(host, modules)
    host.reader.rows["a"] = [(0x10, 0x20, "renamed")]
    host.remove("a")
    host.add("a", 1)
    host.announce("a")
    unload, load = settled(host, modules)
    assert [told(one) for one in (unload, load)] == ["-a@1", "+a@1"]
    assert unload.earliest >= first.latest - 1_000_000_000
    assert load.earliest <= unload.latest <= load.latest
    assert load.functions.find(0)[2] == "renamed"
    # It would be seen without the event, were it elsewhere.
    host.remove("a", is_told=False)
    host.add("a", 3)
    assert [told(one) for one in settled(host, modules)] == ["-a@1", "+a@3"]
    modules.close()


def test_one_that_has_gone_by_the_time_its_functions_are_known_is_told_whole(host: Host) -> None:
    modules = host.follow()
    host.add("a", 1)
    modules.read()
    assert len(host.reader.asked) == 1
    host.remove("a")
    assert modules.read() == []
    assert modules.unsettled is not None
    host.reader.answer()
    load, unload = modules.read()
    assert [told(one) for one in (load, unload)] == ["+a@1", "-a@1"]
    assert load.latest <= unload.latest
    assert modules.unsettled is None
    modules.close()


def test_functions_read_after_it_had_gone_are_not_its(host: Host) -> None:
    modules = host.follow()
    host.add("a", 1)
    modules.read()
    host.remove("a")
    modules.read()
    host.reader.answer(when=time.monotonic_ns())
    assert modules.read() == []
    modules.finish()
    assert modules.notes == ["modules whose functions are not in the history: a"]
    modules.close()


def test_those_nobody_could_place_are_said(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    modules.read()
    host.reader.answer(has_functions=False)
    assert modules.read() == []
    host.announce("brief")
    host.uevents.waiting.append((False, "brief"))
    for number in range(6):
        host.uevents.waiting.append((False, f"n{number}"))
    assert modules.finish() == []
    (note,) = modules.notes
    assert note.endswith("the history: a, brief, n0, n1, n2 and 3 more")
    modules.close()


def test_without_a_process_there_are_no_functions_until_there_is_one(host: Host) -> None:
    host.add("a", 1)
    host.reader.fails = True
    modules = host.follow()
    assert modules.read() == []
    assert modules.unsettled == 0
    host.reader.fails = False
    host.add("b", 2)
    assert [told(one) for one in settled(host, modules)] == ["+a@1", "+b@2"]
    modules.close()


def test_an_overflow_is_a_loss_and_the_list_is_compared_anew(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    settled(host, modules)
    host.remove("a", is_told=False)
    host.add("b", 1)
    host.uevents.lost = True
    loss, *rest = settled(host, modules)
    assert isinstance(loss, Loss)
    assert loss.since < loss.until
    assert [told(one) for one in rest] == ["-a@1", "+b@1"]
    modules.close()


def earlier(name: str, slot: int, rows: list = ROWS, loaded: int = 100) -> Lifetime:
    start = BASE + slot * 0x10000 + CODE[0]
    symbol = Symbol(start, start + CODE[1] - CODE[0], name, MODULE, name)
    data = pack_functions((at - rows[0][0], size, word) for at, size, word in rows)
    return Lifetime(Load(symbol, 50, loaded, functions=PackedFunctions(data)))


def test_the_next_session_goes_on_with_what_is_there_still(host: Host) -> None:
    host.add("same", 1)
    host.add("moved", 2)
    host.add("rebuilt", 3)
    before = [
        earlier("same", 1),
        earlier("moved", 7),
        earlier("rebuilt", 3, [(0x10, 0x40, "first"), (0x50, 0x100, "another")]),
        earlier("went", 5),
        earlier("same", 6, loaded=70),
    ]
    modules = host.follow(before, since=900)
    changes = settled(host, modules)
    assert sorted(map(told, changes)) == [
        "+moved@2",
        "+rebuilt@3",
        "-moved@7",
        "-rebuilt@3",
        "-same@6",
        "-went@5",
    ]
    for change in changes:
        assert change.earliest == 900 < change.latest
    host.remove("same")
    (unload,) = modules.read()
    assert (unload.start, unload.name) == (before[0].symbol.start, "same")
    modules.close()


def test_where_addresses_are_hidden_or_there_is_no_list_nothing_is_followed(host: Host) -> None:
    host.listing.write_text("a 16384 0 - Live 0x0000000000000000\n")
    with pytest.raises(SourceError, match="hides where its modules are"):
        host.follow()
    assert host.uevents.is_closed
    host.listing.unlink()
    host.uevents = type(host.uevents)()
    with pytest.raises(SourceError, match="cannot be read"):
        host.follow()


def test_it_is_readable_when_an_event_or_an_answer_is_there(host: Host) -> None:
    modules = host.follow()
    assert not select.select([modules], [], [], 0)[0]
    host.uevents.waiting.append((True, "a"))
    import os

    os.write(host.uevents.writing, b"x")
    assert select.select([modules], [], [], 5)[0]
    os.read(host.uevents.reading, 1)
    host.add("a", 1)
    modules.read()
    assert not select.select([modules], [], [], 0)[0]
    os.write(host.reader._writing, b"x")
    assert select.select([modules], [], [], 5)[0]
    modules.close()
    modules.close()


def test_the_kernel_can_be_listened_to_without_any_right() -> None:
    try:
        events = Uevents()
    except SourceError as error:
        pytest.skip(f"no uevents here: {error}")
    found, lost = events.read()
    events.close()
    # Some may just have come; they are of modules, and whole.
    assert not lost
    assert all(name and "/" not in name for _, name in found)
    assert events.fileno() == -1


@pytest.mark.parametrize("step", ["listen_to_modules", "_make_room"])
def test_uevents_that_cannot_be_had_leave_nothing_open(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: socket.socket) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(modules, step, fail)
    before = fds()
    with pytest.raises(SourceError, match="cannot be listened to"):
        Uevents()
    assert fds() == before


def test_modules_that_cannot_be_followed_leave_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Uevents:
        raise SourceError("the kernel is deaf", "")

    monkeypatch.setattr(modules_source, "Uevents", fail)
    before = fds()
    with pytest.raises(SourceError, match="deaf"):
        modules_source.Modules()
    assert fds() == before


def test_an_event_that_comes_after_the_list_has_told_says_nothing_new(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    settled(host, modules)
    host.remove("a", is_told=False)
    assert [told(one) for one in modules.read()] == ["-a@1"]
    host.add("a", 1)
    host.uevents.waiting.append((False, "a"))
    assert [told(one) for one in settled(host, modules)] == ["+a@1"]
    host.remove("a")
    assert [told(one) for one in settled(host, modules)] == ["-a@1"]
    modules.finish()
    assert modules.notes == []
    modules.close()


def test_code_for_the_init_alone_goes_when_that_is_over(host: Host) -> None:
    modules = host.follow()
    host.reader.with_init.add("slow")
    host.add("slow", 1, "Loading")
    modules.read()
    host.reader.answer()
    core, init = modules.read()
    assert (init.symbol.start, init.symbol.name) == (BASE + 0x18000, "slow")
    assert init.functions.find(0x1F) == (0, 0x20, "init_module")
    assert (core.earliest, core.latest) == (init.earliest, init.latest)
    loading = time.monotonic_ns()
    assert modules.read() == []
    host.add("slow", 1)
    host.announce("slow")
    (over,) = modules.read()
    assert (over.start, over.name) == (init.symbol.start, "slow")
    assert loading < over.earliest < over.latest < time.monotonic_ns()
    host.remove("slow")
    assert [change.start for change in modules.read()] == [core.symbol.start]
    modules.close()


def test_an_init_that_was_over_by_the_time_it_was_told_of(host: Host) -> None:
    modules = host.follow()
    host.reader.with_init.update(("quick", "failed"))
    host.add("quick", 1)
    host.add("failed", 2, "Loading")
    modules.read()
    host.remove("failed", is_told=False)
    modules.read()
    host.reader.answer()
    changes = modules.read()
    assert [told(one) for one in changes] == [
        "+quick@1",
        "+quick@1",
        "-quick@1",
        "+failed@2",
        "+failed@2",
        "-failed@2",
        "-failed@2",
    ]
    load, unload = changes[1:3]
    assert load.symbol.start == unload.start == BASE + 0x18000
    assert load.earliest <= unload.earliest <= load.latest <= unload.latest
    modules.close()


def test_of_what_is_up_at_the_start_init_code_is_not_asked_for(host: Host) -> None:
    host.add("up", 1)
    host.add("coming", 2, "Loading")
    for name in ("up", "coming"):
        (host.sysfs / name / "sections/.init.text").write_text(f"0x{BASE:x}\n")
    modules = host.follow()
    modules.read()
    asked = {name: set(sections) for name, _, _, sections, _ in host.reader.asked[0]}
    assert asked == {"up": {".text"}, "coming": {".text", ".init.text"}}
    modules.close()


def test_what_is_not_about_modules_wakes_nobody() -> None:
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender, receiver:
        modules.listen_to_modules(receiver)
        for event in (
            b"add@/devices/virtual/net/veth1\0ACTION=add\0",
            b"add@/module/a\0ACTION=add\0",
            b"remove@/devices/virtual/net/veth1\0",
            b"remove@/module/a\0",
            b"change@/module/a\0",
            b"add@/mod",
            b"add",
            b"remove@/mo",
            b"bind@/devices/pci0000:00\0",
        ):
            sender.send(event)
        sender.send(b"add@/module/last")
        got = list(iter(lambda: receiver.recv(100), b"add@/module/last"))
    assert got == [b"add@/module/a\0ACTION=add\0", b"remove@/module/a\0", b"add@/mod"]


def test_those_without_an_answer_at_the_end_are_said(host: Host) -> None:
    host.add("slow", 1)
    host.add("coming", 2, state="Loading", has_sysfs=False)
    modules = host.follow()
    assert modules.read() == []
    assert modules.finish(seconds=0) == []
    assert modules.notes == ["modules whose functions are not in the history: slow, coming"]
    modules.close()


def test_after_an_overflow_no_event_is_awaited(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    settled(host, modules)
    host.remove("a", is_told=False)
    assert [told(change) for change in modules.read()] == ["-a@1"]
    # Its event is among those that were lost.
    host.uevents.lost = True
    modules.read()
    host.add("a", 1)
    assert [told(change) for change in settled(host, modules)] == ["+a@1"]
    # Gone and there again between two looks: only the event tells.
    host.uevents.waiting.append((False, "a"))
    assert [told(change) for change in settled(host, modules)] == ["-a@1", "+a@1"]
    modules.close()


def test_a_process_that_was_killed_is_asked_once_more(host: Host) -> None:
    host.add("a", 1)
    modules = host.follow()
    assert modules.read() == []
    host.reader.ready = []
    assert modules.read() == []
    assert len(host.reader.asked) == 2
    host.reader.answer()
    assert [told(change) for change in modules.read()] == ["+a@1"]
    host.add("b", 2)
    modules.read()
    for _ in range(2):
        assert modules.unsettled is not None
        host.reader.ready = []
        assert modules.read() == []
    assert modules.unsettled is None
    assert len(host.reader.asked) == 4
    modules.finish()
    assert modules.notes == ["modules whose functions are not in the history: b"]
    modules.close()
