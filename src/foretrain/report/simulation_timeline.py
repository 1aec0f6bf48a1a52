"""The last step of a live simulation over time: a row for each stream of each live rank, the critical path above."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from foretrain.live.forecast import CriticalPath, title
from foretrain.live.rank_trace import HOST, Activity, RankTrace
from foretrain.report.document import BLUE, INK, LINE, ORANGE, Figure
from foretrain.report.findings import SimulationFindings
from foretrain.units import MILLISECOND, Time, format_size, format_time

_RANKS = 8
_MOST = 1000
"""Spans of a row, before those that begin together are drawn as one."""
_ROW = 26
KINDS = {
    "products": (BLUE, "#4377ee"),
    "other kernels": ("#7cb3f8", "#94c1fa"),
    "communication": (ORANGE, "#f27d3e"),
    "waiting for members": ("#fed7aa", "#fed7aa"),
    "host": ("#64748b", "#7c8a9e"),
}
"""Of each kind of span the two shades that alternate, in the order of the legend."""
_PAINTED = ("other kernels", "products", "host", "waiting for members", "communication")
"""Kinds of bars, the last on top: every bar is a pixel wide at least, and so hides what is beside it."""
_PRODUCTS = ("mm", "conv", "attention", "linear", "einsum", "dot")


class Bar(NamedTuple):
    """A bar of the figure: its time in ps since the step's begin, and its hover text."""

    kind: str
    begin: Time
    length: Time
    name: str
    note: str


def timeline(found: SimulationFindings) -> Figure | None:
    """Return the figure; None where no activities were kept."""
    path = found.path
    if path is None:
        return None
    begin, end = path.begin, path.end
    rows: list[tuple[str, list[Bar]]] = [("<b>critical path</b>", list(_of_path(path)))]
    for rank in found.forecast.ranks[:_RANKS]:
        rows += _of_rank(found.done.trace.rank_traces[rank.rank], begin, end)
    figure = Figure(_ROW * len(rows) + 60)
    for kind in _PAINTED:
        bars = [(row, bar) for row, (_, all_bars) in enumerate(rows) for bar in all_bars if bar.kind == kind]
        if bars:
            figure.add_bar(**_trace(kind, KINDS[kind], bars))
    _style(figure, [name for name, _ in rows], (end - begin) / MILLISECOND)
    return figure


def thin(bars: Sequence[Bar], length: Time, most: int = _MOST) -> list[Bar]:
    """Sort ``bars`` by begin; of more than ``most``, those that begin within ``length / most`` become one a kind.

    What is drawn as one is as long as its parts together, and kinds follow each other: busy time is kept, and of a gap
    no more is filled than a cell.
    """
    ordered = sorted(bars, key=lambda bar: bar.begin)
    if len(ordered) <= most:
        return ordered
    cells: dict[int, dict[str, list[Bar]]] = {}
    for bar in ordered:
        cells.setdefault(bar.begin * most // length, {}).setdefault(bar.kind, []).append(bar)
    return [bar for kinds in cells.values() for bar in _merged(list(kinds.values()))]


def _merged(groups: Sequence[Sequence[Bar]]) -> Iterator[Bar]:
    """Yield a bar for each of ``groups``, one after the other."""
    at = groups[0][0].begin
    for group in groups:
        at = max(at, group[0].begin)
        longest, length = max(group, key=lambda bar: bar.length), sum(bar.length for bar in group)
        name = longest.name if len(group) == 1 else f"{len(group)} of them, the longest {longest.name}"
        yield group[0]._replace(begin=at, length=length, name=name, note=longest.note)
        at += length


def _of_path(path: CriticalPath) -> Iterator[Bar]:
    pieces = []
    for piece in path.pieces:
        kind = _kind(piece.name) if piece.kind == "kernel" else "host" if piece.kind != "communication" else piece.kind
        note = f"on rank {piece.rank}"
        pieces.append(Bar(kind, piece.begin - path.begin, piece.end - piece.begin, piece.name, note))
    yield from thin(pieces, path.end - path.begin)


def _of_rank(rank_trace: RankTrace, begin: Time, end: Time) -> Iterator[tuple[str, list[Bar]]]:
    """A row for each stream that did anything from ``begin`` to ``end``, and for named ranges of the host."""
    streams: dict[int, list[Bar]] = {}
    for activity in rank_trace.activities():
        if activity.reached < end and activity.end > begin:
            streams.setdefault(activity.stream, []).extend(_bars(activity, begin, end))
    name = f"<b>rank {rank_trace.rank}</b> "
    for stream, bars in sorted(streams.items(), key=lambda item: (item[0] <= HOST, abs(item[0]))):
        label = f"stream {stream & 0xFFFF}" if stream > HOST else "host" if stream == HOST else "host, behind"
        yield name + label, thin([bar for bar in bars if bar.length > 0], end - begin)
        name = ""


def _bars(one: Activity, begin: Time, end: Time) -> Iterator[Bar]:
    def clipped(kind: str, since: Time, until: Time, note: str) -> Bar:
        start = max(since, begin)
        return Bar(kind, start - begin, min(until, end) - start, title(one), note)

    if one.kind == "communication":
        members = ", ".join(map(str, one.group[:8])) + (", …" if len(one.group) > 8 else "")
        note = f"{format_size(one.size)}, ranks {members}"
        if one.start > one.reached:
            yield clipped("waiting for members", one.reached, one.start, note)
        yield clipped("communication", one.start, one.end, note)
    else:
        yield clipped(_kind(one.name) if one.kind == "kernel" else "host", one.start, one.end, "")


def _kind(kernel: str) -> str:
    return "products" if any(word in kernel for word in _PRODUCTS) else "other kernels"


def _trace(kind: str, shades: tuple[str, str], bars: Iterable[tuple[int, Bar]]) -> dict[str, Any]:
    rows, spans = zip(*bars, strict=True)
    return {
        "legendgroup": kind,
        "y": rows,
        "base": [round(bar.begin / MILLISECOND, 6) for bar in spans],  # to the ns, for a smaller page
        "x": [round(bar.length / MILLISECOND, 6) for bar in spans],
        "customdata": [(bar.name, format_time(bar.length), bar.note) for bar in spans],
        "width": 0.78,
        "marker": {"shades": shades},
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{kind}, from %{{base:.7~g}} ms, for %{{customdata[1]}}"
        "<br>%{customdata[2]}",
        "showlegend": False,
    }


def _style(figure: Figure, names: Sequence[str], length: float) -> None:
    for kind, (colour, _) in KINDS.items():
        figure.add_bar(x=[None], y=[None], name=kind, marker={"color": colour})
    for row, name in enumerate(names[1:], 1):
        if name.startswith("<b>"):
            figure.add_line(y=row - 0.5, color=INK if row == 1 else LINE, width=1, below=True)
    figure.update_xaxes(title="time since the step began (ms)")
    figure.update_xaxes(range=[0, length * 1.005])
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=names,
        range=[len(names) - 0.4, -0.6],
        showgrid=False,
        fixedrange=True,
    )
