"""The plugin in bcc's place, over a stand-in for bcc that keeps its tables as bcc does."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest

from ksym_hooks import hookimpl
from ksym_plugin import bcc
from ksym_plugin.plugin import follower
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import Loss
from tests.unit.helpers import BASE, load, unload
from tests.unit.hosts import Scripted, tasks, wait_until
from tests.unit.plugin.test_plugin import TEXT, A, statics


class BPF:
    """As much of bcc as matters: how it asks its table, and spells what that says."""

    _sym_caches: dict = {}  # noqa: RUF012 - as bcc has it

    @staticmethod
    def ksym(address, show_module=False, show_offset=False):
        name, offset, module = BPF._sym_caches[-1].resolve(address, False)
        shown = b"+0x%x" % offset if show_offset and name is not None else b""
        where = b" [%s]" % module if show_module and module is not None else b""
        return (name or b"[unknown]") + shown + where

    @staticmethod
    def ksymname(name):
        return BPF._sym_caches[-1].resolve_name(None, name)


@pytest.fixture
def source(monkeypatch):
    made = Scripted([load(BASE, 64, A, 1)])

    class Sources:
        @hookimpl
        def ksym_sources(self):
            return {"scripted": lambda: made}

    monkeypatch.setenv("KSYM_SOURCE", "scripted")
    monkeypatch.setattr(follower.Kallsyms, "load", statics)
    monkeypatch.setattr(bcc.bcc_loader, "load", lambda: types.SimpleNamespace(BPF=BPF))
    with_sources(monkeypatch, Sources())
    yield made
    bcc.uninstall()


def with_sources(monkeypatch, plugin):
    import ksym_hooks

    original = ksym_hooks.get_plugin_manager

    def get_plugin_manager():
        manager = original()
        manager.register(plugin, "offers")
        return manager

    monkeypatch.setattr(ksym_hooks, "get_plugin_manager", get_plugin_manager)


def test_bcc_s_questions_are_answered_in_bcc_s_terms(source):
    bcc.install()
    assert BPF.ksym(TEXT + 4, True, True) == b"start_kernel+0x4 [kernel]"
    assert BPF.ksym(BASE + 4, True, True) == f"{A}+0x4 [bpf]".encode()
    assert BPF.ksym(BASE + 4) == A.encode()
    assert BPF.ksym(BASE + 0x1000, True, True) == b"[unknown]"
    assert BPF.ksymname(b"start_kernel") == BPF.ksymname("start_kernel") == TEXT
    assert BPF.ksymname(A.encode()) == BASE
    assert BPF.ksymname(b"nothing") == -1


def test_a_program_loaded_later_is_named(source):
    bcc.install()
    later = "bpf_prog_cccccccccccccccc_later"
    source.put(load(BASE + 64, 64, later, time.monotonic_ns()))
    wait_until(lambda: BPF.ksym(BASE + 64) == later.encode())
    assert BPF.ksymname(later.encode()) == BASE + 64


def test_an_address_of_several_programs_names_none_of_them_for_certain(source):
    bcc.install()
    again, other = BASE + 0x1000, "bpf_prog_cccccccccccccccc_other"
    now = time.monotonic_ns()
    source.put(unload(BASE, now, A), load(BASE, 64, other, now + 1))
    source.put(load(again, 64, A, now), unload(again, now + 1, A), load(again, 64, A, now + 2))
    wait_until(lambda: BPF.ksym(again) != b"[unknown]")
    assert BPF.ksym(BASE + 4, True, True) == f"{other}?+0x4 [bpf]".encode()
    # The same program once more has the same name.
    assert BPF.ksym(again) == A.encode()
    assert BPF.ksym(TEXT + 4) == b"start_kernel"


def test_after_a_loss_there_may_have_been_others(source):
    bcc.install()
    assert BPF.ksym(BASE) == A.encode()
    now = time.monotonic_ns()
    source.put(Loss(now, now + 1, "ring full"))
    wait_until(lambda: BPF.ksym(BASE) == f"{A}?".encode())


def test_installing_twice_is_installing_once_and_uninstalling_gives_all_back(source):
    threads = tasks()
    bcc.install()
    table = BPF._sym_caches[-1]
    bcc.install()
    assert BPF._sym_caches[-1] is table
    bcc.uninstall()
    bcc.uninstall()
    assert BPF._sym_caches == {}
    assert source.closed == 1
    wait_until(lambda: tasks() == threads)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread")])
def test_what_keeps_the_plugin_from_starting_is_a_sentence(source, monkeypatch, error):
    def begin():
        raise error

    monkeypatch.setattr("ksym_plugin.plugin.begin", begin)
    with pytest.raises(SourceError, match="cannot follow the kernel"):
        bcc.install()
    assert BPF._sym_caches == {}


def test_without_bcc_nothing_is_started(monkeypatch):
    def missing():
        raise SourceError("bcc is not installed", "install it")

    monkeypatch.setattr(bcc.bcc_loader, "load", missing)
    threads = tasks()
    with pytest.raises(SourceError, match="bcc is not installed; install it"):
        bcc.install()
    assert tasks() == threads


def test_a_tool_is_asked_for():
    done = subprocess.run(
        [sys.executable, "-m", "ksym_plugin.bcc"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "usage: python3 -m ksym_plugin.bcc TOOL [ARGUMENT ...]\n"


def test_a_tool_without_bcc_is_told_so_in_a_sentence(monkeypatch):
    def missing():
        raise SourceError("bcc is not installed", "install it")

    monkeypatch.setattr(bcc.bcc_loader, "load", missing)
    monkeypatch.setattr(sys, "argv", ["ksym_plugin.bcc", "tool"])
    with pytest.raises(SystemExit, match=r"^ksym: bcc is not installed; install it$"):
        bcc.main()
