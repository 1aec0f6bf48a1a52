"""The explorer in a real browser, as a reader uses it: by pointer, by keyboard, on a telephone, in the dark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import foretrain as ft
from foretrain.explore import Explorer, Opened, Question, opened
from foretrain.recipe_search import SearchResult
from foretrain.report import recipes
from foretrain.report.findings import SimulationFindings, numbers
from foretrain.report.kineto import write_trace
from foretrain.units import format_time
from foretrain.workload import save, zoo
from tests.browser import chromium, console, cut_texts, findings, overflow, resize
from tests.recipe_search.test_strategy import searched
from tests.report.conftest import simulated

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.process
FIRST = Question(model="alexnet", batch=16)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def explorer() -> Iterator[Explorer]:
    with Explorer(Opened(), FIRST) as found:
        yield found


@pytest.fixture
def page(browser, explorer) -> Chrome:
    resize(browser, 1280)
    browser.get(explorer.url)
    shown(browser, "rate=7.0")
    return browser


@contextmanager
def explored(browser, source: Opened, first: Question) -> Iterator[None]:
    """Open an explorer's page, and leave it before the explorer ends, so that no question is left without answer."""
    with Explorer(source, first) as found:
        browser.get(found.url)
        try:
            yield
        finally:
            browser.get("about:blank")


def wait(browser, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 180, 0.1).until(lambda driver: driver.execute_script(f"return {script}"))


def shown(browser, part: str, kind: str = "shown") -> None:
    """Wait until the page shows an answer to a question whose URL has ``part``."""
    wait(browser, f"(document.body.dataset.{kind} || '').includes({part!r})")


def enter(browser, name: str, value: str) -> None:
    """Set a control as a hand does."""
    browser.execute_script(
        "const one = document.querySelector(`[name=${arguments[0]}]`); one.value = arguments[1];"
        "one.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )


def table(browser) -> str:
    return browser.find_element("id", "rows").text


def times(rate: str, schedules: Sequence[str] = ("ddp", "prophet")) -> list[str]:
    """Return the times of `ft.simulate`, as the page writes them."""
    workload = ft.workload.zoo("alexnet", batch=16)
    runs = [ft.simulate(workload, f"4x1xV100@{rate}Gbps", name, trace=False) for name in schedules]
    return [format_time(run.iteration_time) for run in runs]


def shown_times(browser) -> list[str]:
    """Return the times of the table, DDP's first, which is sorted by them."""
    script = """return [...document.querySelectorAll("#rows tr")].map(
      row => [row.cells[0].innerText, row.cells[1].innerText])"""
    return [time for _, time in sorted(browser.execute_script(script))]


def hold_tuned_answers(browser) -> None:
    """Hold tuned answers back until the page's ``tune()`` is called, so that the untuned one can be read."""
    shown(browser, "rate=7.0", "tuned")
    browser.execute_script(
        "const plain = window.get, may = new Promise(tell => { window.tune = tell; });"
        "window.get = async (path, signal) => {"
        "  if (path.startsWith('/tuned')) await may; return plain(path, signal); };"
    )


def test_a_faster_link_shows_the_times_of_simulate(page):
    hold_tuned_answers(page)
    enter(page, "rate", "14")
    shown(page, "rate=14")
    assert shown_times(page) == times("14")
    page.execute_script("window.tune()")
    shown(page, "rate=14", "tuned")
    assert shown_times(page) == times("14", page.execute_script("return answer.schedules"))
    assert "Tuned" in page.find_element("id", "state").text
    assert console(page) == []


def test_the_url_restores_the_page(page, explorer):
    enter(page, "rate", "25")
    enter(page, "schedule", "p3")
    shown(page, "rate=25")
    shown(page, "schedule=p3")
    address = page.current_url
    page.get("about:blank")
    page.get(address)
    shown(page, "schedule=p3")
    assert page.find_element("id", "rate").get_attribute("value") == "25"
    assert "p3" in table(page)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_telephone_shows_it_without_overflow(page, dark: bool):
    resize(page, 390, 844, dark=dark)
    wait(page, "document.getElementById('bars').chart.width < 390")
    assert overflow(page) == 0
    colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(11, 18, 32)") == dark
    assert findings(page) == []
    assert console(page) == []


@pytest.mark.parametrize("tab", ["schedule", "curves", "network"])
def test_a_telephone_shows_every_text_of_a_figure_whole(page, tab: str):
    resize(page, 390, 844)
    page.find_element("id", f"tab-{tab}").click()
    if tab != "schedule":
        shown(page, "rate=7.0", tab)
    wait(page, f"[...document.querySelectorAll('#panel-{tab} canvas')].every(one => one.clientWidth < 390)")
    assert cut_texts(page) == []
    assert overflow(page) == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("tab", ["schedule", "curves", "network"])
def test_axe_has_no_serious_findings_in_any_tab(page, tab: str, dark: bool):
    resize(page, 1280, dark=dark)
    page.find_element("id", f"tab-{tab}").click()
    if tab != "schedule":
        shown(page, "rate=7.0", tab)
    assert findings(page) == []


@pytest.mark.parametrize("kind", ["simulation", "search"])
def test_axe_has_no_serious_findings_in_a_tab_of_a_result(browser, tmp_path, kind: str):
    path = tmp_path / "result.json"
    if kind == "search":
        found = recipes.numbers(SearchResult(searched(tmp_path / "search")[0], "dgx-h100:2", 16))
    else:
        found = numbers(SimulationFindings(simulated()))
    path.write_text(json.dumps(found))
    resize(browser, 1280)
    with explored(browser, opened(str(path))[0], FIRST):
        shown(browser, "rate=7.0")
        assert browser.find_element("id", f"panel-{kind}").is_displayed()
        assert findings(browser) == []


def test_a_tuned_answer_has_the_tuned_command_page_and_trace(page):
    command = page.find_element("id", "command")
    shown(page, "rate=7.0", "tuned")
    assert command.text == 'foretrain compare alexnet --cluster 4x1xV100@7Gbps --batch 16 --schedules ddp "prophet"'
    page.execute_script(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { window.copied = text; }}})"
    )
    page.find_element("id", "copy-command").click()
    wait(page, "window.copied")
    assert page.execute_script("return window.copied") == command.text
    fetched = "const done = arguments[1]; made(arguments[0]).then(found => found.text()).then(done)"
    saved, trace = (page.execute_async_script(fetched, what) for what in ("page", "trace"))
    assert "--no-tune" not in saved
    (tuned,) = [one for one in page.execute_script("return answer.schedules") if one.startswith("prophet")]
    assert f"{tuned}: " in trace
    assert console(page) == []


