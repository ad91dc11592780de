"""Starting the kprobe and fentry sources: what they say, and what they leave behind."""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import textwrap

import pytest

from ksym_plugin import sources
from ksym_plugin.kernel import privileges, syscalls, worker
from ksym_plugin.kernel.bpf_prog import ProgramInfo, ProgramReader
from ksym_plugin.sources import bcc_loader, probe
from ksym_plugin.sources.probe import FentrySource, KprobeSource
from ksym_plugin.timeline.errors import SourceError
from tests.unit.sources import workers

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")

STAND_IN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "stand_in")
BOTH = pytest.mark.parametrize("construct", [KprobeSource, FentrySource])


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))


def fail(number):
    raise OSError(number, os.strerror(number))


def jited(length):
    info = ProgramInfo(1, 1, "00" * 8, "", 0, 0, False)
    info.jited_length = length
    return info


class NoRings:
    """In place of the rings."""

    size = 4096

    def __init__(self, *_):
        pass

    def take(self):
        return []

    def follow_cpus(self):
        pass

    def close(self):
        pass


class StandIn:
    """Tells the bcc that stands in what to do, and what it was asked for."""

    def __init__(self, path):
        self._path = path
        self.tell()

    def tell(self, **told):
        self._path.write_text(json.dumps(told))

    @property
    def made(self):
        """The compiler flags of each module that was made."""
        log = self._path.with_name(self._path.name + ".log")
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def bcc(monkeypatch, tmp_path):
    path = tmp_path / "stand-in"
    monkeypatch.setenv("KSYM_STAND_IN", str(path))
    monkeypatch.setattr(sys, "path", [STAND_IN, *sys.path])
    return StandIn(path)


@pytest.fixture
def kernel(monkeypatch, tmp_path, bcc):
    """One in which all of it works, so far as a source can tell."""
    pmu = tmp_path / "type"
    pmu.write_text("7\n")
    monkeypatch.setattr(probe, "PMU", str(pmu))
    monkeypatch.setattr(probe, "KERNEL_BTF", str(pmu))
    monkeypatch.setattr(privileges, "require_probes", lambda: None)
    monkeypatch.setattr(syscalls, "bpf", lambda command, attr: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(
        syscalls, "perf_event_open", lambda *_: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    )
    monkeypatch.setattr(probe.fcntl, "ioctl", lambda *_: None)
    monkeypatch.setattr(probe, "counts_of", lambda *_: [])
    monkeypatch.setattr(ProgramReader, "info", lambda self, fd: jited(0))
    monkeypatch.setattr(probe, "self_test", lambda: 0)
    monkeypatch.setattr(probe, "open_rings", NoRings)
    return monkeypatch


@BOTH
def test_closing_gives_everything_back_and_may_be_repeated(kernel, construct, bcc, capfd):
    before = open_fds()
    source = construct()
    held = [int(fd) for fd in open_fds() if fd not in before and os.path.exists(f"/dev/fd/{fd}")]
    assert len(held) > 4 and not any(os.get_inheritable(fd) for fd in held)
    assert source.read() == []
    source.close()
    source.close()
    assert open_fds() == before
    assert len(bcc.made) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["kprobe", "fentry"])
@pytest.mark.parametrize(
    ("size", "pages"), [(None, 1024), (4097, 2), (5 * 4096, 8), (1 << 20, 256)]
)
def test_the_size_of_the_ring_is_passed_on(kernel, bcc, name, size, pages):
    kernel.setattr(mmap, "PAGESIZE", 4096)
    source, _ = sources.open_source(name, size)
    source.close()
    assert f"-DKSYM_RING_PAGES={pages}" in bcc.made[0]


@BOTH
@pytest.mark.parametrize(
    ("target", "name", "error"),
    [
        (probe, "Ticker", OSError(errno.EMFILE, "Too many open files")),
        (probe, "open_rings", OSError(errno.ENOMEM, "Cannot allocate memory")),
        (probe, "counts_of", SourceError("no counters")),
        (probe, "self_test", SourceError("blind")),
        (probe, "possible_count", KeyboardInterrupt()),
    ],
)
def test_a_start_that_fails_leaves_nothing_open(kernel, construct, bcc, target, name, error, capfd):
    def refuse(*_):
        raise error

    kernel.setattr(target, name, refuse)
    before = open_fds()
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else SourceError):
        construct()
    assert open_fds() == before
    assert len(bcc.made) == 1
    assert capfd.readouterr() == ("", "")


def test_kprobes_that_take_no_program_are_closed(kernel):
    kernel.setattr(probe.fcntl, "ioctl", lambda *_: fail(errno.EEXIST))
    before = open_fds()
    with pytest.raises(SourceError, match="take no program"):
        KprobeSource()
    assert open_fds() == before


