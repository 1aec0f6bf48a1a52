"""A runtime that reduces every gradient as soon as it is there, and remembers what was asked of it.

It takes the place of `attach` where a test is about who attaches what, and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import torch.distributed as dist

from foretrain.errors import ConfigError
from foretrain.plugins.torch import api
from foretrain.schedule.policies import spec


class Standin:
    refuse: str | None = None
    made: ClassVar[list[Standin]] = []
    asynchronous = False
    forecast = 1_010_000_000
    ledger = None

    def __init__(self, module, optimizers, **options):
        if self.refuse:
            raise ConfigError("model", "this one", self.refuse, "take another")
        self.module, self.optimizers, self.options = module, optimizers, options
        self.schedule, self.bound = spec(options["schedule"]), SimpleNamespace(time=10**9)
        self.events: list[str] = []
        self._syncing, self.shared = True, 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._reduce) for p in module.parameters()]
        Standin.made.append(self)

    def share_buffers(self):
        self.shared += 1
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0, group=self.options["group"])

    def _reduce(self, parameter):
        if self._syncing:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad, group=self.options["group"])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize(self):
        self.events.append("synchronize")

    def close(self):
        self._end("close")

    def __exit__(self, kind, error, trace):
        self._end(f"dropped {kind.__name__}")

    def _end(self, event):
        for hook in self._hooks:
            hook.remove()
        self.events.append(event)


@contextmanager
def instead(refuse: str | None = None) -> Iterator[list[Standin]]:
    """Inside, `attach` makes these and appends them to the list; ``refuse`` makes it refuse every model with that."""
    real, api.attach = api.attach, Standin  # pyright: ignore
    Standin.made, Standin.refuse = [], refuse
    try:
        yield Standin.made
    finally:
        api.attach = real
