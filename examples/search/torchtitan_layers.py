"""torchtitan's configurations with fewer layers: ``--module torchtitan_layers --config llama3_70b_4`` has 4 of 80.

torchtitan's command line cannot say how many layers a model has. Its configurations are functions of a module that can
be one's own: with this one the smaller runs of ``foretrain search`` have fewer layers (llama3_70b.toml). It must be
importable: ``PYTHONPATH=examples/search``.
"""

from collections.abc import Callable

from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """Return the configuration ``name``: one of Llama 3's, ``_``, and how many layers to keep.

    Raises:
        AttributeError: there is no such configuration, or it does not have that many layers.
    """
    known, _, layers = name.rpartition("_")
    if not layers.isdecimal() or not hasattr(config_registry, known):
        raise AttributeError(name)
    made: Trainer.Config = getattr(config_registry, known)()
    if not 1 <= int(layers) <= len(made.model_spec.model.layers):
        raise AttributeError(f"{name}: {known} has {len(made.model_spec.model.layers)} layers")
    del made.model_spec.model.layers[int(layers) :]
    return lambda: made
