"""The page of forecasts against measurements: a picture, a line for each family, and every row of some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from factors import ANCHORS, HOST_ANCHORS
from kept import checked
from measure import machine
from row_outcome import ROOM, Outcome
from rows import COMPUTED, DATA, Left, Row, contributed, read
from summary import (
    CALIBRATIONS_HEAD,
    CONTRIBUTORS_HEAD,
    FITTED,
    HEAD,
    LAYOUTS_HEAD,
    calibrations,
    computed,
    contributors,
    families,
    is_fsdp,
    keys,
    layouts,
    measurements,
    rankings,
)
from targets import TARGETS_HEAD, targets
from trust import FOLDS_HEAD, PROVENANCE_HEAD, by_provenance, folds, group, held, miss, width

from foretrain.report.document import FONT, GREY, INK, LINE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/live/accuracy.md"
PICTURE = ROOT / "docs/_static/accuracy.svg"
INTERVALS = ROOT / "docs/_static/accuracy-intervals.svg"

PREFACE = """# Forecasts against measurements

`benchmarks/accuracy.py` simulates published training runs with `foretrain simulate`, as anybody would: the script is
plain PyTorch, the GPUs and the network are those of the publication, ranks of a kind are folded. Each run here is of
two steps, of which the second counts. Forecast ÷ measured − 1 is the error. These are {count} of the {possible}
published runs that a script here can repeat{missing}.
Of {computed_possible} more runs, whose times another model computed (vtrain-single, below), {computed_count} have been
simulated. {left_count} others fit no script (see the end of this page).

![Forecast over measured time of an iteration, both logarithmic; dashed lines are 10 % off](../_static/accuracy.svg)

{families}

Runs of torchtitan that shard parameters and split nothing else (FSDP): mean {torchtitan_fsdp_error_mean:.1%}, largest
{fsdp_max:.1%}; without those that a constant was fitted on, mean {fsdp_unfitted:.1%}. Phantora, which runs kernels on a
real GPU, reports 2.9 % and 8.5 % for runs of this kind. All runs: mean {all_error_mean:.1%}, without fitted ones
{unfitted:.1%}. Memory is the most that PyTorch reserved on a GPU; of simumax-b200, the most that it allocated, which is
what SimuMax measures.
{rankings}
## Targets

What these forecasts are meant to reach, and what is known of why they do not:

{targets}

## Which way forecasts lean

Where errors of a kind of run have one sign, forecasts lack something.

:::{{warning}}
Two kinds of run took much longer than forecast: torchtitan's with context parallelism within a server, and four of
vTrain's that split layers over 2 GPUs.
:::

Context parallelism within a server took longer than is explained here. Both runs have the same tokens on each GPU and
differ only in the steps of the ring, 3 and 7: each further step took 7.3 s, or 228 ms for each layer, and without steps
8.7 s would be left, where 8.4 are forecast. The forecast of a step is 154 ms: twice 29 ms for half a block of attention
forward, as layers are recomputed; 84 ms for it backward; and 12 ms for messages, which in a compiled graph nothing
hides, merges in float32 and copies. PyTorch's source does just that: its forward and its backward pass halve the
blocks. The missing 74 ms are little less than whole blocks would add to the backward pass, 84 ms, but the same code's
runs across servers have no room for them: there one step took 33 s more, where 29 are forecast and whole blocks would
make it 38, and the next two 45 s, where 46 are forecast.

Four runs of vTrain's model of 39 billion parameters on 512 GPUs split layers over 2 GPUs, and took 32 to 63 % longer
than forecast. It is not the layout: the model of 175 billion, split so over as many GPUs, took 57 s with micro-batches
of 2, and 54 to 59 s split otherwise.

AsyncTP is PyTorch's own (`torch.distributed._symmetric_memory`). In float8 with a scale for each row its pass finds
nothing to pipeline here. With a scale for each tensor the script itself sends the same bytes by broadcasts beside its
products.

cuDNN's attention has no table of its own: of a GPU's attention kernels only the best is measured. cuDNN's, that of
FlashAttention-2, the memory-efficient one and that in Triton are charged at estimated shares of its rate. A script is
charged for the kernel that it names, or else that PyTorch 2.13 chooses; which one an earlier PyTorch chose is not
published. Earlier versions of foretrain forecast runs on H100 with PyTorch 2.5 or later too long, and older ones not.
That PyTorch had changed kernels is the likely reason, but it is not verified.

{layouts}

## Runs that another model computed

vTrain's table of runs on one server (vtrain-single) is published as measured, but it is a model's output. Where two of
its runs without a pipeline differ in their data-parallel ranks alone, their times differ by what two entries of
vTrain's table of all-reduces differ by, to the nanosecond in all 560 pairs, whatever the micro-batch; and where
gradients exceed 1 GiB, the end of that table, by what the formula of vTrain's predictor makes of the last entry: less
time for more ranks. So these runs say how far two models are apart, and do not count above or below, but for what has
not been fitted anew without them: what a launch costs the host under Megatron-DeepSpeed, and its range on one server.

