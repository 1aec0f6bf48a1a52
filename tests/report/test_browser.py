"""Pages in a real browser: figures are drawn, nothing overflows, a keyboard and a screen reader reach everything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from foretrain.experiments import Comparison
from foretrain.live.simulate import Simulated
from foretrain.network.deployment_notation import topology
from foretrain.recipe_search import SearchResult
from foretrain.recipe_search.bill import Failures, bill_of
from foretrain.report import recipes
from foretrain.report.findings import SimulationFindings
from foretrain.report.lab import render as lab_page
from foretrain.report.page import render as comparison_page
from foretrain.report.simulation_page import render as simulation_page
from foretrain.report.topology import render as topology_page
from tests import warm
from tests.browser import (
    brightest,
    chromium,
    console,
    cut_texts,
    draw_all,
    findings,
    overflow,
    resize,
    vertical_scroll_bars,
)
from tests.lab.test_compare import measured
from tests.live import forked
from tests.recipe_search.test_strategy import searched

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.process
SIZES = ((390, 844), (1280, 900), (3840, 2160))


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as found:
        yield found


FIGURES = {
    "compare": 4,
    "what-if": 1,
    "grid": 1,
    "sweep": 2,
    "simulate": 7,
    "search": 2,
    "collective": 1,
    "tolerance": 2,
    "topology": 1,
    "lab": 3,
}
"""Kinds of page, and how many figures each has."""
HERE = ("--cluster", "4x1xV100@7Gbps")
_TOLERANCE = ("--small", "lossy", "--seeds", "2", "--rounds", "8", "--evaluations", "2", "--grid", "0", "2%", "1")
COMMANDS = {
    "what-if": ("what-if", "alexnet", *HERE, "--changes", "rate=14Gbps", "batch=64"),
    "grid": ("grid", "alexnet", "star:4@1Gbps", "torus:2x2@1Gbps", "--schedules", "ddp", "fifo"),
    "sweep": ("sweep", "sweep.toml", "--jobs", "1"),
    "collective": ("collective", "bigraph:4x2@100Gbps"),
    "tolerance": ("tolerance", "build.py:build", *_TOLERANCE),
}
"""Kinds of page that a command writes here in a moment."""
MADE_BY = {
    "compare": "foretrain compare alexnet",
    "simulate": "foretrain simulate -- 'my script.py'",
    "search": "foretrain search --space space.toml -- train.py",
    "topology": "foretrain topology show torus:3x3@1Gbps",
    "lab": "foretrain lab compare alexnet",
    **{name: shlex.join(["foretrain", *words, "--html", f"{name}.html"]) for name, words in COMMANDS.items()},
}
"""Command of each kind of page."""
BUILD = """
import torch

class Made:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.batches = [torch.randn(8, 2)]

    def loss(self, model, batch):
        return model(batch).square().mean()

    def evaluate(self, model):
        return -self.loss(model, self.batches[0])

def build(seed):
    return Made(seed)
