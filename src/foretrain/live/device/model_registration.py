"""What a rank tells the conductor when a policy takes the exchange of a model's gradients over."""

from __future__ import annotations

import msgspec

from foretrain.comm.observation import StepProfile


class ModelAnnouncement(msgspec.Struct, frozen=True):
    """The payload of a record ``TASKS``; see `foretrain.live.event_log`.

    Attributes:
        model: its class, for people.
        schedule: policy and knobs, as `foretrain.schedule.spec` reads it.
        ranks: of the world, among which gradients are summed, in the group's order.
        names: of the parameters, by task.
        sizes: bytes, by task.
        seen: the steps that this rank has watched.
    """

    model: str
    schedule: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    seen: StepProfile

    def encode(self) -> bytes:
        """For `decode`, in another process."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(payload: bytes) -> ModelAnnouncement:
        """What `encode` wrote."""
        return msgspec.json.decode(payload, type=ModelAnnouncement)
