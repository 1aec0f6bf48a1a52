"""Lanes: what the GPU and each pipe did and when, one schedule under the other over the same time.

`lanes` is a figure to zoom and hover; `lanes_svg` as a stand-alone SVG without any dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from foretrain.errors import ConfigError
from foretrain.report.document import FONT, GREY, INK, KINDS, LINE, Figure
from foretrain.report.release_plot import ticks
from foretrain.report.table import labels
from foretrain.simulation import Run
from foretrain.trace import Kind, Span
from foretrain.units import MILLISECOND, Time, format_size, format_time

LABELS = {"gpu": "GPU", "optimizer": "optimizer", "wire": "network", "local": "in host"}
_FIRST = ("gpu", "optimizer")


@dataclass(frozen=True, slots=True)
class RunLanes:
    """Lanes of one run over its last iterations.

    Attributes:
        run: whose.
        name: what to call it.
        lanes: name and spans of each lane, GPU first; spans in the order of their start.
        ends: when each of the iterations ended, ps.
    """

    run: Run
    name: str
    lanes: tuple[tuple[str, tuple[Span, ...]], ...]
    ends: tuple[Time, ...]

    @property
    def end(self) -> Time:
        """Return the end of the last iteration."""
        return self.ends[-1]


def block(run: Run, name: str = "", iterations: int = 2, most: int = 4000) -> RunLanes:
    """Return the lanes of ``run``'s last ``iterations``, at most about ``most`` spans a lane and step; see `thin`."""
    timeline = run.last_steps(iterations)
    if not len(timeline):
        raise ConfigError("runs", str(run.schedule), "has no timeline", "simulate with trace=True")
    begins = run.begins[-1 - iterations :]
    end = begins[-1] - begins[0]
    found: dict[str, list[Span]] = {lane: [] for lane in _FIRST}
    for span in timeline:
        found.setdefault(span.lane, []).append(span)
    lanes = tuple((lane, thin(spans, end, most)) for lane, spans in found.items() if spans)
    return RunLanes(run, name or run.schedule.name, lanes, tuple(begin - begins[0] for begin in begins[1:]))


def thin(spans: Sequence[Span], end: Time, most: int) -> tuple[Span, ...]:
    """Sort ``spans`` by start; of more than ``most``, those that begin within ``end / most`` of time become one.

    Busy time is kept: a merged span is as long as its parts together, so that gaps move by less than a cell but none
    are filled. Only spans of one kind and step are merged.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    if len(ordered) <= most:
        return tuple(ordered)
    cells: dict[tuple[int, Kind, int], list[Span]] = {}
    for span in ordered:
        cells.setdefault((span.start * most // end, span.kind, span.step), []).append(span)
    return tuple(_merged(group) for group in cells.values())


def _merged(group: Sequence[Span]) -> Span:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    # The optimizer's spans may overlap; then their sum is longer than the time they cover.
    busy = min(sum(span.end - span.start for span in group), max(span.end for span in group) - first.start)
    name = f"{len(group)} spans, {first.name} to {last.name}"
    return first._replace(name=name, end=first.start + busy, size=sum(span.size for span in group))


def lanes(runs: Sequence[Run], *, shown: Sequence[Run] = (), names: Sequence[str] = (), most: int = 1000) -> Figure:
    """An interactive figure of ``runs``.

    Every trace carries in ``meta`` its run's index and its offset in that run's block of rows, and the figure all
    blocks' labels, so that a page can choose again which runs are shown by writing ``visible`` and ``y``.

    Args:
        runs: with timelines.
        shown: those that are visible at first; all where empty.
        names: what to call each run; see `foretrain.report.table.labels` where empty.
        most: spans a lane, see `thin`.
    """
    blocks = _blocks(runs, most, names)
    visible = [not shown or any(run is one for one in shown) for run in runs]
    figure = Figure(400)
    top, marks = 0, {}
    for index, item in enumerate(blocks):
        _add_block(figure, item, index, top, visible[index])
        if visible[index]:
            marks |= {top + offset: label for offset, label in enumerate(_row_labels(item))}
            top += len(item.lanes) + 1
    for kind, (color, _) in KINDS.items():
        figure.add_bar(x=[None], y=[None], name=kind, legendgroup=kind, marker={"color": color})
    _style(figure, blocks, top, marks)
    longest = max(item.end for item, seen in zip(blocks, visible, strict=True) if seen) / MILLISECOND
    figure.update_xaxes(range=[0, longest * 1.01])
    return figure


def _blocks(runs: Sequence[Run], most: int, names: Sequence[str] = ()) -> list[RunLanes]:
    if not runs:
        raise ConfigError("runs", [], "is empty", "give at least one run")
    return [block(run, name, most=most) for run, name in zip(runs, names or labels(runs), strict=True)]


def _row_labels(item: RunLanes) -> list[str]:
    """Axis labels of a block's rows; the first row is its title."""
    title = f"<b>{item.name}</b> {format_time(item.run.iteration_time)}"
    return [title, *(LABELS.get(lane, lane) for lane, _ in item.lanes)]