"""
BILL = bill_of("H100", 16, 2.5, Failures(3600.0, 0.0, 300.0, rate=1e9))
SWEEP = """
workloads = ["alexnet"]
schedules = ["ddp", "fifo"]
[[clusters]]
notation = "{hosts}x1xV100@{rate}"
axes = { hosts = [2, 4], rate = ["1Gbps", "10Gbps"] }
"""


@pytest.fixture(scope="module")
def pages(comparison: Comparison, done: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "build.py").write_text(BUILD)
    (folder / "sweep.toml").write_text(SWEEP)
    texts = {
        "compare": comparison_page(comparison, MADE_BY["compare"]),
        "simulate": simulation_page(SimulationFindings(done, tokens=9000), MADE_BY["simulate"]),
        "topology": topology_page(topology("torus:3x3@1Gbps"), command=MADE_BY["topology"]),
        "lab": lab_page(measured(), MADE_BY["lab"]),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    result = SearchResult(searched(folder)[0], "dgx-h100:2", 16, bill=BILL)
    recipes.page(result, folder / "search.html", MADE_BY["search"])
    for name, command in COMMANDS.items():
        ended = warm.run(forked.foretrain, [*command, "--html", f"{name}.html"], folder)
        assert ended.returncode == 0, ended.stderr
    return {name: folder / f"{name}.html" for name in FIGURES}


def test_every_command_that_writes_a_page_is_here():
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text("utf-8")
    listed = re.findall(r"`([a-z -]+)`", page.split("writes one page:")[1].split(".")[0])
    assert sorted(listed) == sorted(
        {"topology": "topology show", "lab": "lab compare"}.get(one, one) for one in FIGURES
    )


def test_no_page_is_larger_than_800_kb(pages, tmp_path):
    assert {name: path.stat().st_size for name, path in pages.items() if path.stat().st_size > 800_000} == {}
    # Of a large search the page lists the best.
    found = searched(tmp_path, exhaustive=True)[0]
    many = found.candidates * 100
    out = tuple(replace(one, status="invalid", reason="the script says no, " * 10) for one in many)
    result = SearchResult(replace(found, candidates=(*many, *out)), "dgx-h100:2", 16, bill=BILL)
    recipes.page(result, tmp_path / "large.html")
    text = (tmp_path / "large.html").read_text("utf-8")
    assert len(text.encode()) < 800_000
    assert f"And {len(many) - 400:,} more, which <code>--json</code> writes, too." in text


@pytest.mark.parametrize(("name", "figures"), FIGURES.items())
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_width_shows_every_figure_without_overflow(browser, pages, name: str, figures: int, dark: bool):
    for width, height in SIZES:
        resize(browser, width, height, dark=dark)
        browser.get(pages[name].as_uri())
        assert draw_all(browser) == len(browser.find_elements("class name", "figure")) == figures
        assert overflow(browser) == 0, width
        assert vertical_scroll_bars(browser) == 0, width
        assert cut_texts(browser) == [], width
    assert console(browser) == []


def test_a_table_that_is_cut_has_a_shadow_at_the_edge_where_it_goes_on(browser, pages):
    resize(browser, 390, 844)
    browser.get(pages["simulate"].as_uri())
    table = browser.find_elements("class name", "scroll")[-1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", table)
    for scrolled, left, right in ((0, False, True), (20, True, True), (9999, True, False)):
        browser.execute_script("arguments[0].scrollLeft = arguments[1]", table, scrolled)
        assert (brightest(browser, table, False) < 250, brightest(browser, table, True) < 250) == (left, right)


def test_a_wide_window_is_filled_to_four_fifths(browser, pages):
    resize(browser, 3840, 2160)
    browser.get(pages["simulate"].as_uri())
    assert browser.find_element("tag name", "main").size["width"] >= 0.8 * 3840


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", FIGURES)
def test_axe_has_no_serious_findings(browser, pages, name: str, dark: bool):
    resize(browser, 1280, dark=dark)
    browser.get(pages[name].as_uri())
    draw_all(browser)
    assert findings(browser) == []


def test_a_keyboard_walks_through_the_marks_and_zooms(browser, pages):
    from selenium.webdriver.common.keys import Keys

    resize(browser, 1280)
    browser.get(pages["compare"].as_uri())
    draw_all(browser)
    bars = browser.find_element("id", "bars")
    bars.send_keys(Keys.ARROW_RIGHT)
    said = bars.find_element("class name", "said")
    first = said.get_attribute("textContent")
    assert "computation" in first
    bars.send_keys(Keys.ARROW_RIGHT)
    assert said.get_attribute("textContent") != first
    view = "const {x} = document.getElementById('lanes').chart.panels[0]; return x.view[1] - x.view[0]"
    whole = browser.execute_script(view)
    lanes = browser.find_element("id", "lanes")
    lanes.send_keys("+")
    assert browser.execute_script(view) == pytest.approx(whole / 1.5)
    lanes.send_keys("0")
    assert browser.execute_script(view) == whole


def test_a_drag_zooms_a_double_click_shows_everything_and_chips_choose_schedules(browser, pages):
    from selenium.webdriver import ActionChains

    resize(browser, 1280)
    browser.get(pages["compare"].as_uri())
    draw_all(browser)
    canvas = browser.find_element("css selector", "#lanes canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    view = "const {x} = document.getElementById('lanes').chart.panels[0]; return x.view"
    whole = browser.execute_script(view)
    ActionChains(browser).move_to_element(canvas).click_and_hold().move_by_offset(150, 0).release().perform()
    low, high = browser.execute_script(view)
    assert whole[0] < low < high < whole[1]
    ActionChains(browser).double_click(canvas).perform()
    assert browser.execute_script(view) == whole
    rows = "return document.getElementById('lanes').chart.figure.layout.yaxis[1].ticktext.length"
    before = browser.execute_script(rows)
    browser.find_element("css selector", "#chips button[aria-pressed=true]").click()
    assert browser.execute_script(rows) < before


@pytest.mark.parametrize("name", FIGURES)
def test_a_click_copies_the_command_that_made_the_page(browser, pages, name: str):
    browser.get(pages[name].as_uri())
    browser.execute_script(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { window.copied = text; }}})"
    )
    browser.find_element("css selector", "header [data-copy]").click()
    assert browser.execute_script("return window.copied") == MADE_BY[name]
    assert browser.find_element("css selector", "header .command code").text == MADE_BY[name]
