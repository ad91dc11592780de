"""``ksym record --ring``, on a source that has a ring and on one that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ksym_plugin.cli import cli, record
from ksym_plugin.sources import Source


class Asked(Source):
    """Opened by ``open_source``'s stand-in; says that it has a ring if it is one of those."""

    name = "made up"
    interval = 0.01

    def __init__(self, has_ring: bool) -> None:
        super().__init__()
        self.has_ring = has_ring
        self.asked: list[int | None] = []

    def read(self) -> list:
        return []

    def snapshot(self) -> list:
        return []

    def stats(self) -> dict[str, int]:
        return {"ring_bytes": 4096} if self.has_ring else {}


@pytest.mark.parametrize("has_ring", [True, False])
@pytest.mark.parametrize(("words", "size"), [((), None), (("--ring", "64K"), 65536)])
def test_the_size_reaches_the_source_or_the_user_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_ring: bool,
    words: tuple[str, ...],
    size: int | None,
) -> None:
    source = Asked(has_ring)

    def open_source(name: str, ring_bytes: int | None) -> tuple[Source, list]:
        source.asked.append(ring_bytes)
        return source, []

    monkeypatch.setattr(record, "open_source", open_source)
    history = str(tmp_path / "x.db")
    result = CliRunner().invoke(cli, ["record", "-o", history, "--for", "0.01", *words])
    assert result.exit_code == 0, result.output
    assert source.asked == [size]
    said = "made up has no ring to be sized: --ring changes nothing" in result.output
    assert said == (bool(words) and not has_ring)
