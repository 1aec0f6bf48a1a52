"""``foretrain record script.py:function``: a workload from a real training step; and how a user's script is loaded."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from foretrain.cli.arguments import JsonFile, check_writable
from foretrain.cli.progress import Terminated, percent_bar
from foretrain.errors import ConfigError, ForetrainError, RecordError, unknown
from foretrain.files import stdout_console, write_json
from foretrain.schedule.monitor import blocks
from foretrain.torch_version import require_torch
from foretrain.units import format_size, format_time, to_seconds
from foretrain.workload.step import Gradient, Layer, Workload

CONTRACT = "return (model, step) or (model, step, batch), where step() runs one training step"
_SHOWN = 10


def record(
    target: Annotated[str, tyro.conf.arg(metavar="SCRIPT.py:FUNCTION")],
    /,
    out: Path = Path("workload.toml"),
    *,
    iterations: int = 10,
    warmup: int = 3,
    batch: int | None = None,
    plot: Path | None = None,
    json: JsonFile = None,
) -> None:
    """Record a workload from a step of PyTorch, Keras or JAX.

    FUNCTION takes no arguments and returns (model, step) or (model, step, batch), or an object or dict with these
    names. Of PyTorch, model is a torch.nn.Module, and step() runs forward, loss.backward() and optimizer.step() once,
    on one worker. Of Keras on TensorFlow, model is compiled, and step() trains it, as model.train_on_batch(x, y) does.
    Of JAX, model is the loss function, and step the tuple of its arguments, the parameters first.

    Args:
        target: a script and the function in it to call, e.g. train.py:setup.
        out: the workload file to write.
        iterations: measured steps; their median is recorded.
        warmup: steps before the measured ones.
        batch: samples per step, when FUNCTION does not return it.
        plot: also draw the release time of each gradient, as .html or .svg.
        json: write what was recorded; times in seconds, sizes in bytes.
    """
    from foretrain.workload.file import save

    _check_outputs(out, plot, json)
    with loaded(target) as function:
        name = target.rpartition(":")[2]
        recorder = _recorder(function(), name, batch)
        with percent_bar(f"recording {name}") as progress:
            workload = recorder(iterations=iterations, warmup=warmup, progress=progress)
    save(workload, out)
    if plot:
        _draw(workload, plot)
    _show(workload, [path for path in (out, plot) if path])
    if json:
        write_json(json, _numbers(workload))


def _recorder(result: object, name: str, batch: int | None) -> Callable[..., Workload]:
    """Return the framework's recorder with what the user's function returned, checked."""
    model, step, found = _parts(result, name)
    batch = found if batch is None else batch
    framework = _framework(model)
    if framework is None and callable(model) and isinstance(step, tuple) and step:
        framework = "jax"
    elif framework is None:
        raise RecordError(
            f"{name}() gave a {type(model).__name__} as its model, not a torch.nn.Module, a Keras model, or a loss of "
            f"JAX with a tuple of arguments; {CONTRACT}"
        )
    elif not callable(step) or _framework(step):
        raise RecordError(f"{name}() gave a {type(step).__name__} as its step, not a function; {CONTRACT}")
    if batch is None:
        raise ConfigError("batch", None, "is not known", f"give --batch, or return (model, step, batch) from {name}()")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ConfigError("batch", batch, "is not a positive number of samples", "write e.g. 64")
    if framework == "torch":
        require_torch()
        from foretrain.workload.recorder import record as record_torch

        own: Any = step, model
        return partial(record_torch, *own, batch=batch)
    import foretrain as ft

    plugin: Any = getattr(ft, framework)
    return partial(plugin.record, model, step, batch=batch)


def _framework(model: object) -> str | None:
    """Return the framework whose model it is, without importing one."""
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0]
        if (package, kind.__name__) in (("torch", "Module"), ("keras", "Model")):
            return package
    return None


def _parts(result: object, name: str) -> tuple[Any, Any, Any]:
    """Model, step and batch of a tuple, a mapping or an object with these names; batch may be None."""
    if isinstance(result, Mapping):
        parts = (result.get("model"), result.get("step"), result.get("batch"))
    elif isinstance(result, (tuple, list)) and not hasattr(result, "_fields"):
        parts = tuple(result) if len(result) in (2, 3) else ()
    else:
        parts = (getattr(result, "model", None), getattr(result, "step", None), getattr(result, "batch", None))
    model, step, batch = (*parts, None)[:3] if parts else (None, None, None)
    if model is None or step is None:
        raise RecordError(f"{name}() returned {_short(result)}; it must {CONTRACT}")
    return model, step, batch


def _short(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _check_outputs(out: Path, plot: Path | None, json: Path | None) -> None:
    """Validate output files before anything runs, because a recording may take minutes."""
    check_writable(out=out, plot=plot, json=json)
    if plot and plot.suffix not in (".html", ".svg"):
        raise ConfigError("plot", str(plot), "is neither .html nor .svg", "write e.g. releases.html")


def _draw(workload: Workload, plot: Path) -> None:
    from foretrain.files import write_atomically
    from foretrain.report.release_plot import staircase, staircase_svg

    if plot.suffix == ".svg":
        write_atomically(plot, staircase_svg(workload))
    else:
        write_atomically(plot, staircase(workload).to_html())


def _numbers(workload: Workload) -> dict[str, Any]:
    layers = [
        {
            "name": layer.name,
            **{name: to_seconds(getattr(layer, name)) for name in ("forward", "backward", "update")},
            "gradients": [gradient.size for gradient in workload.gradients if gradient.layer == index],
        }
        for index, layer in enumerate(workload.layers)
    ]
    return {
        "name": workload.name,
        "batch": workload.batch,
        "source": workload.source,
        "compute": to_seconds(workload.compute),
        "size": workload.size,
        "layers": layers,
    }


def _show(workload: Workload, written: list[Path]) -> None:
    console = stdout_console(markup=False)  # names may have brackets
    console.print(f"{workload.name}, batch {workload.batch}: {workload.source}\n")
    console.print(_table(workload))
    count = len(blocks([gradient.release for gradient in workload.gradients]))
    console.print(f"\nGradients leave the backward pass in {count} block{'s' if count != 1 else ''}.")
    for path in written:
        console.print(f"Wrote {path}")


def _table(workload: Workload) -> Table:
    """Return a table of the layers with the most computation, in forward order, the rest in one line, and totals."""
    gradients: list[list[Gradient]] = [[] for _ in workload.layers]
    for gradient in workload.gradients:
        gradients[gradient.layer].append(gradient)
    rows = list(zip(workload.layers, gradients, strict=True))
    ranked = sorted(range(len(rows)), key=lambda i: rows[i][0].forward + rows[i][0].backward, reverse=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for column in ("forward", "backward", "update", "gradients", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for index in sorted(ranked[:_SHOWN]):
        table.add_row(*_row(rows[index][0].name, [rows[index]]))
    if rest := [rows[index] for index in ranked[_SHOWN:]]:
        table.add_row(*_row(f"({len(rest)} smaller)", rest), style="dim")
    table.add_row(*_row("total", rows), style="bold")
    return table


def _row(name: str, rows: Sequence[tuple[Layer, list[Gradient]]]) -> tuple[str, ...]:
    times = [
        format_time(sum(getattr(layer, field) for layer, _ in rows)) for field in ("forward", "backward", "update")
    ]
    sizes = [gradient.size for _, gradients in rows for gradient in gradients]
    return (name, *times, str(len(sizes)), format_size(sum(sizes)))


_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_fresh = count()


@contextmanager
def loaded(target: str) -> Iterator[Callable[..., object]]:
    """Load the function that ``target``, such as ``train.py:setup``, names; it is usable inside the block.

    The script runs under a fresh module name, so that code under ``if __name__ == "__main__"`` does not run. Inside the
    block its folder leads ``sys.path`` and ``sys.argv`` has its name alone.

    Raises:
        ConfigError: the text, the file or the function is wrong.
        RecordError: the script raised, here or later in the block; has the script's own traceback.
    """
    path, name = _split(target)
    spec = spec_from_file_location(f"_foretrain_script_{next(_fresh)}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("target", target, "is not a Python file", "give a script that ends in .py")
    module = module_from_spec(spec)
    path_before, argv_before = sys.path[:], sys.argv[:]
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        with _errors_of(path):
            spec.loader.exec_module(module)
            yield _function(vars(module), name)
    finally:
        sys.path[:], sys.argv = path_before, argv_before
        del sys.modules[spec.name]


def _split(target: str) -> tuple[Path, str]:
    script, colon, name = target.rpartition(":")
    if not colon or not script or not name:
        raise ConfigError("target", target, "names no function", "write e.g. 'train.py:setup'")
    path = Path(script).expanduser().resolve()
    if not path.is_file():
        raise ConfigError("target", script, "is no file", f"there is none at {path}")
    return path, name


def _function(names: dict[str, object], name: str) -> Callable[..., object]:
    found = names.get(name)
    if found is None:
        raise unknown("target", name, (key for key, value in names.items() if callable(value) and key[0] != "_"))
    if not callable(found):
        raise ConfigError("target", name, f"is a {type(found).__name__}", "name a function")
    return found


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (ForetrainError, Terminated):
        raise
    except (Exception, SystemExit) as error:
        raise RecordError(f"{path.name} failed\n\n{_user_traceback(error)}") from error


def _user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package and of the import system."""
    shown = traceback.TracebackException.from_exception(error)
    kept = [f for f in shown.stack if not f.filename.startswith((_PACKAGE, "<frozen importlib"))]
    shown.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format()).rstrip()
