"""The packages in layers as SVG, read from the import-linter contract of pyproject.toml."""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

from foretrain.report.document import FONT, GREY, INK, LINE

CONTRACTS = Path(__file__).parent.parent / "pyproject.toml"
TORCH = {"recipe_search", "lab", "live", "launch", "loss_tolerance", "operator_benchmark", "plugins"}
"""Packages that import PyTorch."""
HOLDS = {
    "cli": "one file a command",
    "explore": "a page on loopback that answers at once",
    "report": "tables, pages, pictures, traces of what was found",
    "recipe_search": "recipes of a script, searched by simulation",
    "lab": "hosts with slow links on this machine; real steps",
    "live": "unmodified scripts on simulated GPUs",
    "launch": "foretrain run: torchrun, DDP replaced, servers",
    "experiments": "compare, sweep, grid, advice",
    "doctor": "what hosts lack, how they reach each other",
    "loss_tolerance": "how much loss a model tolerates",
    "operator_benchmark": "operators on a real GPU",
    "plugins": "PyTorch's side of attach: hooks, updates",
    "comm": "the wires: coordinator, parameter server",
    "planner": "search of knobs, choice of a schedule, tuner",
    "simulation": "policies over a simulated network",
    "trace": "timelines",
    "network": "topologies, routing, flows, packets",
    "collective": "collectives as DAGs; NCCL's choices",
    "schedule": "policies, pure; the optimum T*",
    "workload": "one training step, recorded or from the zoo",
    "torch_version": "releases of PyTorch, what differs",
    "device": "what an operator takes on a GPU",
    "engine": "drives one policy in one world",
    "tasks": "tasks, chunks, operations",
    "units": "time, sizes, rates",
    "files": "files written whole or not at all",
    "parent_death": "a child ends with its parent",
    "errors": "the tree of errors",
}
WIDTH, ROW, TOP, LEFT = 860, 30, 64, 16


def layers() -> list[list[str]]:
    """Return the packages of each layer, from the top, as the contract lists them."""
    contracts = tomllib.loads(CONTRACTS.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    stages = next(contract for contract in contracts if contract["id"] == "stages")
    return [[name.strip().removeprefix("foretrain.") for name in line.split("|")] for line in stages["layers"]]


def svg() -> str:
    """Draw a row for each layer: its packages, and what each holds."""
    rows = layers()
    height = TOP + ROW * len(rows) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" font-family="{FONT}" font-size="13" fill="{INK}">',
        "<title>Packages of foretrain in layers</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">Packages import only what stands below them</text>',
        f'<rect x="{LEFT}" y="38" width="12" height="12" rx="2" fill="#dbeafe"/>',
        f'<text x="{LEFT + 18}" y="49" fill="{GREY}">imports PyTorch</text>',
        f'<rect x="{LEFT + 130}" y="38" width="12" height="12" rx="2" fill="#f1f5f9"/>',
        f'<text x="{LEFT + 148}" y="49" fill="{GREY}">imports no framework</text>',
    ]
    for row, packages in enumerate(rows):
        wide = (WIDTH - 2 * LEFT) / len(packages)
        for column, package in enumerate(packages):
            x, y = LEFT + column * wide, TOP + row * ROW
            fill = "#dbeafe" if package in TORCH else "#f1f5f9"
            place = f'x="{x:.1f}" y="{y}" width="{wide - 3:.1f}" height="{ROW - 3}" rx="3"'
            parts.append(f'<rect {place} fill="{fill}" stroke="{LINE}"/>')
            size = 13 if len(packages) < 3 else 10
            about = f'<tspan fill="{GREY}" dx="7">{escape(HOLDS[package])}</tspan>'
            name = f'<tspan font-weight="600">{package}</tspan>'
            parts.append(f'<text x="{x + 8:.1f}" y="{y + 18}" font-size="{size}">{name}{about}</text>')
    return "\n".join([*parts, "</svg>", ""])