def test_a_button_that_is_pressed_twice_has_its_own_words_again(page):
    page.execute_script(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async () => {}}});"
        "window.later = []; window.setTimeout = action => window.later.push(action);"
    )
    button = page.find_element("id", "copy-command")
    for presses in (1, 2):
        button.click()
        wait(page, f"window.later.length === {presses}")
        assert button.text == "copied"
    page.execute_script("for (const action of window.later) action()")
    assert button.text == "copy command"


def test_a_new_answer_leaves_the_focus_in_the_legend(page):
    script = "const one = document.querySelector('#lanes .legend button'); one.focus(); return one.textContent"
    name = page.execute_script(script)
    enter(page, "rate", "9")
    shown(page, "rate=9")
    shown(page, "rate=9", "tuned")
    assert page.switch_to.active_element.text == name == "backward"


def test_the_page_asks_one_question_at_a_time_and_then_the_newest(page):
    """What a drag along the slider passes does not keep the server from where it ends."""
    shown(page, "rate=7.0", "tuned")
    page.execute_script(
        "const plain = window.get, may = new Promise(tell => { window.release = tell; });"
        "window.rates = [];"
        "window.get = async (path, signal) => {"
        "  if (path.startsWith('/answer')) {"
        "    window.rates.push(new URLSearchParams(path.split('?')[1]).get('rate')); await may; }"
        "  return plain(path, signal); };"
    )
    enter(page, "rate", "8")
    wait(page, "window.rates.length")
    for rate in ("9", "10", "11"):
        enter(page, "rate", rate)
    assert page.execute_script("return window.rates") == ["8"]
    page.execute_script("window.release()")
    shown(page, "rate=11")
    assert page.execute_script("return window.rates") == ["8", "11"]