def _add_block(figure: Figure, item: RunLanes, index: int, top: int, visible: bool) -> None:
    """Add a trace for each lane and kind, and one for the ends of the iterations."""
    for row, (lane, spans) in enumerate(item.lanes, start=1):
        for kind in KINDS:
            chosen = [span for span in spans if span.kind == kind]
            if chosen:
                trace = _bars(chosen, kind, f"{item.name}, {LABELS.get(lane, lane)}")
                place = {"y": top + row, "width": 0.4 if lane == "optimizer" else 0.78}
                figure.add_bar(**trace, **place, meta={"run": index, "offset": row}, visible=visible)
    thickness, height = item.end / MILLISECOND / 700, len(item.lanes)
    figure.add_bar(
        base=[end / MILLISECOND - thickness / 2 for end in item.ends],
        x=[thickness] * len(item.ends),
        y=top + (height + 1) / 2,
        width=height + 0.1,
        marker={"color": INK},
        meta={"run": index, "offset": (height + 1) / 2},
        visible=visible,
        showlegend=False,
    )


def _bars(spans: Sequence[Span], kind: Kind, where: str) -> dict[str, Any]:
    dark, light = KINDS[kind]
    told = [(span.name, span.step, format_time(span.end - span.start)) for span in spans]
    if sized := kind == "communication":
        told = [(*one, format_size(span.size)) for one, span in zip(told, spans, strict=True)]
    return {
        "base": [round(span.start / MILLISECOND, 6) for span in spans],  # to the ns, for a smaller page
        "x": [round((span.end - span.start) / MILLISECOND, 6) for span in spans],
        "customdata": told,
        "legendgroup": kind,
        "showlegend": False,
        "marker": {"shades": [dark, light]},
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{kind}, step %{{customdata[1]}}<br>from %{{base:.7~g}} ms, "
        f"for %{{customdata[2]}}{'<br>%{customdata[3]}' * sized}<br>{where}",
    }


def _style(figure: Figure, blocks: Sequence[RunLanes], rows: int, marks: dict[int, str]) -> None:
    optimum = blocks[0].run.bound.time / MILLISECOND
    for times in (1, 2):
        text = "T*" if times == 1 else "2 T*"
        figure.add_line(x=times * optimum, color=INK, width=1, dash="dot", label=text)
    figure.layout["height"] = 28 * rows + 70
    figure.layout["meta"] = {
        "blocks": [_row_labels(item) for item in blocks],
        "ends": [item.end / MILLISECOND * 1.01 for item in blocks],
        "row": 28,
        "around": 70,
    }
    figure.update_xaxes(title="time since a backward pass begins (ms)")
    figure.update_yaxes(
        tickvals=list(marks),
        ticktext=list(marks.values()),
        range=[max(rows, 1) - 0.4, -0.5],
        showgrid=False,
        fixedrange=True,
    )


# The static picture.

_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 28, 92, 62
_HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="5" stroke-linejoin="round"'
_ROW, _THIN, _GAP, _TITLE = 24, 10, 5, 26


