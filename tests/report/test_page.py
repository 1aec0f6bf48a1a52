"""The page is one file, whole, offline, and draws what was compared."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foretrain.experiments import Comparison
from foretrain.report import bars, curves, lanes, page
from foretrain.report.page import render
from foretrain.report.table import labels, ranking

CHROMIUM = shutil.which("chromium")


def test_nothing_is_fetched_and_plotly_is_there_once(comparison: Comparison):
    html = render(comparison)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)\s*=\s*[\"']?(https?:)?//", html)
    assert "@import" not in html
    assert html.count("plotly.js v") == 1
    assert html == render(comparison)


def test_names_cannot_break_out_of_the_page(comparison: Comparison):
    named = dataclasses.replace(comparison.workload, name="</script><script>alert(1)</script>")
    html = render(dataclasses.replace(comparison, workload=named))
    assert "<script>alert(1)" not in html


def test_bars_hold_every_run_and_end_at_its_time(comparison: Comparison):
    figure = bars(comparison)
    runs = ranking(comparison)
    assert list(figure.data[0].y) == labels(runs)
    ends = [compute + exposed for compute, exposed in zip(figure.data[0].x, figure.data[1].x, strict=True)]
    assert ends == pytest.approx([run.iteration_time / 1e9 for run in runs])


def test_lanes_cover_two_iterations(comparison: Comparison):
    runs = list(comparison.runs[:2])
    figure = lanes(runs)
    bars = [(trace.base, trace.x) for trace in figure.data if trace.base is not None]
    latest = max(start + length for starts, lengths in bars for start, length in zip(starts, lengths, strict=True))
    assert latest == pytest.approx(max(2 * run.iteration_time for run in runs) / 1e9, rel=0.01)


def test_curves_hold_every_schedule_and_the_optimum(comparison: Comparison):
    sweep = comparison.sweep
    assert sweep is not None
    figure = curves(sweep)
    drawn = {trace.name: list(trace.y) for trace in figure.data if trace.xaxis in (None, "x")}
    assert drawn["T*"] == pytest.approx([time / 1e9 for time in sweep.optimum])
    for name, times in sweep.times.items():
        assert drawn[name] == pytest.approx([time / 1e9 for time in times])


def test_a_failed_write_leaves_the_old_page(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        page(comparison, path)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_draws_every_figure_without_an_error(comparison: Comparison, tmp_path: Path):
    path = tmp_path / "page.html"
    html = render(comparison)
    # Ask for every figure at once instead of when it is scrolled to, and write what became of them into the page.
    probe = """<script>window.addEventListener('error', e => document.title = 'ERROR ' + e.message);
    setTimeout(() => { window.scrollTo(0, 1e6); }, 300);
    setTimeout(() => { const out = document.createElement('pre'); out.id = 'probe';
      out.textContent = JSON.stringify({title: document.title, plots: document.querySelectorAll('.main-svg').length});
      document.body.appendChild(out); }, 4000);</script>"""
    path.write_text(html.replace("</body>", probe + "</body>"))
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync", "dump-dom"]
    flags += ["disable-background-networking", "disable-component-update", f"user-data-dir={tmp_path / 'profile'}"]
    flags += ["window-size=1440,5000", "virtual-time-budget=8000"]
    command = [str(CHROMIUM), *(f"--{flag}" for flag in flags), path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    probed = json.loads(found[1].replace("&quot;", '"'))
    assert "ERROR" not in probed["title"]
    assert probed["plots"] >= 4