@BOTH
@pytest.mark.parametrize("stage", ["fails", "load_fails"])
def test_what_the_compiler_says_is_in_the_error_and_not_on_the_terminal(
    kernel, construct, bcc, capfd, stage
):
    said = "note: x\nmain.c:3:9: error: no member\x1b[31m named\n1 error\n"
    bcc.tell(said=said, **{stage: "Failed to compile BPF module <text>"})
    before = open_fds()
    with pytest.raises(SourceError, match="bcc cannot load the probe") as caught:
        construct()
    assert "main.c:3:9: error" in caught.value.problem or stage == "load_fails"
    assert "\x1b" not in caught.value.problem
    assert open_fds() == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("said", "raised", "words"),
    [
        ("Unable to find kernel headers. Try", "Failed to compile", "linux-headers-"),
        ("", "Need super-user privileges to run", "CAP_BPF and CAP_PERFMON"),
        ("", "could not open bpf map: events, error: Cannot allocate memory", "smaller"),
        ("", "Failed to load BPF program b'x': Invalid argument", "Invalid argument"),
    ],
)
def test_each_refusal_of_bcc_s_has_its_sentence(kernel, bcc, said, raised, words):
    bcc.tell(said=said, fails=raised)
    with pytest.raises(SourceError, match=words):
        KprobeSource()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOENT, "no bpf_ksym_add"),
        (errno.EACCES, "CAP_SYS_ADMIN"),
        (errno.EPERM, "lockdown"),
        (errno.EINVAL, "blacklist"),
    ],
)
def test_kprobes_refused_are_told_before_anything_is_compiled(kernel, bcc, number, words):
    kernel.setattr(syscalls, "perf_event_open", lambda *_: fail(number))
    with pytest.raises(SourceError, match=words):
        KprobeSource()
    assert bcc.made == []


@BOTH
def test_without_privilege_nothing_is_compiled(kernel, construct, bcc):
    def refuse():
        raise SourceError("not for this user")

    kernel.setattr(privileges, "require_probes", refuse)
    with pytest.raises(SourceError, match="not for this user"):
        construct()
    assert bcc.made == []


def test_fentry_says_what_it_lacks(kernel, bcc):
    kernel.setattr(syscalls, "bpf", lambda command, attr: fail(errno.EPERM))
    with pytest.raises(SourceError, match="does not let BPF programs trace"):
        FentrySource()
    kernel.setattr(probe, "KERNEL_BTF", "/nowhere")
    with pytest.raises(SourceError, match="no BTF"):
        FentrySource()
    assert bcc.made == []


def test_a_kernel_without_kprobes_is_told(kernel):
    kernel.setattr(probe, "PMU", "/nowhere")
    with pytest.raises(SourceError, match="CONFIG_KPROBE_EVENTS"):
        KprobeSource()


def test_the_ring_is_as_large_as_asked_for(kernel, bcc):
    for size, pages in ((1, 1), (8 * 4096, 8), (9 * 4096, 16), (4 << 20, 1024)):
        KprobeSource(ring_bytes=size * probe.mmap.PAGESIZE // 4096).close()
        assert f"-DKSYM_RING_PAGES={pages}" in bcc.made[-1]
    KprobeSource(ring=False).close()
    assert not [flag for flag in bcc.made[-1] if "RING" in flag]


def test_a_compiler_that_dies_is_told(kernel, bcc):
    bcc.tell(dies=True)
    before = open_fds()
    with pytest.raises(SourceError, match="its process died"):
        KprobeSource()
    assert open_fds() == before


@BOTH
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_compiler_that_cannot_be_started_is_told(kernel, construct, bcc, number):
    kernel.setattr(worker, "_start", lambda *_: fail(number))
    before = open_fds()
    with pytest.raises(SourceError, match=os.strerror(number)) as caught:
        construct()
    assert "ulimit" in caught.value.remedy
    assert open_fds() == before


def test_a_user_without_bcc_is_told_by_the_child(kernel, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != STAND_IN])
    monkeypatch.setattr(bcc_loader, "compile_and_load", workers.without_the_system_s_bcc)
    if any(os.path.exists(os.path.join(path, "bcc", "libbcc.py")) for path in sys.path):
        pytest.skip("bcc is installed for this Python")
    with pytest.raises(SourceError, match="bcc is not installed"):
        KprobeSource()


# Finding bcc.

REAL = """
    kind = "iovisor's"
    from .libbcc import lib
"""


