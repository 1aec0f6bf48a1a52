"""Pages in a real browser: figures are drawn, nothing overflows, a keyboard and a screen reader reach everything."""

from __future__ import annotations

from collections.abc import Iterator
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
from foretrain.report.page import render as comparison_page
from foretrain.report.simulation_page import render as simulation_page
from foretrain.report.topology import render as topology_page
from tests.browser import chromium, console, cut_texts, draw_all, findings, overflow, resize
from tests.recipe_search.test_strategy import searched

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.process
SIZES = ((390, 844), (1280, 900), (3840, 2160))


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(comparison: Comparison, done: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "compare": comparison_page(comparison, "foretrain compare alexnet"),
        "simulate": simulation_page(SimulationFindings(done, tokens=9000)),
        "topology": topology_page(topology("torus:3x3@1Gbps")),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    bill = bill_of("H100", 16, 2.5, Failures(3600.0, 0.0, 300.0, rate=1e9))
    recipes.page(SearchResult(searched(folder)[0], "dgx-h100:2", 16, bill=bill), folder / "search.html")
    return {name: folder / f"{name}.html" for name in (*texts, "search")}


@pytest.mark.parametrize(("name", "figures"), [("compare", 4), ("simulate", 7), ("topology", 1), ("search", 2)])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_width_shows_every_figure_without_overflow(browser, pages, name: str, figures: int, dark: bool):
    for width, height in SIZES:
        resize(browser, width, height, dark=dark)
        browser.get(pages[name].as_uri())
        assert draw_all(browser) == figures
        assert overflow(browser) == 0, width
        assert cut_texts(browser) == [], width
    assert console(browser) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["compare", "simulate", "topology", "search"])
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


def test_the_command_is_there_to_copy(browser, pages):
    browser.get(pages["compare"].as_uri())
    button = browser.find_element("css selector", "[data-copy]")
    assert button.get_attribute("data-copy") == "foretrain compare alexnet"
