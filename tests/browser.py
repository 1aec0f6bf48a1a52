"""Debian's Chromium, driven by selenium: pages are opened, used and checked as a reader would."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_FLAGS = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "hide-scrollbars",
    "disable-background-networking", "disable-component-update", "disable-sync", "window-size=1280,900",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Chrome]:
    """Yield a browser without a window; skip the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("no Chromium on this machine: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in _FLAGS:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Chromium leaves a folder in its temporary directory when it ends.
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        service = Service(driver, env=os.environ | {"TMPDIR": folder})
        found = webdriver.Chrome(options=options, service=service)
        found.set_script_timeout(300)
        found.set_page_load_timeout(300)
        try:
            yield found
        finally:
            found.quit()


def resize(browser: Chrome, width: int, height: int = 900, *, dark: bool = False) -> None:
    """Give the page ``width`` x ``height`` px and a colour scheme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def draw_all(browser: Chrome) -> int:
    """Draw every figure of a page at once; return how many have ink on their canvas."""
    script = """const done = arguments[0]; Charts.start().then(() => requestAnimationFrame(() => done(
      [...document.querySelectorAll('.figure canvas')].filter(canvas => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return data.some(value => value); }).length)));"""
    return browser.execute_async_script(script)


def overflow(browser: Chrome) -> int:
    """Return by how many px the page is wider than its window."""
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return browser.execute_script(script)


def vertical_scroll_bars(browser: Chrome) -> int:
    """Return how many figures have a vertical scroll bar."""
    script = """return [...document.querySelectorAll('.figure')].filter(node =>
      /auto|scroll/.test(getComputedStyle(node).overflowY) && node.scrollHeight > node.clientHeight).length"""
    return browser.execute_script(script)


def brightest(browser: Chrome, node: Any, from_right: bool) -> int:
    """Return the brightness, 0 to 255, of the brightest pixel of the first or the last column of ``node``."""
    script = """const [picture, right, done] = arguments, image = new Image();
      image.onload = () => {
        const canvas = document.createElement('canvas'), pen = canvas.getContext('2d');
        Object.assign(canvas, {width: image.width, height: image.height});
        pen.drawImage(image, 0, 0);
        const {data} = pen.getImageData(right ? image.width - 1 : 0, 0, 1, image.height);
        done(Math.max(...data.filter((value, index) => index % 4 === 0)));
      };
      image.src = 'data:image/png;base64,' + picture;"""
    return browser.execute_async_script(script, node.screenshot_as_base64, from_right)


def cut_texts(browser: Chrome) -> list[str]:
    """Draw every visible figure again; return the texts that begin or end outside of its canvas."""
    script = """const plain = CanvasRenderingContext2D.prototype.fillText, cut = [];
      CanvasRenderingContext2D.prototype.fillText = function(text, x, y) {
        const {width} = this.measureText(text), back = {center: 0.5, right: 1, end: 1}[this.textAlign] || 0;
        const ends = [0, 1].map(k => new DOMPoint(x + (k - back) * width, y).matrixTransform(this.getTransform()));
        const inside = p => p.x >= -1 && p.x <= this.canvas.width + 1 && p.y >= -1 && p.y <= this.canvas.height + 1;
        if (!ends.every(inside)) cut.push(text);
        plain.call(this, text, x, y);
      };
      for (const node of document.querySelectorAll('.figure')) node.chart?.draw();
      CanvasRenderingContext2D.prototype.fillText = plain;
      return cut;"""
    return browser.execute_script(script)


def console(browser: Chrome) -> list[str]:
    """Return the errors and warnings of the console."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def findings(browser: Chrome) -> list[Any]:
    """Return what axe-core calls serious or critical; skip the test where it is missing."""
    package = pytest.importorskip("axe_core_python", reason="axe-core is missing: pip install axe-core-python")
    browser.execute_script((Path(package.__file__).parent / "axe.min.js").read_text("utf-8"))
    script = """const done = arguments[0]; axe.run().then(found => done(JSON.stringify(found.violations
      .filter(one => ['serious', 'critical'].includes(one.impact))
      .map(one => [one.id, one.nodes.map(node => node.html.slice(0, 120))]))));"""
    return json.loads(browser.execute_async_script(script))
