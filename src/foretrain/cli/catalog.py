"""``foretrain catalog``: the names that other commands take."""

from __future__ import annotations


def catalog() -> None:
    """List the models, GPUs, clusters and schedules known by name."""
    from rich.console import Console
    from rich.table import Table

    from foretrain.device import preset_names
    from foretrain.network.notation import PRESETS
    from foretrain.schedule import POLICIES
    from foretrain.units import format_size
    from foretrain.workload import zoo, zoo_models

    models = ", ".join(f"{name} ({format_size(zoo(name).size)})" for name in zoo_models())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("models", models)
    table.add_row("GPUs", ", ".join(preset_names()))
    table.add_row("clusters", ", ".join(f"{name}:N" for name in PRESETS) + ", or WORKERSxGPUSxDEVICE@RATE[,OPTION...]")
    for name, policy in POLICIES.items():
        knobs = ", ".join(f"{knob.name}={knob.write(knob.default)}" for knob in policy.knobs)
        table.add_row("schedules" if name == next(iter(POLICIES)) else "", f"{name}({knobs})" if knobs else name)
    Console(highlight=False).print(table)
