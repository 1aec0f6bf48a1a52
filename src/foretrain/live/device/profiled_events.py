"""Events of a profile, with the methods of PyTorch's ``_KinetoEvent``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._autograd import DeviceType

from foretrain.live.device.profiled_trace import Launched
from foretrain.units import NANOSECOND


class HostEvent:
    """An event of the host, in virtual time."""

    def __init__(self, event: Any, clock: Callable[[int], int]) -> None:
        self._event = event
        self._start, self._end = clock(event.start_ns()), clock(event.end_ns())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def start_ns(self) -> int:
        """ns since the rank began."""
        return self._start

    def end_ns(self) -> int:
        """ns since the rank began."""
        return self._end

    def duration_ns(self) -> int:
        """From start to end."""
        return self._end - self._start


class KernelEvent:
    """An event of the GPU; ``number`` is of the function that launched it, 0 if none did."""

    def __init__(self, one: Launched, number: int) -> None:
        stream = one.cuda_stream
        self._told = _NOTHING | {
            "name": one.kernel,
            "activity_type": one.kind,
            "device_index": one.device,
            "device_resource_id": stream,
            "start_thread_id": stream,
            "end_thread_id": stream,
            "start_ns": one.begin // NANOSECOND,
            "end_ns": one.end // NANOSECOND,
            "duration_ns": one.end // NANOSECOND - one.begin // NANOSECOND,
            "correlation_id": one.number,
            "linked_correlation_id": number,
        }

    def __getattr__(self, name: str) -> Callable[[], Any]:
        try:
            value = self._told[name]
        except KeyError:
            raise AttributeError(name) from None
        return lambda: value


_NOTHING: dict[str, Any] = {
    "overload_name": "",
    "is_async": False,
    "external_id": 0,
    "shapes": [],
    "dtypes": [],
    "concrete_inputs": [],
    "kwinputs": {},
    "device_type": DeviceType.CUDA,
    "fwd_thread_id": 0,
    "stack": [],
    "scope": 0,
    "sequence_nr": -1,
    "flops": 0,
    "nbytes": 0,
    "cuda_elapsed_us": -1,
    "privateuse1_elapsed_us": -1,
    "is_user_annotation": False,
    "is_python_function": False,
    "is_hidden_event": False,
    "metadata_json": "",
    "extra_meta": {},
    "flow_id": 0,
    "flow_type": 0,
    "flow_start": False,
    "structured_input_shapes": [],
    "structured_input_strides": [],
    "python_id": -1,
    "python_parent_id": -1,
    "python_module_id": -1,
}
"""What an event of the GPU has to say of what only the host's have."""
