"""DeepEP's dispatch and combine (its `Buffer`) as the bytes that its kernels send.

A token goes once to each rank that has any of its experts, and between servers once to each server: to the rank there
with the sender's place, which passes it on over NVLink. `combine` sends the same backwards.

# Note [Rows of a rank]
Which tokens chose which experts has no values in a simulation, only how many tokens each expert gets. Of T tokens with
k choices each, n₁, n₂, … for the experts of a rank, those reach the rank that do not pass by all of its experts.
Choices are drawn without replacement: a token that has not chosen the experts before one chooses it with probability
(n/T) / (1 − Σ nᵢ/(kT)), the sum over those before. Equal loads of E experts, m of them on the rank, give
1 − C(E−m, k) / C(E, k), as it must be. A server is a rank with the experts of all its GPUs. Between servers all ranks
are taken to have this rank's loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import distributed

from foretrain.errors import ConfigError
from foretrain.live.device.stand_ins import submodule

__version__ = "1.2.1"

Tensor = torch.Tensor
topk_idx_t = torch.int64
_TOP, _SCALES = 128, 128  # choices and scales of a token that buffers have room for
_CONFIGS = {  # by ranks: tokens sent and received at once over NVLink, and between servers; as DeepEP recommends
    **{2: ((24, 256, 6, 128), (10, 256, 6, 128)), 4: ((6, 256, 6, 128), (9, 256, 6, 128))},
    **{8: ((6, 256, 6, 128), (4, 256, 6, 128)), 16: ((36, 288, 20, 128), (4, 288, 12, 128))},
    **dict.fromkeys((24, 32, 48, 64), ((32, 288, 8, 128), (1, 288, 8, 128))),
    **{96: ((20, 480, 12, 128), (1, 480, 8, 128)), 128: ((20, 560, 12, 128), (1, 560, 8, 128))},
    **{144: ((32, 720, 12, 128), (2, 720, 8, 128)), 160: ((28, 720, 12, 128), (2, 720, 8, 128))},
}


def rows(tokens: int, loads: Sequence[int], top: int) -> int:
    """Return how many of ``tokens``, with ``top`` choices each, reach a rank whose experts have these loads.

    See Note [Rows of a rank].
    """
    if not tokens or not any(loads):
        return 0
    past, before = 1.0, 0
    for load in loads:
        left = top * tokens - before
        past *= max(0.0, 1 - load * top / left) if left > 0 else 1.0
        before += load
    return min(max(round(tokens * (1 - past)), max(loads)), sum(loads))


class EventHandle:
    """Event recorded on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def current_stream_wait(self) -> None:
        """Have the current stream wait for it."""
        self._event.wait()


class EventOverlap:
    """Event after which results are there; as a context, waited for at its end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Have the current stream wait for the event."""
        assert self.event is not None, "there is no event without async_finish"
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


