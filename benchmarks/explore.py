"""The explorer in Chromium: from a change of the link's rate to its first paint, and how large the page is.

Beside it, in the same interleaved run, stands what the change costs without a page: the two simulations alone. The
ratio says what the page adds. `--pictures FOLDER` makes the screenshots of the documentation instead, of reports, too:
one of them is of a real run in the lab, which needs root, a machine that does nothing else, and five minutes. `--only`
names those that are wanted.

    python benchmarks/explore.py --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.request import urlopen

import pytest
from measure import interleaved, machine, options, spread

sys.path.insert(0, str(Path(__file__).parents[1]))

import foretrain as ft
from foretrain.cli import main as foretrain
from foretrain.explore import Explorer, Opened, Question
from tests.browser import chromium, resize

PICTURES = ("explore", "explore-curves", "simulate", "lab", "search")
_CHANGE = """const done = arguments[arguments.length - 1], field = document.querySelector('[name=rate]');
delete document.body.dataset.ms; field.value = arguments[0]; field.dispatchEvent(new Event('input', {bubbles: true}));
const look = () => document.body.dataset.ms ? done(+document.body.dataset.ms) : requestAnimationFrame(look); look();"""


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="make the documentation's screenshots there")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES, help="make these alone")


def main() -> None:
    asked = options(__doc__ or "", _more)
    with Explorer(Opened(), Question()) as explorer, chromium() as browser:
        resize(browser, 1280)
        browser.get(explorer.url)
        _settled(browser, "tuned")
        if asked.pictures:
            pictures(browser, explorer, asked.pictures, asked.only)
            report_pictures(browser, asked.pictures, asked.only)
            return
        measured(browser, explorer, asked)


def measured(browser: Any, explorer: Explorer, asked: argparse.Namespace) -> None:
    rates, painted = _rates(), list[float]()
    workload = ft.workload.zoo("resnet50")

    def change() -> None:
        painted.append(browser.execute_async_script(_CHANGE, next(rates)))

    def alone() -> None:
        for name in ("ddp", "prophet"):
            ft.simulate(workload, f"4x1xV100@{next(rates)}Gbps", name)

    samples, warmup = (15 if asked.quick else 60), 3
    times = interleaved({"change": change, "simulations": alone}, samples, warmup)
    changes = painted[warmup:]
    base, ratio = median(times["simulations"]) * 1e3, median(changes) / (median(times["simulations"]) * 1e3)
    size = sum(len(_body(explorer, path)) for path in ("/", "/chart.js", "/explore.js", "/style.css", "/choices"))
    size += len(_body(explorer, "/answer?" + Question().query()))
    p95 = quantiles(changes, n=20)[-1]
    print(f"change to first paint, ms: {spread(changes)}; two simulations alone {base:.3g} ms, ratio {ratio:.2f}")
    numbers = {"change_ms_median": median(changes), "change_ms_p95": p95, "page_kb": size / 1e3}
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "changes_ms": changes, "ratio": ratio} | numbers))
    print("RESULT name=explore " + " ".join(f"{name}={value:.1f}" for name, value in numbers.items()))


def pictures(browser: Any, explorer: Explorer, folder: Path, only: Sequence[str]) -> None:
    """Write those of explore.png and explore-curves.png that are in ``only`` to ``folder``."""
    base = explorer.url.partition("?")[0]
    for name, question, tab, height, dark in (
        ("explore", Question(), "schedule", 1570, False),
        ("explore-curves", Question(), "curves", 1360, True),
    ):
        if name not in only:
            continue
        resize(browser, 1200, height, dark=dark)
        browser.get("about:blank")
        browser.get(f"{base}?{question.query()}#{tab}")
        _settled(browser, "tuned")
        if tab != "schedule":
            _settled(browser, tab)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        browser.save_screenshot(str(folder / f"{name}.png"))


def report_pictures(browser: Any, folder: Path, only: Sequence[str]) -> None:
    """Write those of simulate.png, lab.png and search.png in ``only`` to ``folder``: a figure of a report each."""
    root = Path(__file__).parents[1]
    flags = "--tp {tp} --batch {batch} --sequence {sequence} --layers 16 --steps 4"
    resize(browser, 900)
    with tempfile.TemporaryDirectory() as made:
        for name, words, figure in (
            ("simulate", f"simulate --cluster dgx-h100:2 -- {root}/examples/simulate/gpt_fsdp2.py", "timeline"),
            ("lab", "lab compare resnet50 --schedules prophet --iterations 9", "lanes"),
            (
                "search",
                f"search --cluster dgx-h100:2 --space {root}/examples/search/space.toml --store {made}/store "
                f"-- {root}/examples/simulate/tensor_parallel.py {flags}",
                "steps",
            ),
        ):
            if name not in only:
                continue
            command, dashes, script = words.partition(" -- ")
            foretrain([*command.split(), "--html", f"{made}/{name}.html", *dashes.split(), *script.split()])
            browser.get(f"file://{made}/{name}.html")
            shown = browser.find_element("id", figure)
            browser.execute_script("arguments[0].scrollIntoView()", shown)
            while not browser.execute_script("return arguments[0].querySelector('svg, canvas')", shown):
                time.sleep(0.1)
            shown.screenshot(str(folder / f"{name}.png"))


def _rates() -> Iterator[float]:
    return cycle(round(2 * 1.17**power, 3) for power in range(23))


def _body(explorer: Explorer, path: str) -> bytes:
    with urlopen(explorer.url.partition("/?")[0] + path) as found:
        return found.read()


def _settled(browser: Any, kind: str) -> None:
    late = time.monotonic() + 300
    while not browser.execute_script(f"return document.body.dataset.{kind}"):
        if time.monotonic() > late:
            raise SystemExit(f"the page shows no {kind} after 300 s: {browser.get_log('browser')}")
        time.sleep(0.1)


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as missing:  # of `chromium`
        print(f"explore: skipped: {missing}")
