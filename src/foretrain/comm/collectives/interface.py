"""What a consumer of collectives sees: asynchronous operations, in place, on one-dimensional arrays."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class Work(Protocol):
    """One operation, which is under way or done."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return False if ``timeout`` seconds have passed before.

        Raises:
            LinkError: it failed; ``peer`` is the rank that was lost, None where these collectives were closed.
        """
        ...


class Collectives(Protocol):
    """Operations between all ranks, which all issue them in the same order; they complete in that order.

    ``values`` is a contiguous, writable, one-dimensional array of float32, float64, float16, int32, int64 or uint8, or
    of uint16 where ``bfloat16`` says that these are its bits. It belongs to the operation until that is done, but
    operations in flight may share it. Sums of 16-bit floats are computed in single precision and rounded once per hop.
    All ranks get the same bits, but a NaN's payload may differ.

    Attributes:
        rank: of this process.
        ranks: number of all.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def ranks(self) -> int: ...  # noqa: D102

    def all_reduce(self, values: NDArray[Any], *, bfloat16: bool = False) -> Work:
        """Replace ``values`` by their sum over all ranks."""
        ...

    def reduce_scatter(self, values: NDArray[Any], *, bfloat16: bool = False) -> Work:
        """Replace block ``rank`` of ``values`` by its sum over all ranks; the other blocks are undefined afterwards.

        The length is divisible by the number of ranks.
        """
        ...

    def all_gather(self, values: NDArray[Any], *, bfloat16: bool = False) -> Work:
        """Replace each block r of ``values`` by that of rank r; the length is divisible by the number of ranks."""
        ...

    def close(self) -> None:
        """End the thread and the sockets; operations under way fail. From any thread, any number of times."""
        ...
