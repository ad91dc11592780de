"""``--vmlinux`` in the handler: names and lines of the kernel, against nm and addr2line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ksym_plugin.cli import inputs, script
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity, kallsyms
from ksym_plugin.kernel.clocks import MONOTONIC
from ksym_plugin.kernel.elf import ElfError
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf import data
from ksym_plugin.perf.data import Recorded
from ksym_plugin.perf.handler import Handler, Options, parse
from ksym_plugin.timeline.errors import KsymError
from tests.unit.cli.test_cli import ksym
from tests.unit.kernel.test_dwarf import KASLR, linked, output, stand_in
from tests.unit.kernel.test_dwarf import TEXT as LINKED
from tests.unit.perf_events import SECOND, VMLINUX, event, node
from tests.unit.test_import_light import REPO

HIDDEN = b"0000000000000000 T _text\n"


class Kernel:
    """A kernel of two C files, which ran ``KASLR`` above where it was linked."""

    def __init__(self, folder: Path) -> None:
        self.path = str(linked(folder, "gcc", "-g"))
        rows = [line.split() for line in output("nm", "-S", self.path) if " T " in line]
        self.functions = {row[-1]: int(row[0], 16) for row in rows if len(row) == 4}
        note = output("readelf", "-n", self.path)
        self.build_id = next(line.split()[-1] for line in note if "Build ID" in line)

    def at(self, name: str, offset: int) -> int:
        return self.functions[name] + offset + KASLR

    def line(self, address: int) -> str:
        (told,) = output("addr2line", "-e", self.path, hex(address - KASLR))
        return os.path.basename(told.partition(" (")[0])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def elsewhere(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is another kernel, whose addresses are hidden; the data is of ``kernel``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KSYM_HISTORY", raising=False)
    monkeypatch.delenv("DEBUGINFOD_URLS", raising=False)
    monkeypatch.setattr("ksym_plugin.history.locate.SYSTEM", str(tmp_path / "none.db"))
    monkeypatch.setattr(Kallsyms, "load", classmethod(lambda _: Kallsyms.parse(HIDDEN)))
    monkeypatch.setattr(kallsyms, "text_start", lambda: None)
    told(monkeypatch, build_id=kernel.build_id, text_start=LINKED + KASLR)


def told(monkeypatch: pytest.MonkeyPatch, **known: object) -> None:
    """What the perf.data says of its kernel."""
    recorded = Recorded()
    for name, value in known.items():
        setattr(recorded, name, value)
    monkeypatch.setattr(data, "read", lambda _: recorded)


def options(path: str, form: str = "text", lines: bool = True) -> Options:
    chosen = Options(None, MONOTONIC, form)
    chosen.vmlinux, chosen.lines = path, lines
    return chosen


def fed(chosen: Options, *events: dict) -> None:
    handler = Handler(chosen, None)
    for one in events:
        handler.process_event(one)
    handler.trace_end()


def frames(out: str) -> list[tuple[str, str]]:
    """The symbol of each frame and what stands below it."""
    found: list[tuple[str, str]] = []
    for line in out.splitlines():
        if line.startswith("\t"):
            found.append((line.split()[1], ""))
        elif line.startswith("  "):
            found[-1] = (found[-1][0], line[2:])
    return found


def test_frames_that_nobody_named(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(kernel.functions))
    leaf, caller = kernel.at(name, 8), kernel.at(name, 12)
    fed(options(kernel.path), *[event(node(leaf), node(caller), time=SECOND)] * 3)
    out, err = capsys.readouterr()
    assert (
        frames(out)
        == [
            (f"{name}+0x8", kernel.line(leaf)),
            (f"{name}+0xc", kernel.line(caller - 1)),
        ]
        * 3
    )
    assert "6 newly named" in err


def test_perf_s_names_stand_and_get_lines(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(iter(kernel.functions))
    addresses = [kernel.at(name, offset) for offset in range(24)]
    samples = [
        event(*(node(address, name, address - kernel.at(name, 0), VMLINUX) for address in pair))
        for pair in zip(addresses, addresses[1:])
    ]
    fed(options(kernel.path), *samples, *samples)
    found = frames(capsys.readouterr().out)
    for at, (leaf, caller) in enumerate(zip(found[::2], found[1::2])):
        address = addresses[at % 23]
        assert leaf == (f"{name}+{address - addresses[0]:#x}", kernel.line(address))
        # That of the byte before the one it returns to.
        assert caller[1] == kernel.line(address)


def test_at_a_function_s_first_byte_no_other_s_line_is_told(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [
        event(*(node(kernel.at(name, at), name, at, VMLINUX) for at in (1, 0)))
        for name in kernel.functions
    ]
    fed(options(kernel.path), *samples)
    found = frames(capsys.readouterr().out)[1::2]
    assert [line for _, line in found] == [kernel.line(kernel.at(n, 0)) for n in kernel.functions]


def test_of_inlined_functions_the_innermost_has_the_line(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(iter(kernel.functions))
    there, other = kernel.at(name, 8), kernel.at(name, 12)
    chain = [node(there, inlined, 8, VMLINUX) for inlined in ("inner", "outer")]
    chain += [node(other, inlined, 12, VMLINUX) for inlined in ("inner", "outer")] * 2
    fed(options(kernel.path), *[event(*chain)] * 3)
    at_leaf, at_call = kernel.line(there), kernel.line(other - 1)
    assert [line for _, line in frames(capsys.readouterr().out)] == [
        *(at_leaf, "", at_call, "", at_call, "")
    ] * 3


def test_names_alone(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(kernel.functions))
    fed(options(kernel.path, "folded", False), event(node(kernel.at(name, 8))))
    assert capsys.readouterr().out == f"demo;{name}_[k] 1\n"


def test_pictures_have_lines_of_the_kernel(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.unit.perf.test_handler_lines import notes_of

    name = next(iter(kernel.functions))
    fed(options(kernel.path, "svg"), event(node(kernel.at(name, 8), name, 8, VMLINUX)))
    assert notes_of(capsys.readouterr().out) == {
        name: [f"{kernel.line(kernel.at(name, 8))}  100 %"]
    }


def test_the_history_tells_where_the_kernel_was(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(identity, "build_id", lambda: kernel.build_id)
        HistoryWriter("ksym.db", "test", 0, LINKED + KASLR).close(9 * SECOND)
    told(monkeypatch, build_id=kernel.build_id)
    name = next(iter(kernel.functions))
    fed(options(kernel.path), event(node(kernel.at(name, 8))))
    assert frames(capsys.readouterr().out)[0][0] == f"{name}+0x8"


def test_another_kernel_s_file_is_refused(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, build_id="99" * 20, text_start=LINKED)
    with pytest.raises(KsymError, match="of another kernel"):
        Handler(options(kernel.path), None)


def test_without_an_offset_nothing_is_guessed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, build_id=kernel.build_id)
    with pytest.raises(KsymError, match="is not known"):
        Handler(options(kernel.path), None)


@pytest.mark.parametrize(
    ("program", "said"),
    [("", "need addr2line; install binutils"), ("exit 0", "gives no answer about")],
)
def test_an_addr2line_that_fails_costs_no_names(
    kernel: Kernel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    said: str,
) -> None:
    if program:
        stand_in(tmp_path, program)
    monkeypatch.setenv("PATH", str(tmp_path))
    name = next(iter(kernel.functions))
    fed(options(kernel.path), *[event(node(kernel.at(name, at))) for at in (4, 8)])
    out, err = capsys.readouterr()
    assert frames(out) == [(f"{name}+0x4", ""), (f"{name}+0x8", "")]
    assert err.count("no more source lines of the kernel: ") == 1
    assert said in err


# pyelftools, which perf's Python does not have


def test_without_pyelftools_it_is_said_and_the_rest_goes_on(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    fed(options(kernel.path), event(node(kernel.at(next(iter(kernel.functions)), 8))))
    out, err = capsys.readouterr()
    assert "[unknown]" in out
    assert "run ksym script, or install it for this Python (Debian: python3-pyelftools)" in err


# ksym script


def test_the_handler_takes_what_script_hands_it() -> None:
    chosen = parse(["--lines", "--vmlinux", "x"])
    assert (chosen.lines, chosen.vmlinux, chosen.wants_lines) == (True, "x", True)
    assert not parse([]).wants_lines
    assert parse(["--format", "svg"]).wants_lines


def test_script_refuses_another_kernel_s_file_before_perf_starts(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, build_id="99" * 20, text_start=LINKED)
    monkeypatch.setattr(script, "Child", lambda *_: pytest.fail("perf was started"))
    done = ksym("script", "-i", "perf.data", "--vmlinux", kernel.path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "is of another kernel" in done.stderr and done.stderr.count("\n") == 1


def test_a_file_is_taken_where_the_data_does_not_tell_its_kernel(kernel: Kernel) -> None:
    assert inputs.vmlinux_for_data(kernel.path, True, Recorded()) == kernel.path
    with pytest.raises(ElfError, match="cannot be read"):
        inputs.vmlinux_for_data("nowhere", False, Recorded())


def test_servers_are_asked_for_lines_and_may_fail(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def find(build_id: str) -> str:
        asked.append(build_id)
        if len(asked) > 1:
            raise ElfError("nobody has it", "name it")
        return kernel.path

    monkeypatch.setattr(inputs.vmlinux, "download", find)
    assert inputs.vmlinux_for_data(None, True, data.read(None)) is None
    monkeypatch.setenv("DEBUGINFOD_URLS", "http://debug.invalid")
    assert inputs.vmlinux_for_data(None, False, data.read(None)) is None
    assert asked == []
    assert inputs.vmlinux_for_data(None, True, data.read(None)) == kernel.path
    assert inputs.vmlinux_for_data(None, True, data.read(None)) is None
    assert asked == [kernel.build_id] * 2
    assert "only BPF frames get source lines: nobody has it" in capsys.readouterr().err
    told(monkeypatch)
    assert inputs.vmlinux_for_data(None, True, data.read(None)) is None
    assert len(asked) == 2


def test_text_of_perf_script_gets_no_lines(tmp_path: Path) -> None:
    handler = os.path.join(REPO, "contrib", "perf-script", "ksym_handler.py")
    done = subprocess.run(
        [sys.executable, handler, "--lines"],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "ksym script --lines" in done.stderr
