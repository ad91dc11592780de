"""What a history tells of a boot, and of the sessions of recording in it."""

from __future__ import annotations


class Boot:
    """One boot of one host, as the recorder saw it."""

    __slots__ = ("boot_id", "build_id", "host", "release", "row", "text_start")

    def __init__(
        self,
        row: int,
        boot_id: str,
        host: str,
        release: str,
        build_id: str | None,
        text_start: int | None,
    ) -> None:
        self.row = row
        self.boot_id = boot_id
        self.host = host
        self.release = release
        self.build_id = build_id
        self.text_start = text_start


class Session:
    """One run of a recorder: it covers ``started`` to ``covered`` (CLOCK_MONOTONIC ns).

    ``closed`` says that it ended in order; ``writing`` that its recorder is at work now.
    Neither means that it was killed after ``covered``. ``modules`` says that it kept
    modules as well.
    """

    __slots__ = ("closed", "covered", "modules", "source", "started", "writing")

    def __init__(
        self,
        source: str,
        started: int,
        covered: int,
        closed: bool,
        writing: bool,
        modules: bool,
    ) -> None:
        self.modules = modules
        self.source = source
        self.started = started
        self.covered = covered
        self.closed = closed
        self.writing = writing

    @property
    def killed(self) -> bool:
        return not self.closed and not self.writing
