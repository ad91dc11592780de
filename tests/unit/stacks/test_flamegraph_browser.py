"""The picture in a browser: a user's clicks and keys, and what becomes of hostile names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ksym_plugin.stacks import folded
from ksym_plugin.stacks.flamegraph import draw
from tests.unit import chromium
from tests.unit.conftest import WIDTH
from tests.unit.stacks.test_flamegraph import HOSTILE

PROGRAM = "bpf_prog_0123456789abcdef_count"
STACKS = {
    f"sh;main;vfs_read_[k];{PROGRAM}_[b]": 40,
    "sh;main;vfs_read_[k]": 20,
    "sh;main;vfs_write_[k];vfs_read_[k]": 10,
    "py;Main": 30,
}
NOTE = "program 7, loaded by agent (pid 12), 3.2 s"
DEEP = {";".join(f"f{depth}" for depth in range(100)): 5, "short": 5}
#: What a frame of that name is like; null where it is not shown.
_LOOK = """(name => {
  const data = JSON.parse(document.querySelector("metadata").textContent);
  const at = data.names.indexOf(name);
  const i = [...Array(data.boxes.length / 5).keys()].find(i => data.boxes[5 * i + 4] === at);
  const rect = document.querySelectorAll(".frames rect")[i];
  if (rect.getAttribute("display") === "none") return null;
  const box = rect.getBoundingClientRect();
  return {x: box.x, y: box.y, width: box.width, height: box.height,
          fill: getComputedStyle(rect).fill, classes: [...rect.classList]};
})"""


class Page:
    """A flame graph in the browser."""

    def __init__(self, browser: chromium.Chromium, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self.browser = browser
        browser.errors.clear()
        browser.requests.clear()
        browser.open(path.as_uri())

    def look(self, name: str) -> dict | None:
        return self.browser.ask(f"{_LOOK}({json.dumps(name)})")

    def width(self, name: str) -> float | None:
        found = self.look(name)
        return found and found["width"]

    def over(self, name: str) -> tuple[float, float]:
        found = self.look(name)
        assert found is not None
        return found["x"] + found["width"] / 2, found["y"] + found["height"] / 2

    def text(self, selector: str) -> str:
        return self.browser.ask(f"document.querySelector({json.dumps(selector)}).textContent")

    def search(self, pattern: str) -> str:
        self.browser.press("f", ctrl=True)
        self.browser.type(pattern)
        return self.text(".found")


def drawn(
    counts: dict[str, float], title: str = "Test", notes: dict[str, list[str]] | None = None
) -> str:
    """The picture of folded stacks; ``notes`` by the folded text of their frames."""
    stacks = folded.stacks_of(counts)
    numbered = {
        stacks.table.number(folded.frame_of(text)): lines for text, lines in (notes or {}).items()
    }
    return "".join(draw(stacks, title, notes=numbered))


@pytest.fixture
def page(browser: chromium.Chromium, tmp_path: Path) -> Page:
    text = drawn(STACKS, "Test", {f"{PROGRAM}_[b]": [NOTE]})
    return Page(browser, tmp_path / "flame.svg", text)


def test_it_loads_without_errors_and_without_anything_else(page: Page, tmp_path: Path) -> None:
    assert page.browser.errors == []
    assert page.browser.requests == [(tmp_path / "flame.svg").as_uri()]


#: Sums of these differ in their last digit by the order of adding.
DECIMALS = (
    (6.19, 8.96, 8.42, 1.01, 3.82, 6.96, 3.03, 5.73, 5.80, 0.67, 1.11, 5.06),
    (3.79, 2.66, 7.62, 4.05, 4.81, 5.01, 3.12, 5.79, 8.11, 0.74, 5.09, 2.45),
)


@pytest.mark.parametrize("weights", DECIMALS)
def test_counts_with_decimals(
    browser: chromium.Chromium, tmp_path: Path, weights: tuple[float, ...]
) -> None:
    counts = {f"{'amz'[number % 3]};b{number}": weight for number, weight in enumerate(weights)}
    page = Page(browser, tmp_path / "flame.svg", drawn(counts))
    assert page.search("^[amz]$") == "100.00 % matched"
    browser.press("Escape")
    for first, parent in enumerate("amz"):
        browser.click(*page.over(parent))
        assert all(page.width(f"b{number}") for number in range(first, len(weights), 3))
        browser.press("Escape")


def test_it_is_as_wide_as_the_window(page: Page) -> None:
    assert page.width("all") == pytest.approx(WIDTH - 24, abs=1)
    assert page.width("sh") == pytest.approx((WIDTH - 24) * 0.7, abs=1)


def test_classes_differ_in_colour(page: Page) -> None:
    looks = [page.look(name) for name in (PROGRAM, "vfs_write", "main")]
    assert len({look["fill"] for look in looks if look}) == 3


def test_a_click_zooms_and_the_button_goes_back(page: Page) -> None:
    assert page.width(PROGRAM) == pytest.approx((WIDTH - 24) * 0.4, abs=1)
    page.browser.click(*page.over(PROGRAM))
    assert page.width(PROGRAM) == pytest.approx(WIDTH - 24, abs=1)
    assert page.width("sh") == pytest.approx(WIDTH - 24, abs=1)
    assert "past" in page.look("main")["classes"]
    assert page.look("py") is None
    assert page.look("vfs_write") is None
    reset = page.browser.ask(
        "(({x, y}) => [x + 5, y + 5])(document.querySelector('.reset').getBoundingClientRect())"
    )
    page.browser.click(*reset)
    assert page.width(PROGRAM) == pytest.approx((WIDTH - 24) * 0.4, abs=1)
    assert page.look("py") is not None
    assert page.browser.ask("document.querySelector('.reset').hidden")


def test_escape_leaves_the_zoom(page: Page) -> None:
    page.browser.click(*page.over("py"))
    assert page.look("sh") is None
    page.browser.press("Escape")
    assert page.look("sh") is not None


@pytest.mark.parametrize("pattern", ["vfs_", "^vfs_read$", "main", "Main", "count|py", "nothing"])
def test_search_says_how_much_matched(page: Page, pattern: str) -> None:
    flags = re.IGNORECASE if pattern == pattern.lower() else 0
    names = {stack: re.sub(r"_\[.\]", "", stack).split(";") for stack in STACKS}
    matched = sum(
        count
        for stack, count in STACKS.items()
        if any(re.search(pattern, name, flags) for name in names[stack])
    )
    assert page.search(pattern) == f"{matched:.2f} % matched"


def test_what_is_not_drawn_cannot_be_searched(browser: chromium.Chromium, tmp_path: Path) -> None:
    counts = {"a;big": 99_999, "a;tiny": 1}
    page = Page(browser, tmp_path / "tiny.svg", drawn(counts))
    assert page.search("tiny") == "at least 0.00 % matched"


def test_search_marks_what_matched_and_escape_clears_it(page: Page) -> None:
    page.search("count")
    assert "hit" in page.look(PROGRAM)["classes"]
    assert "hit" not in page.look("main")["classes"]
    assert page.browser.ask("document.documentElement.classList.contains('searching')")
    page.browser.press("Escape")
    assert page.text(".found") == ""
    assert "hit" not in page.look(PROGRAM)["classes"]


def test_a_pattern_that_is_none_is_marked(page: Page) -> None:
    assert page.search("(") == ""
    assert page.browser.ask("document.querySelector('input').classList.contains('bad')")
    assert page.browser.errors == []


def test_the_tooltip_tells_of_the_program(page: Page) -> None:
    page.browser.move(*page.over(PROGRAM))
    assert page.text(".tip b") == PROGRAM
    assert page.text(".tip").endswith(f"BPF · 40 samples, 40.00 % · own 40, 40.00 %\n{NOTE}")
    page.browser.move(5, 5)
    assert page.browser.ask("document.querySelector('.over').getAttribute('display')") == "none"


def test_what_is_too_tall_shows_its_base_first(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = Page(browser, tmp_path / "deep.svg", drawn(DEEP))
    assert 0 < page.look("all")["y"] < 800
    assert page.browser.ask("document.querySelector('input').getBoundingClientRect().y") >= 0


def test_hostile_names_do_nothing(browser: chromium.Chromium, tmp_path: Path) -> None:
    counts = {f"{name};leaf": 10 for name in HOSTILE}
    notes = {name: [name] for name in HOSTILE}
    text = drawn(counts, HOSTILE[0], notes)
    page = Page(browser, tmp_path / "hostile.svg", text)
    for name in (HOSTILE[0], HOSTILE[1], HOSTILE[2], "__proto__"):
        page.browser.move(*page.over(name))
        assert page.text(".tip b") == name
        page.search(re.escape(name))
        page.browser.press("Escape")
    assert page.browser.ask("typeof window.pwned") == "undefined"
    assert page.browser.errors == []
    assert page.browser.requests == [(tmp_path / "hostile.svg").as_uri()]


def test_labels_stay_within_their_frames(browser: chromium.Chromium, tmp_path: Path) -> None:
    counts = {f"{'wide 名前 ' * 30}{number};{'m' * 80}": 1 + number for number in range(12)}
    page = Page(browser, tmp_path / "labels.svg", drawn(counts))
    over = page.browser.ask("""(() => {
      const rects = [...document.querySelectorAll(".frames rect")];
      return [...document.querySelectorAll(".labels text")].filter(text => {
        const t = text.getBoundingClientRect(), y = t.y + t.height / 2;
        return !rects.some(rect => {
          const r = rect.getBoundingClientRect();
          return r.x <= t.x && t.right <= r.right + 1 && r.y <= y && y <= r.bottom;
        });
      }).map(text => text.textContent);
    })()""")
    assert over == []
    assert page.browser.ask("document.querySelectorAll('.labels text').length") > 10


def test_a_tooltip_has_room_beside_a_low_picture(page: Page) -> None:
    page.browser.move(*page.over(PROGRAM))
    inside = page.browser.ask("""(() => {
      const tip = document.querySelector(".tip").getBoundingClientRect();
      const all = document.documentElement.getBoundingClientRect();
      return tip.height > 30 && tip.bottom <= all.bottom && tip.right <= all.right;
    })()""")
    assert inside
