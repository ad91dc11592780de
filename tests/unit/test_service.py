"""The service's unit file against the command that it starts."""

from __future__ import annotations

import shlex

from ksym_plugin.cli import record
from ksym_plugin.history import locate
from tests import service


def test_the_command_line_is_one_of_ksym_record():
    words = shlex.split(service.settings()["ExecStart"])
    assert words[0].endswith("/ksym") and words[1] == "record"
    context = record.command.make_context("record", words[2:])
    # What every command finds by itself, at a bounded size.
    assert context.params["output"] == locate.SYSTEM
    assert context.params["max_age"] and context.params["max_size"]
    assert context.params["command"] == ()


def test_the_folder_is_made_and_closed_to_others():
    settings = service.settings()
    assert f"/var/lib/{settings['StateDirectory']}/history.db" == locate.SYSTEM
    assert (settings["StateDirectoryMode"], settings["UMask"]) == ("0700", "0077")