def package(folder, real=True, body=REAL):
    """A package called bcc; ``real`` has what iovisor's has."""
    where = folder / "bcc"
    where.mkdir(parents=True)
    (where / "__init__.py").write_text(textwrap.dedent(body) if real else "raise SystemExit\n")
    if real:
        (where / "libbcc.py").write_text("lib = '\\d'\n")
    return str(folder)


@pytest.fixture
def paths(monkeypatch):
    """Sets where to look: in this Python's path, and in the system's."""
    for name in [name for name in sys.modules if f"{name}.".startswith("ksym_plugin._system_bcc.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(bcc_loader, "_PRIVATE_NAME", "ksym_plugin._system_bcc")

    def use(own, system):
        monkeypatch.setattr(sys, "path", own)
        monkeypatch.setattr(bcc_loader, "_SYSTEM", tuple(system))

    yield use
    for name in [name for name in sys.modules if "_system_bcc" in name or name.startswith("bcc")]:
        sys.modules.pop(name, None)


def test_the_system_s_bcc_is_used_from_an_environment_without_it(paths, tmp_path):
    system = package(tmp_path / "dist-packages")
    paths([], [str(tmp_path / "dist*")])
    found = bcc_loader.load()
    assert found.kind == "iovisor's"
    assert "bcc" not in sys.modules
    assert not os.path.exists(os.path.join(system, "bcc", "__pycache__"))
    assert bcc_loader.load() is found


def test_pypi_s_namesake_is_passed_over_and_not_even_run(paths, tmp_path):
    own = package(tmp_path / "site-packages", real=False)
    paths([own], [package(tmp_path / "dist-packages")])
    assert bcc_loader.load().kind == "iovisor's"


def test_pypi_s_namesake_alone_is_named(paths, tmp_path):
    own = package(tmp_path / "site-packages", real=False)
    paths([own], [])
    with pytest.raises(SourceError) as caught:
        bcc_loader.load()
    assert own in caught.value.problem and "PyPI's" in caught.value.problem
    assert "apt install python3-bpfcc" in caught.value.remedy
    assert "pip uninstall bcc" in caught.value.remedy


def test_no_bcc_at_all_says_how_to_get_it(paths):
    paths([], [])
    with pytest.raises(SourceError, match=r"bcc is not installed.*apt install python3-bpfcc"):
        bcc_loader.load()


@pytest.mark.parametrize(
    "body", ["raise OSError('libbcc.so.0: cannot open')", "import no_such_module_at_all"]
)
def test_a_broken_bcc_says_so_and_is_not_kept(paths, tmp_path, body):
    paths([], [package(tmp_path / "dist-packages", body=body)])
    for _ in range(2):
        with pytest.raises(SourceError, match="cannot be imported"):
            bcc_loader.load()
    assert not [name for name in sys.modules if "_system_bcc" in name]


def test_the_c_source_is_found_in_a_checkout():
    assert "bpf_probe_read_kernel_str" in bcc_loader.source_text()


def test_has_ring_closes_what_it_made(monkeypatch):
    before = open_fds()
    monkeypatch.setattr(syscalls, "bpf", lambda command, attr: os.open(os.devnull, os.O_RDONLY))
    assert probe.has_ring()
    monkeypatch.setattr(syscalls, "bpf", lambda command, attr: fail(errno.EINVAL))
    assert not probe.has_ring()
    assert open_fds() == before


def test_the_self_test_believes_only_what_it_sees(monkeypatch):
    class Told:
        def __init__(self, kind, length):
            self.kind, self.length, self.name = kind, length, "bpf_prog_0_ksym_self_test"

    monkeypatch.setattr(ProgramReader, "info", lambda self, fd: jited(25))
    monkeypatch.setattr(syscalls, "bpf", lambda command, attr: os.open(os.devnull, os.O_RDONLY))
    before = open_fds()
    assert probe.self_test() == 25
    assert open_fds() == before
    for added, exact in ((25, True), (4096, False)):
        assert probe.ends_are_exact(25, [Told(0, added), Told(1, added)]) is exact
    for kind in (0, 1):
        with pytest.raises(SourceError, match="inlined"):
            probe.ends_are_exact(25, [Told(kind, 25)])
    assert probe.ends_are_exact(0, [])


def test_descriptors_that_did_not_fit_are_a_limit_and_not_a_program(monkeypatch):
    before = open_fds()
    monkeypatch.setattr(bcc_loader, "_compiled", lambda _: [os.open("/dev/null", os.O_RDONLY)])
    with pytest.raises(SourceError, match=f"{os.strerror(errno.EMFILE)}.*ulimit"):
        bcc_loader.BccProgram([], ("ksym_add", "ksym_del"), ("streams", "events"))
    assert open_fds() == before