def test_a_keyboard_alone_reaches_and_uses_everything(page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    def tab_to(wanted: str) -> None:
        """Press Tab until the control of that name or id has the focus."""
        for _ in range(40):
            press(Keys.TAB)
            script = "const here = document.activeElement; return here.name || here.id || here.className"
            reached.append(page.execute_script(script))
            if reached[-1] == wanted:
                return
        raise AssertionError(f"{wanted} is not among {reached}")

    reached: list[str] = []
    for name in ("model", "gpu", "slider"):
        tab_to(name)
    press(Keys.ARROW_RIGHT)
    rate = page.find_element("id", "rate").get_attribute("value")
    assert float(rate) > 7
    shown(page, f"rate={rate}")
    tab_to("hosts")
    press(Keys.ARROW_UP)
    shown(page, "hosts=5")
    tab_to("schedule")
    press("p3")
    shown(page, "schedule=p3")
    for name in ("compression", "copy-command", "copy-python", "save", "link", "perfetto", "tab-schedule"):
        tab_to(name)
    press(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("id") == "tab-curves"
    shown(page, f"rate={rate}", "curves")
    assert page.find_element("id", "panel-curves").is_displayed()
    assert page.current_url.endswith("#curves")
    for key, name in ((Keys.END, "network"), (Keys.ARROW_RIGHT, "schedule"), (Keys.ARROW_LEFT, "network")):
        press(key)
        assert page.switch_to.active_element.get_attribute("id") == f"tab-{name}"
    for key, name in ((Keys.HOME, "schedule"), (Keys.ARROW_RIGHT, "curves")):
        press(key)
        assert page.switch_to.active_element.get_attribute("id") == f"tab-{name}"
    tab_to("rates-figure")
    press(Keys.ARROW_RIGHT)
    assert page.execute_script("return document.querySelector('#rates-figure .said').textContent") != ""
    assert console(page) == []


def test_controls_without_effect_on_a_recorded_workload_say_so(browser, tmp_path):
    path = tmp_path / "recorded.toml"
    save(zoo("alexnet", batch=16), path)
    source, model = opened(str(path))
    with explored(browser, source, Question(model=model)):
        shown(browser, "model=file")
        for name in ("gpu", "batch"):
            one = browser.find_element("name", name)
            assert not one.is_enabled()
            assert "recorded" in one.get_attribute("title")
        enter(browser, "model", "alexnet")
        shown(browser, "model=alexnet")
        assert browser.find_element("name", "gpu").is_enabled()
        assert browser.find_element("name", "batch").get_attribute("title") == ""


def test_the_network_shows_its_loads(page):
    page.find_element("id", "tab-network").click()
    shown(page, "fabric=star", "network")
    text = page.find_element("id", "network-text")
    assert "100% used" in text.text
    enter_fabric = "const one = document.getElementById('fabric'); one.value = 'torus';"
    page.execute_script(enter_fabric + "one.dispatchEvent(new Event('change', {bubbles: true}))")
    shown(page, "fabric=torus", "network")
    assert "torus" in text.text
    assert page.current_url.endswith("#network")
    drawn = "const c = document.querySelector('#fabric-figure canvas'); return c.getContext('2d')"
    assert page.execute_script(drawn + ".getImageData(0, 0, c.width, c.height).data.some(value => value)")
    enter(page, "hosts", "7")
    shown(page, "hosts=7")
    wait(page, "document.getElementById('network-text').textContent.includes('rectangle')")
    assert console(page) == []


def test_each_tab_has_a_status_of_its_own(page):
    """A tab that was shown before keeps its text while another is computed, and an error stands where it arose."""
    tabs = {name: page.find_element("id", f"tab-{name}") for name in ("network", "curves")}
    texts = {name: page.find_element("id", f"{name}-text") for name in tabs}
    tabs["network"].click()
    shown(page, "fabric=star", "network")
    loads = texts["network"].text
    tabs["curves"].click()
    shown(page, "rate=7.0", "curves")
    tabs["network"].click()
    assert texts["network"].text == loads
    page.execute_script(
        "const plain = window.get; window.get = (path, signal) =>"
        " path.startsWith('/curves') ? Promise.reject(new Error('no curves today')) : plain(path, signal);"
    )
    tabs["curves"].click()
    enter(page, "rate", "9")
    wait(page, "document.getElementById('curves-text').textContent === 'no curves today'")
    assert "no curves" not in texts["network"].get_attribute("textContent")


FAKE_PERFETTO = """window.got = [];
      window.open = place => { const frame = document.createElement('iframe'); document.body.append(frame);
        const there = frame.contentWindow;
        there.postMessage = message => { if (message === 'PING') window.dispatchEvent(
            new MessageEvent('message', {data: 'PONG', source: there}));
          else window.got.push([place, message.perfetto.title, new TextDecoder().decode(message.perfetto.buffer)]); };
        return there; };"""
"""Perfetto's side of handing a trace over, without the network."""


def test_perfetto_gets_the_trace_in_one_click(page):
    page.execute_script(FAKE_PERFETTO)
    page.find_element("id", "perfetto").click()
    wait(page, "window.got.length")
    ((place, title, text),) = page.execute_script("return window.got")
    assert place == "https://ui.perfetto.dev"
    assert "alexnet" in title
    processes = {event["args"]["name"] for event in json.loads(text)["traceEvents"] if event["name"] == "process_name"}
    assert {re.match(r"\w+", name)[0] for name in processes} == {"ddp", "prophet"}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_finished_simulation_opens_its_trace_in_perfetto(browser, tmp_path, name: str):
    done, path = simulated(), tmp_path / "result.json"
    traces = [str(one) for one in write_trace(done.trace, tmp_path / name)]
    path.write_text(json.dumps(numbers(SimulationFindings(done)) | {"traces": traces}))
    with explored(browser, opened(str(path))[0], FIRST):
        shown(browser, "rate=7.0")
        browser.execute_script(FAKE_PERFETTO)
        browser.find_element("id", "perfetto-simulation").click()
        wait(browser, "window.got.length")
        ((_, title, text),) = browser.execute_script("return window.got")
        assert "an iteration on dgx-h100:1" in title
        assert any(event.get("name") == "aten::mm" for event in json.loads(text)["traceEvents"])
        assert console(browser) == []


def test_a_finished_simulation_shows_memory_over_time(browser, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(numbers(SimulationFindings(simulated()))))
    with explored(browser, opened(str(path))[0], FIRST):
        shown(browser, "rate=7.0")
        panel = browser.find_element("id", "panel-simulation")
        assert panel.is_displayed()
        assert not browser.find_element("id", "scenario").is_displayed()
        assert "memory over the last step" in panel.text
        button = browser.find_element("id", "perfetto-simulation")
        assert not button.is_enabled()
        assert "--trace" in button.get_attribute("title")
        inked = """return [...document.querySelectorAll('#panel-simulation canvas')].map(c =>
          c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(value => value))"""
        assert browser.execute_script(inked) == [True] * 4
        assert console(browser) == []


def test_a_wrong_value_is_explained_and_the_next_one_answered(page):
    shown(page, "rate=7.0", "tuned")
    assert not outdated(page)
    enter(page, "hosts", "9999")
    wait(page, "!document.getElementById('error').hidden")
    error, state = (page.find_element("id", name) for name in ("error", "state"))
    assert error.text == "hosts: '9999' is not a whole number from 1 to 4,096; enter e.g. 8"
    assert outdated(page)
    assert state.text == "What is shown is of the scenario before."
    assert findings(page) == []
    enter(page, "hosts", "8")
    shown(page, "hosts=8")
    assert not error.is_displayed()
    assert not outdated(page)
    enter(page, "gpus", "65")
    wait(page, "!document.getElementById('error').hidden")
    assert error.text.startswith("GPUs a host: '65' is not")
    assert console(page) == []


def outdated(browser) -> bool:
    """Return whether the answer is marked as of an earlier question; fail if parts of the page do not agree."""
    busy = "return [...document.querySelectorAll('.of-answer')].map(one => one.getAttribute('aria-busy') === 'true')"
    disabled = [
        not browser.find_element("id", name).is_enabled()
        for name in ("copy-command", "copy-python", "save", "perfetto")
    ]
    (found,) = {*browser.execute_script(busy), *disabled}
    return found


def test_an_answer_that_is_waited_for_leaves_the_one_before_dimmed(page):
    shown(page, "rate=7.0", "tuned")
    page.execute_script(
        "const plain = window.get, may = new Promise(tell => { window.release = tell; });"
        "window.get = async (path, signal) => {"
        "  if (path.startsWith('/answer')) await may; return plain(path, signal); };"
    )
    enter(page, "rate", "8")
    wait(page, "document.getElementById('save').disabled")
    assert outdated(page)
    assert page.find_element("id", "state").text == "Being simulated; what is shown is of the scenario before."
    page.execute_script("window.release()")
    shown(page, "rate=8")
    assert not outdated(page)


def test_a_tab_that_is_waited_for_is_dimmed_alone(page):
    page.find_element("id", "tab-curves").click()
    shown(page, "rate=7.0", "curves")
    page.execute_script(
        "const plain = window.get, may = new Promise(tell => { window.release = tell; });"
        "window.get = async (path, signal) => {"
        "  if (path.startsWith('/curves')) await may; return plain(path, signal); };"
    )
    enter(page, "rate", "8")
    shown(page, "rate=8")
    wait(page, "document.getElementById('panel-curves').getAttribute('aria-busy') === 'true'")
    assert not outdated(page)
    page.execute_script("window.release()")
    shown(page, "rate=8", "curves")
    assert page.find_element("id", "panel-curves").get_attribute("aria-busy") is None