{computed}

{computed_layouts}

## How sure forecasts are

The interval beside a forecast is to hold the measurement with a probability of 95 %. Its width has two parts: the range
of published runs of the same stack about their forecasts, which `--factor` names, and the uncertainty of this run's own
operators and collectives. Where no stack is named, or none of its runs was on this GPU, the range is that of a stack
never seen. Of all {count} runs, intervals hold {interval_coverage:.1%}; "held" above is that by family. {narrow}

A stack never seen is as one drawn at random from those here, each of the same weight. Its range is exp(±{unseen}). That
of {widest} is wider, exp(±{widest_range}): a stack can be worse than most.

![Measured over forecast time, in half-widths of the 95 % interval, by family](../_static/accuracy-intervals.svg)

{provenance}

:::{{warning}}
Constants and ranges come from the same runs that they are compared with.
:::

In five folds they do not: each fold's intervals have ranges of the other four. The last column says what further
constants, one for each stack and GPU, would gain: the mean error of each fold if the median of the other four had
corrected it.

{folds}

## Which outcomes are kept

benchmarks/data/accuracy.jsonl keeps every outcome, so that `python benchmarks/accuracy.py` reports at once. An outcome
counts while its command (arguments, cluster, GPU, the stack's factors) and the code are what they were: the script, and
the packages `collective`, `device`, `live`, `network` and `simulation`, as syntax trees without comments. Where code
has changed, of each family and GPU the run that is simulated fastest is simulated again; if it comes out as it was, to
the picosecond, or to 0.3 % where it was read back from a picture, the others count, and otherwise they are simulated
again. A change that this run does not execute is not seen. {checked} of {count} outcomes were checked so with the code
of commit `{commit}`. {inexact}

Once a pipeline is full, as many micro-batches as it has stages always add the same time. Of {extrapolated} runs three
shorter steps were simulated instead, with one, two and three times as many micro-batches as stages, and the time of a
whole step is where a straight line through the second and the third leads.

## Fitted constants

One factor for each GPU and framework multiplies the time of every operator; it says how far kernels of that framework
under load, with the clocks that the power limit leaves, are from the operators' table. For one framework it multiplies
what a launch costs the host instead. It is fitted on one or two runs, and 1 for what the table does not name:

{factors}

## Measurements by contributor

`foretrain accuracy add` adds runs that you measured, and calibrations of GPUs (see {{doc}}`../reference/cli`).

{contributors}
{calibrations}
## Runs of torchtitan and fms-fsdp

{rows}

{roomy} {largest}

## Furthest off

Every run whose error is above 15 %. What is known of torchtitan's with context parallelism, and of vTrain's over 2
GPUs, stands above. Of the others no cause is known.

{furthest}

## Published runs that fit no script

{left}

Written by `python benchmarks/accuracy.py --markdown` ({machine}).
"""

INEXACT = (
    "{count} outcomes were read back from the picture that this page had on 2026-11-22, to three digits, and without "
    "uncertainties of their own."
)
NARROW = (
    "For the {count} that were read back (below), a run would print a wider interval, as the uncertainty of their own "
    "operators is not known."
)

LARGEST = "Nemotron4-340B"
"""A model for which memory did not suffice in earlier forecasts."""

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


STRIP, REACH = 34, 2.5
"""Height of a family's strip, and how many half-widths are shown to either side."""


def strips(found: Sequence[Outcome]) -> str:
    """Measured over forecast in half-widths of the interval as SVG, a strip for each family; red beyond."""
    names = sorted({one.family for one in found})
    bottom, width_ = MARGIN / 2 + STRIP * len(names), LEGEND + SIDE + MARGIN
    across = lambda value: LEGEND + (max(-REACH, min(REACH, value)) / REACH + 1) / 2 * SIDE  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_} {bottom + MARGIN:g}" role="img" '
        f'font-family="{FONT}" font-size="12" fill="{INK}">',
        "<title>Measured over forecast time, in half-widths of the 95 % interval</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<rect x="{across(-1):.1f}" y="{MARGIN / 2}" width="{across(1) - across(-1):.1f}" '
        f'height="{bottom - MARGIN / 2}" fill="{LINE}"/>',
        f'<path d="M{across(0):.1f} {MARGIN / 2}V{bottom}" stroke="{GREY}" stroke-dasharray="4 4"/>',
    ]
    for row, name in enumerate(names):
        ones = sorted((one for one in found if one.family == name), key=lambda one: one.id)
        middle = MARGIN / 2 + STRIP * (row + 0.5)
        inside = sum(map(held, ones))
        parts.append(_text(LEGEND - 10, middle + 4, f"{name}: {inside} of {len(ones)}", "end"))
        for place, one in enumerate(ones):
            left, top = across(miss(one) / width(one)), middle + (place % 7 - 3) * STRIP / 10
            color = COLORS[0] if held(one) else COLORS[8]
            parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{color}" fill-opacity="0.6"/>')
    for value, text in ((-1, "faster, end of interval"), (1, "slower, end of interval")):
        parts.append(_text(across(value), bottom + 18, text, "middle"))
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
    from foretrain.device.gpu import HOST_LAUNCH, forecast_range, host_launch, stack_factor

    good, others, here = measurements(found), computed(found), machine()
    published, left = read(DATA)
    left += contributed()[1]
    possible = Counter(row.family for row in published if row.family not in COMPUTED)
    done = Counter(one.family for one in good)
    incomplete = [
        f"{done[family]} of {count} of {family}" for family, count in possible.items() if done[family] < count
    ]
    missing = ""
    if incomplete:
        missing = f", all that have been simulated so far; of the incomplete families {', '.join(incomplete)}"
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
    fsdp = [one for one in good if is_fsdp(one, rows)]
    unfitted = keys([one for one in good if one.id not in FITTED], rows)
    inexact = sum(not one.exact for one in good)
    widths = {group(one): width(replace(one, spread=0.0)) for one in good}
    widest = max(widths, key=lambda name: widths[name])
    text = PREFACE.format(
        count=len(good),
        fsdp_max=max((abs(one.error) for one in fsdp), default=math.nan),
        fsdp_unfitted=unfitted["torchtitan_fsdp_error_mean"],
        unfitted=unfitted["all_error_mean"],
        provenance=table(PROVENANCE_HEAD, by_provenance(good)),
        folds=table(FOLDS_HEAD, folds(good)),
        extrapolated=sum(one.extrapolated for one in good),
        inexact=INEXACT.format(count=inexact) if inexact else "",
        possible=possible.total(),
        computed_count=len(others),
        computed_possible=len(published) - possible.total(),
        left_count=len(left),
        left=table(("family: why", "runs"), _left(left)),
        targets=table(TARGETS_HEAD, targets(good, possible.total(), results, unfitted)),
        checked=checked(good, rows),
        narrow=NARROW.format(count=inexact) if inexact else "",
        unseen=forecast_range(preset("H100"), "eager", across=True),
        widest=" ".join(widest),
        widest_range=f"{widths[widest]:.3f}",
        missing=missing,
        families=table(HEAD, families(good)),
        layouts=table(LAYOUTS_HEAD, layouts(good, rows)),
        computed=table(HEAD, families(others)),
        computed_layouts=table(LAYOUTS_HEAD, layouts(others, rows)),
        rankings=f"{RANKINGS}\n\n{table(('model, GPUs', 'Spearman'), ranked)}\n" if ranked else "",
        factors=table(("framework, GPU", "factor", "fitted on"), factors),
        rows=_table(shown, rows),
        contributors=table(CONTRIBUTORS_HEAD, contributors(good, rows)),
        calibrations=f"\n{table(CALIBRATIONS_HEAD, measured)}\n" if (measured := calibrations()) else "",
        roomy=_roomy(good),
        largest=_largest(good, rows),
        furthest=_table([one for one in good if abs(one.error) > 0.15], rows),
        machine="{date}, {cores} cores of {cpu}".format(**here),
        commit=here["commit"],
        **results,
    )
    PAGE.write_text(text, encoding="utf-8")
    PICTURE.write_text(scatter(good), encoding="utf-8")
    INTERVALS.write_text(strips(good), encoding="utf-8")


def _left(left: Sequence[Left]) -> list[list[str]]:
    """How many runs of each family fit no script, and why."""
    counted = Counter(f"{one.family}: {one.reason}" for one in left)
    return [[name, str(count)] for name, count in sorted(counted.items())]


def _roomy(good: Sequence[Outcome]) -> str:
    """Which runs had to be given more memory than their GPUs have."""
    names = [one.id for one in good if one.roomy]
    if not names:
        return ""
    return (
        f"Published runs fitted into their GPUs. Of {len(names)} the forecast needs more than that; these were "
        f"simulated with {ROOM - 1:.0%} more memory (`foretrain simulate --memory`): {', '.join(names)}."
    )


def _largest(good: Sequence[Outcome], rows: dict[str, Row]) -> str:
    """What the runs of `LARGEST` need."""
    from foretrain.device import preset

    runs = [
        f"{one.memory / 2**30:.1f} of {preset(one.device).memory / 2**30:.1f} GiB in {rows[one.id].precision} "
        f"({one.id}, {one.error:+.1%} in time)"
        for one in good
        if one.model == LARGEST and one.memory
    ]
    return f"{LARGEST} fits, as it did: it needs {' and '.join(runs)}." if runs else ""


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
