"""The page of forecasts against measurements: a picture, a line for each family, and every row of some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from factors import ANCHORS, HOST_ANCHORS
from measure import machine
from outcome import ROOM, Outcome
from rows import DATA, Row, read
from summary import HEAD, families, rankings

from foretrain.report.document import FONT, GREY, INK, LINE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/live/accuracy.md"
PICTURE = ROOT / "docs/_static/accuracy.svg"

PREFACE = """# Forecasts against measurements

`benchmarks/accuracy.py` simulates published training runs with `foretrain simulate`, as anybody would: the script is
plain PyTorch, the GPUs and the network are those of the publication, ranks of a kind are folded. Each run here is of
two steps, of which the second counts. Forecast ÷ measured − 1 is the error. These are {count} of the {possible}
published runs that a script here can repeat, all that have been simulated so far; of the incomplete families {missing}.

![Forecast over measured time of an iteration, both logarithmic; dashed lines are 10 % off](../_static/accuracy.svg)

{families}

Runs of torchtitan that shard parameters and split nothing else (FSDP): mean {torchtitan_error_mean:.1%}, largest
{torchtitan_error_max:.1%}; without those that a constant was fitted on, mean {torchtitan_unfitted_error_mean:.1%}.
Phantora, which runs kernels on a real GPU, reports 2.9 % and 8.5 % for runs of this kind. All runs: mean
{all_error_mean:.1%}, without fitted ones {all_unfitted_error_mean:.1%}.
{rankings}

## Fitted constants

One factor for each GPU and framework multiplies the time of every operator; it says how far kernels of that framework
under load, with the clocks that the power limit leaves, are from the operators' table. For one framework it multiplies
what a launch costs the host instead. It is fitted on one or two runs, and 1 for what the table does not name:

{factors}

## Runs of torchtitan and fms-fsdp

{rows}

{roomy}

## Furthest off

Every run whose error is above 15 %:

{furthest}

Written by `python benchmarks/accuracy.py --markdown` ({machine}).
"""

RANKINGS = "Does the forecast rank configurations as measurements do? Of each model of vTrain's runs on many servers:"

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#7c3aed", "#db2777", "#0891b2", "#ca8a04", "#64748b", "#dc2626", "#4d7c0f")
SIDE, MARGIN, LEGEND = 460, 56, 170
Point = tuple[float, float]


def scatter(found: Sequence[Outcome]) -> str:
    """Forecast over measured seconds of an iteration as SVG, both axes logarithmic, within and beyond 10 %."""
    points = [(one.family, one.measured, one.predicted) for one in found if one.predicted]
    values = [value for _, *both in points for value in both]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def place(measured: float, predicted: float) -> Point:
        across, up = ((math.log10(value) - low) / (high - low) for value in (measured, predicted))
        return MARGIN + across * SIDE, MARGIN / 2 + (1 - up) * SIDE

    families = dict(zip(dict.fromkeys(family for family, *_ in points), COLORS * 2, strict=False))
    width, height = SIDE + MARGIN * 1.5 + LEGEND, SIDE + MARGIN * 1.5
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" font-family="{FONT}" '
        f'font-size="12" fill="{INK}">',
        "<title>Forecast over measured time of an iteration</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for power in range(low, high + 1):
        left, top = place(10.0**power, 10.0**power)
        bottom = MARGIN / 2 + SIDE
        parts.append(
            f'<path d="M{left:.1f} {bottom:.1f}V{MARGIN / 2:.1f}M{MARGIN} {top:.1f}H{MARGIN + SIDE}" stroke="{LINE}"/>'
        )
        parts.append(_text(left, bottom + 18, f"{10.0**power:g}", "middle"))
        parts.append(_text(MARGIN - 8, top + 4, f"{10.0**power:g}", "end"))
    for ratio, dash in ((1.0, ""), (1.1, "4 4"), (1 / 1.1, "4 4")):
        ends = [place(10.0**power, ratio * 10.0**power) for power in (low, high)]
        line = "L".join(f"{left:.1f} {top:.1f}" for left, top in ends)
        parts.append(f'<path d="M{line}" stroke="{GREY}" fill="none" stroke-dasharray="{dash}"/>')
    for family, measured, predicted in points:
        left, top = place(measured, predicted)
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.5" fill="{families[family]}" fill-opacity="0.6"/>')
    for row, (family, color) in enumerate(families.items()):
        top = MARGIN + 20 * row
        parts.append(f'<circle cx="{MARGIN + SIDE + 26}" cy="{top}" r="5" fill="{color}"/>')
        parts.append(_text(MARGIN + SIDE + 38, top + 4, family, "start"))
    parts.append(_text(MARGIN + SIDE / 2, height - 10, "measured, s", "middle"))
    parts.append(_text(MARGIN - 40, MARGIN / 2 - 10, "forecast, s", "start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(found: Sequence[Outcome], rows: dict[str, Row], results: dict[str, float]) -> None:
    """The documentation's page and its picture."""
    from foretrain.device import preset
    from foretrain.device.gpu import HOST_LAUNCH, host_launch, stack_factor

    good = [one for one in found if one.predicted is not None]
    possible = Counter(row.family for row in read(DATA)[0])
    done = Counter(one.family for one in good)
    missing = ", ".join(
        f"{done[family]} of {count} of {family}" for family, count in possible.items() if done[family] < count
    )
    factors = [
        [f"{stack}, {device}", f"{stack_factor(preset(device), stack):.3f}", ", ".join(names)]
        for (device, stack), names in ANCHORS.items()
    ]
    factors += [
        [f"{stack}, {device}: the host", f"{host_launch(preset(device), stack) / HOST_LAUNCH:.2f}", ", ".join(names)]
        for (device, stack), names in HOST_ANCHORS.items()
    ]
    shown = [one for one in good if one.family in ("torchtitan", "fmsfsdp")]
    ranked = [[name, f"{value:.3f}"] for name, value in sorted(rankings(good).items())]
    text = PREFACE.format(
        count=len(good),
        possible=possible.total(),
        missing=missing,
        families=table(HEAD, families(good)),
        rankings=f"{RANKINGS}\n\n{table(('model, GPUs', 'Spearman'), ranked)}\n" if ranked else "",
        factors=table(("framework, GPU", "factor", "fitted on"), factors),
        rows=_table(shown, rows),
        roomy=_roomy(good),
        furthest=_table([one for one in good if abs(one.error) > 0.15], rows),
        machine="{date}, {cores} cores of {cpu}".format(**machine()),
        **results,
    )
    PAGE.write_text(text, encoding="utf-8")
    PICTURE.write_text(scatter(good), encoding="utf-8")


def _roomy(good: Sequence[Outcome]) -> str:
    """Which runs had to be given more memory than their GPUs have."""
    names = [one.id for one in good if one.roomy]
    if not names:
        return ""
    return (
        f"Published runs fitted into their GPUs. Of {len(names)} the forecast needs more than that; these were "
        f"simulated with {ROOM - 1:.0%} more memory (`foretrain simulate --memory`): {', '.join(names)}."
    )


def _table(found: Sequence[Outcome], rows: dict[str, Row]) -> str:
    """Each outcome with what its run departs in."""
    lines = [
        [
            f"{one.id}: {one.model}, {rows[one.id].precision}, {one.ranks} {one.device}",
            f"{one.predicted:.3f} s",
            f"{one.measured:.3f} s",
            f"{one.error:+.1%}",
            "" if one.memory_error is None else f"{one.memory_error:+.1%}",
            "; ".join(rows[one.id].departures),
        ]
        for one in found
    ]
    return table(("run", "forecast", "measured", "error", "memory", "departures"), lines)