class Config(NamedTuple):
    """SMs of the kernels, and how many tokens are sent and received at once."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of a buffer for NVLink."""
        peers, servers = min(num_ranks, 8), max(num_ranks // 8, 1)
        token = hidden_bytes + 8 + 12 * _TOP + 4 * _SCALES
        size = self.num_sms // 2 * peers * (4 * (2 * servers + 3) + self.num_max_nvl_chunked_recv_tokens * token)
        return -(-size // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of a buffer for what goes between servers; 0 within one."""
        if num_ranks <= 8:
            return 0
        send = self.num_max_rdma_chunked_send_tokens
        most = -(-self.num_max_rdma_chunked_recv_tokens // send) * send
        token = hidden_bytes + 8 + 12 * _TOP + 4 * _SCALES + 16
        size = self.num_sms // 2 * (num_ranks // 8) * 2 * (72 + most * token)
        return -(-size // 128) * 128


class Handle(NamedTuple):
    """State that `Buffer.dispatch` leaves for `Buffer.combine`, and for gradients.

    Attributes:
        tokens: of this rank.
        received: rows from each rank.
        sent: rows to each rank; between servers those of all ranks, one rank after the other.
        back: rows to each rank in `Buffer.combine`, as ``sent``.
    """

    tokens: int
    received: list[int]
    sent: list[int]
    back: list[int]


class Buffer:
    """Communication of tokens and experts among the ranks of ``group``."""

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        **_: Any,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._servers = _servers(distributed.get_process_group_ranks(group), torch.cuda.device_count())
        self._memory: Tensor | None = torch.empty(num_nvl_bytes + num_rdma_bytes, dtype=torch.uint8, device="cuda")
        self._byte = torch.empty(1, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()

    def destroy(self) -> None:
        """Free the buffer."""
        self._memory = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether there are kernels for Hopper: yes."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set on how many SMs kernels run: an even number."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event on the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of the kernels."""
        return self._stream

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return what DeepEP recommends for `dispatch`."""
        assert num_ranks in _CONFIGS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *_CONFIGS[num_ranks][0])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return what DeepEP recommends for `combine`."""
        assert num_ranks in _CONFIGS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *_CONFIGS[num_ranks][1])

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,  # (tokens, choices)
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """Return tokens per rank, per server, and per expert; which go to which rank; and an event.

        Only those per expert have values.
        """

        def count() -> Tensor:
            return topk_idx.flatten().bincount(minlength=num_experts)

        per_expert, event = self._run(count, previous_event, async_finish)
        per_rank = topk_idx.new_empty(self.group_size, dtype=torch.int32)
        per_server = per_rank.new_empty(len(self._servers)) if len(self._servers) > 1 else None
        within = topk_idx.new_empty(len(topk_idx), self.group_size, dtype=torch.bool)
        return per_rank, per_server, per_expert, within, event

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],  # (tokens, hidden), or in FP8 with scales (tokens, hidden / 128)
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """Send tokens to the ranks of their experts, with a ``handle`` to those of an earlier call.

        Return what was received: tokens, choices, weights; tokens of each own expert, a handle, and an event. The host
        waits for the numbers of tokens unless it has a handle.
        """
        if num_worst_tokens:
            raise ConfigError("num_worst_tokens", num_worst_tokens, "is not simulated", "leave it out")
        parts = x if isinstance(x, tuple) else (x,)
        per_expert: list[int] | None = None
        if handle is None:
            assert num_tokens_per_expert is not None, "dispatch needs num_tokens_per_expert, or a handle"
            assert topk_idx is not None, "a simulated dispatch needs topk_idx, or a handle"
            handle, per_expert = self._exchange_counts(len(parts[0]), num_tokens_per_expert, topk_idx.shape[1])
        given = *parts, topk_idx, topk_weights
        arriving = [None if one is None else one.new_empty(sum(handle.received), *one.shape[1:]) for one in given]
        if per_expert is not None and topk_idx is not None and any(per_expert):  # as many are not -1
            received: Any = arriving[-2]
            received.view(-1).scatter_(0, received.new_empty(1).expand(sum(per_expert)), 1)
        _, event = self._send(given, arriving, handle.sent, handle.received, previous_event, async_finish)
        if per_expert is not None:
            per_expert = [-(-count // expert_alignment) * expert_alignment for count in per_expert]
        *made, choices, weights = arriving
        tokens = tuple(made) if isinstance(x, tuple) else made[0]
        return tokens, choices, weights, per_expert, None if per_expert is None else handle, event

    def combine(
        self,
        x: Tensor,  # (received, hidden)
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, EventOverlap]:
        """Send rows back to the ranks of their tokens, and sum there; return sums, those of weights, and an event."""
        if len(x) != sum(handle.received):
            raise ValueError(f"combine: x has {len(x)} rows, and dispatch has received {sum(handle.received)}")
        given = x, topk_weights
        made = [None if one is None else one.new_empty(handle.tokens, *one.shape[1:]) for one in given]
        _, event = self._send(given, made, handle.back, [handle.tokens], previous_event, async_finish)
        return made[0], made[1], event

    internode_dispatch, internode_combine = dispatch, combine

    def _exchange_counts(self, tokens: int, per_expert: Tensor, top: int) -> tuple[Handle, list[int]]:
        """Return the handle, and how many tokens each of this rank's experts gets."""
        ranks = self.group_size
        here = len(per_expert) // ranks
        sent = torch.cat((per_expert.new_full((ranks, 1), tokens), per_expert.view(ranks, here)), 1)
        arriving = torch.empty_like(sent)
        distributed.all_to_all_single(arriving, sent, group=self.group)
        own, received = torch.stack((sent, arriving)).tolist()
        to_ranks = [rows(tokens, loads, top) for _, *loads in own]
        from_ranks = [rows(count, loads, top) for count, *loads in received]
        if len(self._servers) == 1:
            sent_rows, back = to_ranks, from_ranks
        else:
            to_servers = [rows(tokens, [n for k in ranks_ for n in own[k][1:]], top) for ranks_ in self._servers]
            matrix = between_servers(to_ranks, to_servers, self._servers)
            sent_rows = [count for row in matrix for count in row]
            back = [count for column in zip(*matrix, strict=True) for count in column]
        totals = [sum(counts) for counts in list(zip(*received, strict=True))[1:]]
        return Handle(tokens, from_ranks, sent_rows, back), totals

    def _send(
        self,
        given: Sequence[Tensor | None],
        results: Sequence[Tensor | None],
        sent: Sequence[int],
        received: Sequence[int],
        previous_event: EventOverlap | None,
        async_finish: bool,
    ) -> tuple[None, EventOverlap]:
        """Launch an all-to-all of so many rows of what is given."""
        each = sum(one.element_size() * one.shape[1:].numel() for one in given if one is not None)
        splits, arriving = ([each * count for count in counts] for counts in (sent, received))
        here = sum(splits) if len(splits) == self.group_size else sum(splits) // self.group_size

        def launch() -> None:
            target, source = self._byte.expand(sum(arriving)), self._byte.expand(here)
            distributed.all_to_all_single(target, source, arriving, splits, self.group)

        made, event = self._run(launch, previous_event, async_finish)
        if async_finish:
            for one in (*given, *results):
                if one is not None:
                    one.record_stream(self._stream)
        return made, event

    def _run(
        self, launch: Callable[[], Any], previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[Any, EventOverlap]:
        """Launch on the stream of communication, after the event, or what the current stream does."""
        current = torch.cuda.current_stream()
        after = None if previous_event is None else previous_event.event
        with torch.cuda.stream(self._stream):
            if after is None:
                self._stream.wait_stream(current)
            else:
                after.current_stream_wait()
            made = launch()
            event = EventHandle() if async_finish else None
        if event is None:
            current.wait_stream(self._stream)
        return made, EventOverlap(event)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"deep_ep.Buffer.{name}: foretrain's stand-in for deep_ep has dispatch and combine, and no kernels of low "
            "latency; use those"
        )


def between_servers(
    to_ranks: Sequence[int], to_servers: Sequence[int], servers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return how many rows each rank sends to each: to other servers, and on over NVLink what came from them.

    Args:
        to_ranks: of one rank's tokens, how many each rank is to get.
        to_servers: the same of servers.
        servers: ranks of each.
    """
    matrix = [[0] * len(to_ranks) for _ in to_ranks]
    for server in servers:
        for place, rank in enumerate(server):
            for other, target, count in zip(servers, (one[place] for one in servers), to_servers, strict=True):
                if other is not server:
                    matrix[rank][target] = count
            for target in server:
                matrix[rank][target] = len(servers) * to_ranks[target]
    return matrix


def _servers(members: Sequence[int], gpus: int) -> list[list[int]]:
    """Return the places in a group of the members on each server."""
    found: dict[int, list[int]] = {}
    for place, rank in enumerate(members):
        found.setdefault(rank // gpus, []).append(place)
    servers = list(found.values())
    if len({len(server) for server in servers}) > 1:
        counts = ", ".join(str(len(server)) for server in servers)
        raise ConfigError("deep_ep.Buffer group", counts, "ranks on its servers", "give each server as many")
    return servers


submodule(f"{__name__}.utils", EventHandle, EventOverlap)
submodule(f"{__name__}.utils.event", EventHandle, EventOverlap)
