"""The median training step, as a workload.

# Note [Forward time]
A layer is a module that owns parameters. Its forward time runs from its call to the call of the next layer, so it
includes the activations and the loss in between, and the sum over layers is the whole forward pass.

# Note [Backward time]
The gradient that completes takes the time since the one before it completed, for the layer that uses it first. What
follows the last one belongs to the same layer, so that the sum over layers is the whole backward pass.

# Note [Medians]
Medians are taken of whole passes and of moments, and parts are shared out afterwards: medians of parts do not add up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median

from foretrain.errors import RecordError
from foretrain.units import Time
from foretrain.workload.step import Gradient, Layer, Workload
from foretrain.workload.step_log import Anatomy, StepLog


def summarize(
    steps: Sequence[StepLog],
    anatomy: Anatomy,
    sizes: Mapping[int, int],
    *,
    name: str,
    batch: int,
    unit: str,
    source: str,
) -> Workload:
    """The median of ``steps``. ``sizes`` has the bytes of each parameter's gradient. Warns of what it leaves out."""
    released = _released(steps, anatomy, sizes)
    homes = _homes(steps, anatomy, released)
    order = _order(steps, {module for modules in homes.values() for module in modules})
    place = {module: index for index, module in enumerate(order)}
    backward = _median(step.backward for step in steps)
    gradients = tuple(
        Gradient(
            name=anatomy.parameters[parameter],
            size=sizes[parameter],
            layer=min(place[module] for module in homes[parameter]),
            release=min(backward, _median(s.releases[parameter] for s in steps if parameter in s.releases)),
        )
        for parameter in released
    )
    update = _median(step.update or 0 for step in steps)
    times = zip(
        _forward_times(steps, order),
        _backward_times(backward, gradients, len(order)),
        share(update, _layer_sizes(gradients, len(order))),
        strict=True,
    )
    layers = tuple(Layer(anatomy.modules[module], *layer) for module, layer in zip(order, times, strict=True))
    return Workload(name, batch, layers, gradients, unit, source)


def share(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``weights``, as whole numbers that add up to it exactly."""
    if not any(weights):
        weights = [1] * len(weights)
    whole = sum(weights)
    bounds = (total * part // whole for part in accumulate(weights, initial=0))
    return [after - before for before, after in pairwise(bounds)]


def _released(steps: Sequence[StepLog], anatomy: Anatomy, sizes: Mapping[int, int]) -> list[int]:
    """Parameters with a gradient to exchange, in registration order."""
    counts = [sum(parameter in step.releases for step in steps) for parameter in range(len(anatomy.parameters))]
    lost = [name for index, name in enumerate(anatomy.parameters) if counts[index] and not sizes[index]]
    if lost:
        raise RecordError(
            f"{_listed(lost)}: the gradient is sparse, or another hook removed it during backward; "
            "record with dense gradients that stay until optimizer.step()"
        )
    unused = [n for i, n in enumerate(anatomy.parameters) if not counts[i] and i not in anatomy.frozen]
    if unused:
        warnings.warn(f"no gradient in any step, so not in the workload: {_listed(unused)}", stacklevel=4)
    irregular = [n for i, n in enumerate(anatomy.parameters) if 0 < counts[i] < len(steps)]
    if irregular:
        text = f"a gradient in only some of the {len(steps)} steps, medians are over those: {_listed(irregular)}"
        warnings.warn(text, stacklevel=4)
    return [parameter for parameter, count in enumerate(counts) if count]


def _homes(steps: Sequence[StepLog], anatomy: Anatomy, released: Sequence[int]) -> dict[int, set[int]]:
    """Return, for each parameter, the layers that use it: every owner that was called.

    A released parameter none of whose owners was called belongs to the nearest module around them that was:
    MultiheadAttention reads the weight of its out_proj and never calls it.
    """
    called = {module for step in steps for module, _ in step.segments}
    homes = {parameter: called.intersection(owners) for parameter, owners in enumerate(anatomy.owners)}
    for parameter in released:
        homes[parameter] = homes[parameter] or {_around(owner, called, anatomy) for owner in anatomy.owners[parameter]}
    return homes


def _around(module: int, called: set[int], anatomy: Anatomy) -> int:
    around = module
    while around not in called:
        if not around:
            raise RecordError(
                f"{anatomy.modules[module]} has gradients, but neither it nor a module around it was called; "
                "the step must call model(...), not a method of it"
            )
        around = anatomy.parents[around]
    return around


def _order(steps: Sequence[StepLog], layers: set[int]) -> list[int]:
    """``layers`` in the order of first use: by the median of the position of their first call in each step."""
    positions: dict[int, list[int]] = {}
    for step in steps:
        first: dict[int, int] = {}
        for position, (module, _) in enumerate(step.segments):
            first.setdefault(module, position)
        for module in first.keys() & layers:
            positions.setdefault(module, []).append(first[module])
    return sorted(positions, key=lambda module: (median(positions[module]), module))


def _forward_times(steps: Sequence[StepLog], order: Sequence[int]) -> list[Time]:
    """See Note [Forward time] and Note [Medians]."""
    spent = [_spent(step, set(order)) for step in steps]
    total = _median(sum(time for _, time in step.segments) for step in steps)
    return share(total, [_median(one.get(module, 0) for one in spent) for module in order])


def _spent(step: StepLog, layers: set[int]) -> dict[int, Time]:
    """Forward time by layer; what precedes the first layer is the first layer's."""
    layer = next(module for module, _ in step.segments if module in layers)
    spent: dict[int, Time] = {}
    for module, time in step.segments:
        layer = module if module in layers else layer
        spent[layer] = spent.get(layer, 0) + time
    return spent


def _backward_times(backward: Time, gradients: Sequence[Gradient], layers: int) -> list[Time]:
    """See Note [Backward time]. Gradients that complete at once are taken deepest layer first, as backward goes."""
    times = [0] * layers
    done, last = 0, 0
    for gradient in sorted(gradients, key=lambda gradient: (gradient.release, -gradient.layer)):
        times[gradient.layer] += gradient.release - done
        done, last = gradient.release, gradient.layer
    times[last] += backward - done
    return times


def _layer_sizes(gradients: Sequence[Gradient], layers: int) -> list[int]:
    sizes = [0] * layers
    for gradient in gradients:
        sizes[gradient.layer] += gradient.size
    return sizes


def _median(values: Iterable[int]) -> int:
    return int(median(values))


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
