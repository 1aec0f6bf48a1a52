"""Recipes that others tuned and published: at which place they come among recipes around them, by `foretrain search`.

Each is of a run of accuracy/groundtruth-train.csv.

    python benchmarks/published_recipes.py                  prints what data/tuned.json keeps
    python benchmarks/published_recipes.py --search FOLDER  searches first, and keeps that; goes on from what FOLDER has
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "accuracy"))

from row_outcome import device_of, stack_of  # noqa: E402, its folder is no package
from rows import Row, read  # noqa: E402

from foretrain.cli.progress import searching  # noqa: E402
from foretrain.recipe_search import SearchResult, search  # noqa: E402
from foretrain.report.recipes import listed, objective_ratio  # noqa: E402

PLACES = HERE / "data/tuned.json"
"""Places of published recipes among those around them."""


@dataclass(frozen=True)
class Tuned:
    """A recipe that others tuned and published, and a space around it.

    Attributes:
        run: its id in accuracy/groundtruth-train.csv.
        space: whose values are of flags, with - for _.
        derived: names of the space for flags of the run without a value, which follow from the others.
        flags: further flags, with the name that they have the value of.
    """

    run: str
    space: dict[str, Any]
    derived: tuple[str, ...] = ()
    flags: tuple[tuple[str, str], ...] = ()


def fsdp(run: str, layers: int, **values: list[Any]) -> Tuned:
    """Return a space of torchtitan's ways, of any batch."""
    return Tuned(run, {
        "values": {"layers": layers, **values},
        "flags": {"sequence": "--sequence"},
        "require": ["tp <= gpus"],
        "memory": {"grows": ["batch"]},
        "short": {"layers": "2"},
        "short_from": 4.0,
        "tokens": "batch * sequence * world // tp",
        "steps": 2,
    })  # fmt: skip


def bridge(run: str, layers: int, **values: list[Any]) -> Tuned:
    """Return a space of Megatron's ways, of the published batch."""
    return Tuned(run, {
        "values": {"layers": layers, **values},
        "derived": {
            "dp": "world // (tp * pp)",
            "sequence_parallel": "'--sequence-parallel' if tp > 1 else ''",
            "overlap_pipeline": "'--overlap-pipeline' if vp > 1 else ''",
        },
        "flags": {"global_batch": "--global-batch", "sequence": "--sequence"},
        "require": [
            "world % (tp * pp) == 0", "tp <= gpus", "pp > 1 or vp == 1", "layers % (pp * vp) == 0",
            "global_batch % (dp * micro_batch) == 0", "global_batch // (dp * micro_batch) % pp == 0",
        ],
        "memory": {"grows": ["micro_batch"]},
        "batch": "global_batch",
        "short": {"global_batch": "dp * micro_batch * pp", "layers": "pp * vp"},
        "short_from": 4.0,
        "tokens": "global_batch * sequence",
        "steps": 2,
    }, ("sequence_parallel", "overlap_pipeline"), (("pieces", "tp"),))  # fmt: skip


TUNED = (
    fsdp("torchtitan-0004", 32, tp=[1, 2, 4, 8], batch=[1, 2, 3, 4], recompute=["none", "selective", "layers", "full"]),
    fsdp("torchtitan-0011", 80, tp=[1, 2, 4, 8], batch=[1, 2, 4, 8, 16, 24], recompute=["selective", "layers", "full"]),
    bridge("mbridge-0257", 80, tp=[2, 4, 8], pp=[2, 4, 8], vp=[1, 5], micro_batch=[1, 2], recompute=["none", "full"]),
)
"""torchtitan's Llama 3 of 8B and 70B, and Megatron-Bridge's of 70B."""


def script_of(tuned: Tuned, row: Row) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the script with places for the values of the space, and those of them that were published."""
    values = tuned.space["values"]
    switches = {f"--{name.replace('_', '-')}" for name in tuned.derived}
    words, own = [word for word in row.argv if word not in switches], {}
    for name, place in (*((name, name) for name in values), *tuned.flags):
        flag, usual = f"--{name.replace('_', '-')}", values.get(name)
        if flag not in words:
            words += [flag, str(usual[0] if isinstance(usual, list) else usual)]  # lists begin with the default
        at = words.index(flag) + 1
        own[name], words[at] = words[at], f"{{{place}}}"
    published = {name: own[name] for name, each in values.items() if isinstance(each, list)}
    return (str(HERE / "accuracy" / row.script), *words, *(f"{{{name}}}" for name in tuned.derived)), published


def place_of(result: SearchResult) -> dict[str, Any]:
    """Return at which place the user's own recipe comes among those with forecasts, and what the best would gain."""
    own = result.compared
    assert own is not None
    every, found = listed(result), result.found
    place = next((place for place, one in enumerate(every, 1) if one is own), None)
    ratio = objective_ratio(result, own) if place else None
    return {
        "published": str(own.recipe), "place": place, "recipes": len(found.candidates), "forecasts": len(every),
        "ratio": ratio and ratio.value, "error": ratio and ratio.error, "best": str(found.winner.recipe),
        "reason": own.reason, "date": str(datetime.date.today()),
    }  # fmt: skip


def search_tuned(folder: Path) -> None:
    """Search around the published recipes, and keep at which place these come."""
    rows = {row.id: row for row in read()[0]}
    for tuned in TUNED:
        row = rows[tuned.run]
        script, own = script_of(tuned, row)
        store = folder / tuned.run
        store.mkdir(parents=True, exist_ok=True)
        where = f"{row.cluster},device={device_of(row)},ranks=0-{row.ranks - 1}"
        with searching() as progress:
            result = search(
                script, tuned.space, where, factor=stack_of(row), store=store, compare_with=own, progress=progress
            )
        about = {"model": f"{row.model}, {row.precision}, {row.ranks} {row.gpu}"}
        every = tuned_results() | {tuned.run: about | place_of(result)}
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(every.items()))
        PLACES.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
        show_tuned({tuned.run: every[tuned.run]})


def tuned_results() -> dict[str, dict[str, Any]]:
    """Return the kept places of published recipes, by the run."""
    return json.loads(PLACES.read_text(encoding="utf-8")) if PLACES.exists() else {}


def show_tuned(every: dict[str, dict[str, Any]]) -> None:
    """Print the places of published recipes."""
    if not every:
        print("tuned: nothing is kept yet; python benchmarks/published_recipes.py --search FOLDER searches")
    for name, one in every.items():
        lost = f"{one['ratio']:.3f} ± {one['error']:.3f} times the best" if one["place"] else one["reason"]
        place = f"number {one['place']} of {one['recipes']}"
        print(
            f"tuned: {name}, {one['model']}: {one['published']} is {place}, {lost}; the best is {one['best']}",
            flush=True,
        )


def main() -> None:
    """Search if asked, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=Path, metavar="FOLDER", help="search around the recipes, and keep that")
    arguments = parser.parse_args()
    if arguments.search:
        search_tuned(arguments.search)
    else:
        show_tuned(tuned_results())


if __name__ == "__main__":
    main()
