"""``foretrain tolerance script.py:function``: the packet loss that a model tolerates in training."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro

from foretrain.cli.arguments import JsonFile, ShareText, check_writable, command_line, write_outputs
from foretrain.cli.progress import progress_bar
from foretrain.cli.record import loaded
from foretrain.errors import MissingExtra
from foretrain.files import stdout_console, write_json
from foretrain.torch_version import require_torch
from foretrain.units import parse_share

_WAYS = {"ps": "parameter_server", "halving-doubling": "halving_doubling"}


def tolerance(
    target: Annotated[str, tyro.conf.arg(metavar="SCRIPT.py:FUNCTION")],
    /,
    *,
    grid: tuple[ShareText, ...] = ("0", "0.5%", "1%", "2%", "3.5%", "5%", "10%", "20%", "40%"),
    seeds: int = 5,
    rounds: int = 300,
    workers: int = 4,
    exchange: Literal["transpose", "ring", "halving-doubling", "ps"] = "transpose",
    back: Literal["lossy", "reliable"] = "reliable",
    small: Literal["lossy", "reliable"] = "reliable",
    gap: Literal["zero", "held"] = "zero",
    losses: Literal["packet", "layer", "magnitude"] = "packet",
    margin: float = 0.01,
    more: float = 2.0,
    evaluations: int = 20,
    payload: int = 1460,
    html: Path | None = None,
    json: JsonFile = None,
) -> None:
    """Find the packet loss that a model tolerates, by training it.

    FUNCTION takes a seed and returns an object or a dict with model, optimizer, batches, loss(model, batch) and
    evaluate(model), where more is better. The model is trained at every p of the grid, by data-parallel workers in this
    process that lose packets of gradients, and compared with trainings without losses. Losses are those of BoundedLoss
    with its defaults, so that its tolerance is the p that is found.

    Args:
        target: a script and the function in it to call, e.g. train.py:build.
        grid: values of p, the share of each worker's contribution that sums may lose, ascending from 0.
        seeds: number of trainings at each p.
        rounds: rounds of a training, one batch each.
        workers: number of data-parallel workers; a batch is split among them.
        exchange: who sums what; ps is a server. A hop loses p; of a ring p/(N − 1), of halving-doubling p/log2 N.
        back: whether sums, or a server's parameters, may be lost on the way back, too.
        small: whether biases, norms, tensors of up to 16 KiB and the first 10 rounds may lose packets, too.
        gap: replacement for a lost sum of an all-reduce: zero, or the partial sum that the rank holds.
        losses: packets that are lost first: any, those of front layers, or those of small magnitude.
        margin: largest acceptable loss of accuracy.
        more: factor by which a training may be longer to reach the same accuracy.
        evaluations: number of evaluations within the rounds.
        payload: payload of a packet, bytes.
        html: write an interactive page.
        json: write the numbers.
    """

    check_writable(html=html, json=json)
    if html and not find_spec("jinja2"):
        raise MissingExtra("jinja2", "report", "an HTML page")
    require_torch("a tolerance profile")
    from foretrain.loss_tolerance.replicas import LossyExchange
    from foretrain.loss_tolerance.tagging import Tagging
    from foretrain.loss_tolerance.tolerance import ToleranceSettings, profile
    from foretrain.report.tolerance import page, summary

    way = LossyExchange(cast(Any, _WAYS.get(exchange, exchange)), workers, back, small, gap, Tagging(losses), payload)
    shares = tuple(parse_share(text, f"grid[{index}]") for index, text in enumerate(grid))
    settings = ToleranceSettings(way, shares, seeds, rounds, evaluations, more, margin)
    with loaded(target) as function:
        name = target.rpartition(":")[2]
        with progress_bar(name) as progress:
            found = profile(function, settings, name=name, progress=progress)
    console = stdout_console()
    console.print(summary(found))
    write_outputs(
        console,
        (html, lambda path: page(found, path, command_line())),
        (json, lambda path: write_json(path, found.to_dict())),
    )
