"""The zoo: well-known models as workloads, from their architecture and a device's rates; needs no torch.

net.py         the builder: follows shapes, counts parameters, multiplications and memory traffic
convnets.py …  one file per family, written like the model's own definition
cost.py        architecture + device + batch → times and gradients

Here are the names, with the defaults that papers or usual benchmarks train the models with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrain import errors
from foretrain.device import PRECISIONS, Device, Precision, preset
from foretrain.errors import ConfigError
from foretrain.workload.models import convnets, transformers
from foretrain.workload.models.net import Optimizer, gradients_of, layers_of, rescaled
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretrain.workload.models.net import Architecture


__all__ = ["zoo", "zoo_models"]


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model of images, trained with SGD and momentum."""

    build: Callable[[], Architecture]
    batch: int


@dataclass(frozen=True, slots=True)
class SequenceModel:
    """A model of token sequences, trained with Adam.

    Attributes:
        sequence: tokens of a sample unless the caller says otherwise.
        positions: the longest sequence its table of learnt positions allows; None when positions are computed.
        precisions: the first one the device has is the default.
    """

    build: Callable[[int], Architecture]
    batch: int
    sequence: int
    positions: int | None = None
    precisions: tuple[Precision, ...] = ("fp32",)


_MODELS: dict[str, ImageModel | SequenceModel] = {
    "alexnet": ImageModel(convnets.alexnet, batch=128),
    "vgg16": ImageModel(convnets.vgg16, batch=32),
    "vgg19": ImageModel(convnets.vgg19, batch=32),
    "resnet50": ImageModel(convnets.resnet50, batch=64),
    "resnet101": ImageModel(convnets.resnet101, batch=64),
    "resnet152": ImageModel(convnets.resnet152, batch=32),
    "inception_v3": ImageModel(convnets.inception_v3, batch=64),
    "bert_base": SequenceModel(transformers.bert_base, batch=32, sequence=128, positions=transformers.BERT_POSITIONS),
    "bert_large": SequenceModel(transformers.bert_large, batch=16, sequence=128, positions=transformers.BERT_POSITIONS),
    "gpt2": SequenceModel(transformers.gpt2, batch=4, sequence=1024, positions=transformers.GPT2_POSITIONS),
    "transformer_big": SequenceModel(transformers.transformer_big, batch=128, sequence=32),
    "llama3_8b": SequenceModel(transformers.llama3_8b, batch=1, sequence=8192, precisions=("bf16", "fp16", "fp32")),
}


def zoo_models() -> tuple[str, ...]:
    """Return the names that `zoo` knows."""
    return tuple(_MODELS)


def zoo(
    name: str,
    *,
    batch: int | None = None,
    device: str | Device = "V100",
    precision: Precision | None = None,
    throughput: float | None = None,
    sequence: int | None = None,
) -> Workload:
    """Return one training step of a well-known model on one GPU.

    Args:
        name: as in `zoo_models`; case, ``-`` and ``_`` do not matter (``"ResNet-50"``).
        batch: samples per GPU and step; each model has a usual default.
        device: a GPU or the name of one.
        precision: of computation and gradients; fp32 by default, for Llama bf16 or the nearest the device has.
        throughput: measured samples per second of one GPU that computes alone, optimizer included. All times are
            rescaled to it, which keeps their proportions and removes the cost model's error on the whole step.
        sequence: tokens per sample of a language model.

    Raises ConfigError for an unknown name and for a value that makes no sense. Whether the model fits into the
    device's memory is not checked.
    """
    canonical = _canonical(name)
    model = _MODELS[canonical]
    gpu = device if isinstance(device, Device) else preset(device)
    samples = model.batch if batch is None else _positive("batch", batch, "64")
    number = _precision(model, gpu, precision)
    net = _build(canonical, model, sequence)
    images = isinstance(model, ImageModel)
    optimizer: Optimizer = "sgd" if images else "adam"
    layers = layers_of(net, gpu, number, samples, optimizer)
    source = f"cost model of {gpu.name} in {number}, {optimizer}"
    if throughput is not None:
        layers = rescaled(layers, samples, _rate(throughput))
        source += f", rescaled to {throughput:g} samples/s"
    gradients = gradients_of(net, layers, number)
    return Workload(canonical, samples, layers, gradients, "images" if images else "sequences", source)


def _canonical(name: str) -> str:
    folded = {_fold(known): known for known in _MODELS}
    found = folded.get(_fold(name)) if isinstance(name, str) else None
    if found is None:
        raise errors.unknown("model", name, _MODELS)
    return found


def _fold(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")


def _build(name: str, model: ImageModel | SequenceModel, sequence: int | None) -> Architecture:
    if isinstance(model, ImageModel):
        if sequence is not None:
            raise ConfigError("sequence", sequence, f"means nothing to {name}, a model of images", "leave it out")
        return model.build()
    tokens = model.sequence if sequence is None else _positive("sequence", sequence, str(model.sequence))
    if model.positions is not None and tokens > model.positions:
        raise ConfigError("sequence", tokens, f"is longer than {name} can be", f"at most {model.positions} tokens")
    return model.build(tokens)


def _precision(model: ImageModel | SequenceModel, gpu: Device, wanted: Precision | None) -> Precision:
    if wanted is None:
        usual: tuple[Precision, ...] = model.precisions if isinstance(model, SequenceModel) else ("fp32",)
        return next(precision for precision in usual if precision in gpu.precisions)
    if wanted not in PRECISIONS:
        raise errors.unknown("precision", wanted, PRECISIONS)
    gpu.arithmetic(wanted)
    return wanted


def _positive(field: str, value: object, example: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(field, value, "is not a positive whole number", f"write e.g. {example}")
    return value


def _rate(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError("throughput", value, "is not a positive finite number", "write e.g. 360 (samples per second)")
    return value