def lanes_svg(runs: Sequence[Run], *, width: int = 960, title: str = "") -> str:
    """Draw the lanes as a stand-alone SVG on white, without any dependency; wide spans carry their name as a tooltip.

    Args:
        runs: with timelines; two or three read best.
        width: px.
        title: one line; the workload and the cluster where empty.
    """
    inner = width - _LEFT - _RIGHT
    blocks = _blocks(runs, inner // 3)  # 3 px: what an eye can tell apart
    latest = max(item.end for item in blocks) * 1.01
    scale = inner / latest
    body: list[str] = []
    y = float(_TOP)
    for item in blocks:
        body += _svg_block(item, y, scale, width)
        y += _svg_height(item)
    head = title or f"{runs[0].workload.name} on {runs[0].cluster}"
    height = round(y) + _BOTTOM - 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="{FONT}" font-size="12" fill="{INK}">',
        f"<title>{escape(head)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(20, 32, head, 'font-size="16" font-weight="600"'),
        *_svg_legend(blocks),
        *_svg_axis(latest / MILLISECOND, scale * MILLISECOND, y, width),
        *_svg_optimum(runs[0].bound.time, latest, scale, y),
        *body,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _thickness(lane: str) -> int:
    return _THIN if lane == "optimizer" else _ROW


def _svg_height(item: RunLanes) -> int:
    return _TITLE + sum(_thickness(lane) + _GAP for lane, _ in item.lanes) + 14


def _svg_block(item: RunLanes, top: float, scale: float, width: int) -> list[str]:
    run = item.run
    note = f"{format_time(run.iteration_time)} per iteration, {run.gap:.1%} above T*, GPU idle {run.idle:.0%}"
    parts = [
        f'<text x="{_LEFT}" y="{top + 15:.1f}" {_HALO}>'
        f'<tspan font-weight="600" font-size="13">{escape(item.name)}</tspan>'
        f'<tspan fill="{GREY}" dx="8">{escape(note)}</tspan></text>'
    ]
    first = y = top + _TITLE
    for lane, spans in item.lanes:
        thick = _thickness(lane)
        parts.append(_text(_LEFT - 10, y + thick / 2 + 4, LABELS.get(lane, lane), f'text-anchor="end" fill="{GREY}"'))
        parts.append(f'<g transform="translate({_LEFT} {y:.1f})">')
        parts += _svg_spans(spans, scale, thick)
        parts.append("</g>")
        y += thick + _GAP
    for end in item.ends:
        x = _LEFT + end * scale
        parts.append(f'<path d="M{x:.2f} {first - 3:.1f}V{y - _GAP + 3:.1f}" stroke="{INK}" stroke-width="1.5"/>')
    rule = top + _svg_height(item) - 10
    parts.append(f'<path d="M{_LEFT} {rule:.1f}H{width - _RIGHT}" stroke="{LINE}"/>')
    return parts


def _svg_spans(spans: Sequence[Span], scale: float, height: float) -> list[str]:
    """Rectangles; neighbours of one kind alternate between two shades."""
    parts: list[str] = []
    seen = dict.fromkeys(KINDS, 0)
    for span in spans:
        shade = KINDS[span.kind][seen[span.kind] % 2]
        seen[span.kind] += 1
        size = f", {format_size(span.size)}" if span.size else ""
        hint = f"<title>{escape(f'{span.name}: {span.kind}, {format_time(span.end - span.start)}{size}')}</title>"
        left, wide = span.start * scale, (span.end - span.start) * scale
        place = f'x="{left:.2f}" width="{max(wide, 0.05):.2f}" height="{height:g}"'
        parts.append(f'<rect {place} fill="{shade}">{hint if wide > 2 else ""}</rect>')
    return parts


def _svg_legend(blocks: Sequence[RunLanes]) -> list[str]:
    used = {span.kind for item in blocks for _, spans in item.lanes for span in spans}
    parts, x = [], 20.0
    for kind, (color, _) in KINDS.items():
        if kind in used:
            parts.append(f'<rect x="{x:.0f}" y="47" width="12" height="12" rx="2" fill="{color}"/>')
            parts.append(_text(x + 18, 57, kind, f'fill="{GREY}"'))
            x += 18 + 6.6 * len(kind) + 20
    parts.append(f'<path d="M{x + 4:.0f} 46V60" stroke="{INK}" stroke-width="1.5"/>')
    return [*parts, _text(x + 12, 57, "an iteration ends", f'fill="{GREY}"')]


def _svg_axis(latest: float, scale: float, y: float, width: int) -> list[str]:
    """Grid and labels in ms; ``scale`` in px per ms."""
    parts = []
    for tick in ticks(latest, 8):
        x = _LEFT + tick * scale
        parts.append(f'<path d="M{x:.2f} {_TOP}V{y:.1f}" stroke="{LINE}"/>')
        parts.append(_text(x, y + 18, f"{tick:g}", f'text-anchor="middle" fill="{GREY}"'))
    parts.append(f'<path d="M{_LEFT} {y:.1f}H{width - _RIGHT}" stroke="{GREY}"/>')
    middle = (_LEFT + width - _RIGHT) / 2
    return [*parts, _text(middle, y + 40, "time since a backward pass begins (ms)", 'text-anchor="middle"')]


def _svg_optimum(optimum: Time, latest: float, scale: float, y: float) -> list[str]:
    parts = []
    for times in (1, 2):
        if times * optimum <= latest:
            x = _LEFT + times * optimum * scale
            dashes = f'stroke="{INK}" stroke-width="1" stroke-dasharray="2 3"'
            parts.append(f'<path d="M{x:.2f} {_TOP - 4}V{y:.1f}" {dashes}/>')
            label = "T*" if times == 1 else f"{times} T*"
            parts.append(_text(x, _TOP - 9, label, 'text-anchor="middle" font-weight="600"'))
    return parts


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(text)}</text>'
