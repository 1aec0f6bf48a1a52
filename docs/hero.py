"""The picture of the README as SVG: one iteration after another under two schedules, a GPU and a network lane each.

It is drawn 480 px wide with large letters, so that it can be read on a phone.
"""

from __future__ import annotations

from html import escape

from foretrain.report.document import FONT, GREY, INK, KINDS, LINE
from foretrain.simulation import Run
from foretrain.units import MILLISECOND, Time, format_time

WIDTH, LEFT, RIGHT, TOP = 480, 78, 10, 74
LANE, GAP, TITLE, BLOCK = 30, 4, 28, 112
NAMES = {"ddp": "DDP", "prophet": "Prophet", "bytescheduler": "ByteScheduler", "dear": "DeAR", "p3": "P3"}
COLORS = {"backward": "backward", "forward": "forward", "communication": "network busy"}


def svg(baseline: Run, best: Run, *, title: str) -> str:
    """Draw two iterations of ``baseline`` above two of ``best`` over the same time."""
    latest = 2 * max(run.iteration_time for run in (baseline, best)) * 101 // 100
    scale = (WIDTH - LEFT - RIGHT) / latest
    bottom = TOP + 2 * BLOCK
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 44}" '
        f'viewBox="0 0 {WIDTH} {bottom + 44}" role="img" font-family="{FONT}" font-size="14" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(10, 26, title, 'font-size="18" font-weight="600"'),
        *_legend(),
        *_axis(latest, scale, bottom),
    ]
    for row, run in enumerate((baseline, best)):
        parts += _block(run, baseline, TOP + row * BLOCK, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], 10
    for kind, name in COLORS.items():
        parts.append(f'<rect x="{x}" y="42" width="14" height="14" rx="2" fill="{KINDS[kind][0]}"/>')
        parts.append(_text(x + 20, 54, name, f'fill="{GREY}"'))
        x += 46 + 8 * len(name)
    return parts


def _axis(latest: Time, scale: float, bottom: int) -> list[str]:
    parts = []
    for tick in range(0, latest // MILLISECOND + 1, 100):
        x = LEFT + tick * MILLISECOND * scale
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}"/>')
        label = f"{tick} ms" if tick else "0"
        parts.append(_text(x, bottom + 18, label, f'text-anchor="middle" fill="{GREY}"'))
    return [*parts, f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="{GREY}"/>']


def _block(run: Run, baseline: Run, top: int, scale: float) -> list[str]:
    name = NAMES.get(run.schedule.name, run.schedule.name)
    note = f"{format_time(run.iteration_time)} an iteration"
    if run is baseline:
        note += f", GPU idle {run.idle:.0%}"
    else:
        note += f", {baseline.iteration_time / run.iteration_time:.2f}×"
    halo = 'paint-order="stroke" stroke="#ffffff" stroke-width="5" font-size="15"'
    words = f'<tspan font-weight="600">{escape(name)}</tspan><tspan dx="7" fill="{GREY}">{escape(note)}</tspan>'
    parts = [f'<text x="{LEFT}" y="{top + 18}" {halo}>{words}</text>']
    timeline = run.last_steps(2)
    network = next(lane for lane in timeline.lanes() if lane not in ("gpu", "optimizer"))
    for row, (lane, label) in enumerate((("gpu", "GPU"), (network, "network"))):
        y = top + TITLE + row * (LANE + GAP)
        parts.append(_text(LEFT - 8, y + LANE / 2 + 5, label, f'text-anchor="end" fill="{GREY}"'))
        parts += _bars([span for span in timeline if span.lane == lane and span.kind in COLORS], y, scale)
    for step in (1, 2):
        x = LEFT + step * run.iteration_time * scale
        low, high = top + TITLE - 4, top + TITLE + 2 * LANE + GAP + 4
        parts.append(f'<path d="M{x:.1f} {low}V{high}" stroke="{INK}" stroke-width="2"/>')
    return parts


def _bars(spans: list, y: float, scale: float) -> list[str]:
    """Join spans of one kind that are less than half a pixel apart, and draw each group as one bar."""
    bars: list[list] = []
    for span in sorted(spans, key=lambda span: span.start):
        left, right = LEFT + span.start * scale, LEFT + span.end * scale
        if bars and bars[-1][0] == span.kind and left - bars[-1][2] < 0.5:
            bars[-1][2] = max(bars[-1][2], right)
        else:
            bars.append([span.kind, left, right])
    return [
        f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{LANE}" fill="{KINDS[kind][0]}"/>'
        for kind, left, right in bars
        if right - left >= 0.1
    ]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
