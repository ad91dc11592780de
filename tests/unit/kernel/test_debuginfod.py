"""debuginfod is asked only when wanted; what it gives is kept, whole or not at all."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from ksym_plugin.kernel import vmlinux
from ksym_plugin.kernel.elf import ElfError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD = "ab12"


class Handler(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == f"/buildid/{BUILD}/debuginfo":
            self.send_response(200)
            self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"\x7fELF it")
        elif "cut" in self.path or self.path.startswith("/buildid/cc"):
            self.send_response(200)
            self.send_header("Content-Length", "70")
            self.end_headers()
            self.wfile.write(b"half")
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What it is asked for."""
    Handler.asked = []
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        url = f"http://127.0.0.1:{running.server_port}"
        monkeypatch.setenv(vmlinux.SERVERS, f"file:///etc {url}/")
        yield Handler.asked
        running.shutdown()
        thread.join()


def test_it_is_fetched_once(server: list[str]) -> None:
    assert vmlinux.has_servers()
    path = vmlinux.download(BUILD)
    assert Path(path).read_bytes() == b"\x7fELF it"
    assert vmlinux.download(BUILD) == path
    assert server == [f"/buildid/{BUILD}/debuginfo"]


@pytest.mark.parametrize("build", ["dd", "cc"])
def test_what_nobody_has_or_is_cut_leaves_nothing(build: str, server: list[str]) -> None:
    # Twice: nothing half may be there the second time.
    for _ in range(2):
        with pytest.raises(ElfError, match="no debuginfod server") as caught:
            vmlinux.download(build)
        assert "no http or https" in str(caught.value)
    assert len(server) == 2


def test_an_interrupted_download_leaves_nothing(
    server: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vmlinux.download(BUILD)
    assert server
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_malformed_address_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(vmlinux.SERVERS, "http://[::1")
    with pytest.raises(ElfError, match="no debuginfod server"):
        vmlinux.download(BUILD)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_where_nothing_can_be_kept_it_is_said(server: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ElfError, match="cannot be kept"):
        vmlinux.download(BUILD)
    assert server == []


@pytest.mark.parametrize("build", ["", "../../etc/passwd"])
def test_what_is_no_build_id_is_not_asked_for(build: str, server: list[str]) -> None:
    with pytest.raises(ElfError, match="no build id"):
        vmlinux.download(build)
    assert server == []


def test_nobody_is_asked_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vmlinux.SERVERS, raising=False)
    assert not vmlinux.has_servers()
