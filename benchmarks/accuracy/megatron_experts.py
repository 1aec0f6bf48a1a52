"""Layers with experts as Megatron-Core builds them: a router, two exchanges of tokens, and the experts between them.

Tokens are sorted by expert, sent to the ranks that have the experts (all-to-all), sorted there, multiplied, and sent
back. Where tensor-parallel ranks split each expert (`Way.parts`), they gather each other's tokens in between. What an
expert gives is weighted after its activation, as since Megatron-Core 0.12. Experts are named by their numbers among
all, so that initial values do not depend on who has which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import float8_layers
import megatron_model
import megatron_servers
import torch
import torch.distributed as dist
from megatron_model import Norm, Shape, Way, again, attention_of, blocks
from megatron_servers import Pick, Put
from tensor_exchange import done, gather, scatter_sum
from tensor_layers import Alone, Column, Row, Split, add_product, parameter, scaled
from torch import Tensor, nn
from torch.distributed import ProcessGroup


# Megatron and Transformer Engine have kernels for these; `fuse` makes kernels of them here.
def weighted_activation(x: Tensor, weights: Tensor, kind: str) -> Tensor:
    """What an expert does between its products to (rows, outputs), times the weights of the rows."""
    return (megatron_model.activation(x, kind).float() * weights.unsqueeze(1)).to(x.dtype)


def sum_of_choices(rows: Tensor, places: Tensor) -> Tensor:
    """The sum over each token's choices of the rows at their ``places``, (tokens, choices); -1 for none."""
    found = rows[places.clamp(min=0)].float() * (places >= 0).unsqueeze(-1)
    return found.sum(1).to(rows.dtype)


def fuse() -> None:
    """Lets the compiler make one kernel of each of the functions above."""
    megatron_servers.fuse()
    for function in (weighted_activation, sum_of_choices):
        globals()[function.__name__] = torch.compile(function)


class _Copy(torch.autograd.Function):
    """A row for each choice of a token: the row ``tokens`` of each; gradients of the same token add up."""

    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_of_choices(gradient, *ctx.saved_tensors), None, None


class _Add(torch.autograd.Function):
    """The opposite of `_Copy`."""

    @staticmethod
    def forward(ctx, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return sum_of_choices(rows, places)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Sort(torch.autograd.Function):
    """Rows in another order, and back."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of ``way.experts``, ``sent`` to each, ``received`` from each."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: Sequence[int], received: Sequence[int], way: Way) -> Tensor:
        ctx.counts, ctx.way = (sent, received), way
        return exchange(rows, sent, received, way)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.counts
        return exchange(gradient, received, sent, ctx.way), None, None, None


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], way: Way) -> Tensor:
    if way.experts is None or way.experts.size() == 1:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    rows = rows.contiguous()
    if way.turns is None:
        dist.all_to_all_single(out, rows, list(received), list(sent), way.experts)
        return out
    work = dist.all_to_all_single(out, rows, list(received), list(sent), way.experts, async_op=True)
    way.turns.hand_over()
    return done((out, [work]))


class _Gather(torch.autograd.Function):
    """The rows of all ranks; backward, the sum of what they have, to this rank's part."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return done(gather(rows, group))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return done(scatter_sum(gradient, ctx.group)), None


class _Scatter(torch.autograd.Function):
    """The opposite of `_Gather`."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return done(scatter_sum(rows, group))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return done(gather(gradient, ctx.group)), None


class _Grouped(torch.autograd.Function):
    """Rows of each expert, one expert's after another's, times its matrix: (experts, outputs, inputs)."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: nn.Parameter, counts: Sequence[int], ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.weight, ctx.counts = weight, counts
        return torch._grouped_mm(rows, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, ends), weight = ctx.saved_tensors, ctx.weight
        gradient = gradient.contiguous()
        of_rows = torch._grouped_mm(gradient, weight, ends)
        # Transformer Engine's products of gradients add to `main_grad`, which one grouped operator cannot.
        parts = zip(weight.main_grad, gradient.split(ctx.counts), rows.split(ctx.counts), strict=True)
        for main, of_output, x in parts:
            add_product(main, of_output, x)
        weight.arrived()
        return of_rows, None, None, None


class _GroupedFloat8(torch.autograd.Function):
    """`_Grouped` in float8: each expert's rows have a scale, and a product, of their own.

    For the backward pass it keeps them in float8 and transposed, or where rows are made again as they are
    (``save_original_input``).
    """

    @staticmethod
    def forward(
        ctx,
        rows: Tensor,
        weight: nn.Parameter,
        counts: Sequence[int],
        scaled: Sequence[float8_layers.Scaled],
        made_again: bool,
    ) -> Tensor:
        ctx.weight, ctx.counts, ctx.scaled, ctx.made_again = weight, counts, scaled, made_again
        out, kept = rows.new_empty(len(rows), weight.shape[1]), list[Tensor]()
        for one, matrix, x, to in zip(scaled, weight, rows.split(counts), out.split(counts), strict=True):
            if made_again:
                here, of_x = one.cast("input", x, float8_layers.FORWARD)
            else:
                here, of_x, turned = one.cast_and_turn("input", x, float8_layers.FORWARD)
                kept += turned, of_x
            there, of_matrix, _ = one.weight(matrix)
            float8_layers.into(of_x, there, of_matrix)(here, to)
        ctx.save_for_backward(*([rows] if made_again else kept))
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, counts, kept = ctx.weight, ctx.counts, ctx.saved_tensors
        if ctx.made_again:
            parts = zip(ctx.scaled, kept[0].split(counts), strict=True)
            cast = [one.cast_and_turn("input", x, float8_layers.FORWARD) for one, x in parts]
            kept = [part for _, of_x, turned in cast for part in (turned, of_x)]
        of_rows = gradient.new_empty(len(gradient), weight.shape[2])
        parts = zip(gradient.contiguous().split(counts), of_rows.split(counts), strict=True)
        for k, (each, to) in enumerate(parts):
            found, of_found, turned = ctx.scaled[k].cast_and_turn("gradient", each, float8_layers.BACKWARD)
            _, of_matrix, matrix = ctx.scaled[k].weight(weight[k])
            float8_layers.into(of_found, matrix, of_matrix)(found, to)
            factors = (of_found, kept[2 * k + 1])
            float8_layers.add_product(weight.main_grad[k], turned, kept[2 * k], factors, weight.dtype)
        weight.arrived()
        return of_rows, None, None, None, None


class Grouped(nn.Module):
    """Networks of the experts ``mine``, whose products are computed together (``TEGroupedMLP``)."""

    def __init__(self, split: Split, name: str, shape: Shape, mine: range, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.scaled = [made for _ in range(2 * len(mine)) if (made := scaled(split))]
        assert shape.mixture is not None
        self.kind, feed = shape.activation, shape.mixture.feed
        wide = blocks(shape) * feed

        def each(end: str, *size: int) -> nn.Parameter:
            return nn.Parameter(torch.stack([parameter(split, f"{name}.{k}.{end}", size, None, 0.02) for k in mine]))

        self.up, self.down = each("up", wide, shape.hidden), each("down", shape.hidden, feed)
        ends = (("up.bias", wide), ("down.bias", shape.hidden)) if shape.bias else ()
        self.biases = nn.ParameterList(each(end, size) for end, size in ends)

    def _multiply(self, rows: Tensor, weight: nn.Parameter, counts: Sequence[int], ends: Tensor) -> Tensor:
        if not self.scaled:
            return _Grouped.apply(rows, weight, counts, ends)
        first = 0 if weight is self.up else len(counts)
        scaled = self.scaled[first : first + len(counts)]
        return _GroupedFloat8.apply(rows, weight, counts, scaled, self.recompute and weight is self.down)

    def forward(self, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        ends = torch.tensor(counts).cumsum(0).to(device=rows.device, dtype=torch.int32, non_blocking=True)
        wide = self._multiply(rows, self.up, counts, ends)
        if self.biases:
            wide = torch.cat([x + bias for x, bias in zip(wide.split(counts), self.biases[0], strict=True)])
        middle, where = again(self.recompute, lambda *x: weighted_activation(*x, self.kind), wide, weights)
        with where:
            out = self._multiply(middle, self.down, counts, ends)
        if not self.biases:
            return out
        parts = zip(out.split(counts), self.biases[1], weights.to(out.dtype).split(counts), strict=True)
        return torch.cat([x + bias * each.unsqueeze(1) for x, bias, each in parts])


class Sequential(nn.Module):
    """Networks of the experts ``mine``, one after the other (``SequentialMLP``)."""

    def __init__(self, split: Split, name: str, shape: Shape, mine: range, recompute: bool) -> None:
        super().__init__()
        assert shape.mixture is not None
        assert not recompute
        self.kind, many = shape.activation, blocks(shape)
        feed, hidden = shape.mixture.feed, shape.hidden
        self.ups = nn.ModuleList(Column(split, f"{name}.{k}.up", hidden, many * feed, many, False) for k in mine)
        self.downs = nn.ModuleList(Row(split, f"{name}.{k}.down", feed, hidden, False) for k in mine)
        for layer in (*self.ups, *self.downs):  # their parts are multiplied where they are
            layer.split = replace(split, group=Alone())

    def forward(self, rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        outputs = []
        parts = zip(rows.split(counts), weights.split(counts), self.ups, self.downs, strict=True)
        for x, each, up, down in parts:
            wide = up(x.unsqueeze(1)).squeeze(1)
            outputs.append(down(weighted_activation(wide, each, self.kind).unsqueeze(1)).squeeze(1))
        return torch.cat(outputs)


class Experts(nn.Module):
    """A router and its experts, of which this rank has some: (sequence here, batch, hidden) to the same."""

    def __init__(self, split: Split, name: str, shape: Shape, way: Way) -> None:
        super().__init__()
        assert shape.mixture is not None
        self.mixture, self.way = shape.mixture, way
        self.group, self.parts = way.experts or Alone(), way.parts or Alone()
        self.here = self.mixture.experts // self.group.size()
        first = self.group.rank() * self.here
        self.router = parameter(split, f"{name}.router", (self.mixture.experts, shape.hidden), None, 0.02)
        self.router.partial = split.sequence
        if narrow := self.mixture.narrow:
            float8 = None if split.float8 == "nvfp4" else split.float8
            here = replace(split, group=Alone(), sequence=False, pieces=1, float8=float8)
            self.narrow = Column(here, f"{name}.narrow", shape.hidden, narrow, bias=False)
            self.widen = Column(here, f"{name}.widen", narrow, shape.hidden, bias=False)
            for layer in (self.narrow, self.widen):
                layer.weight.partial = split.sequence
            shape = replace(shape, hidden=narrow)
        whole = replace(split, group=self.parts, sequence=False, pieces=1)
        kind = Grouped if self.mixture.grouped else Sequential
        self.networks = kind(whole, name, shape, range(first, first + self.here), way.recompute == "activations")
        for p in self.networks.parameters():
            p.split = p.expert = True

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        sent = self.narrow(x).flatten(0, 1) if self.mixture.narrow else tokens
        logits = nn.functional.linear(tokens, self.router).float()
        weights, chosen = logits.softmax(-1).topk(self.mixture.top)
        counts = chosen.flatten().bincount(minlength=self.mixture.experts)
        if self.way.servers:
            return self._output(x, self._over_servers(sent, weights, chosen, counts))
        order = chosen.flatten().argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        if self.mixture.drop:
            found = self._shares(sent, weights, chosen, counts, places)
        else:
            found = self._all(sent, weights, counts, order, places)
        return self._output(x, found)

    def _output(self, x: Tensor, found: Tensor) -> Tensor:
        """``found`` in the shape of ``x``."""
        found = found.view(*x.shape[:2], -1)
        return self.widen(found) if self.mixture.narrow else found

    def _over_servers(self, rows: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """All tokens of each expert, sent to a server once; see megatron_servers.py."""
        servers, hops = self.way.servers, []
        assert servers
        table = weights.new_zeros(len(rows), self.mixture.experts).scatter(1, chosen, weights)
        rooms = servers.rooms(len(rows), self.mixture.top)
        mine = self._coming(counts).view(-1, self.here).sum(0).tolist()
        for group, room in zip((servers.across, servers.within), rooms, strict=True):
            way, parts, even = replace(self.way, experts=group), group.size(), [room] * group.size()
            of_parts = table.unflatten(1, (parts, -1))
            sources = megatron_servers.picked((of_parts > 0).any(-1), room)
            slots = sources * parts + torch.arange(parts, device=rows.device).repeat_interleave(room)
            table = nn.functional.pad(of_parts.flatten(0, 1), (0, 0, 0, parts)).index_select(0, slots)
            table = _Exchange.apply(table, even, even, way)
            sources = sources.clamp(max=len(rows) - 1)
            hops.append((sources, len(rows), even, way))
            rows = _Exchange.apply(Pick.apply(rows, sources), even, even, way)
        choices = megatron_servers.sorted_by_part(table > 0, sum(mine))
        sources = choices % len(rows)
        found = self.networks(Pick.apply(rows, sources), table.t().flatten().index_select(0, choices), mine)
        found = Put.apply(found, sources, len(rows))
        for sources, count, even, way in reversed(hops):
            found = Put.apply(_Exchange.apply(found, even, even, way), sources, count)
        return found

    def _coming(self, counts: Tensor) -> Tensor:
        """How many tokens each rank sends to each expert here, of how many this one sends to each of all."""
        coming = torch.empty_like(counts)
        if self.group.size() == 1:
            return coming.copy_(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        return coming

    def _shares(self, tokens: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor, places: Tensor) -> Tensor:
        """Of each expert's tokens as many as its share, and nothing where there are fewer: the host knows all sizes."""
        top, experts, way, parts = self.mixture.top, self.mixture.experts, self.way, self.parts
        share = math.ceil(len(tokens) * top / experts)
        rank = places - (counts.cumsum(0) - counts)[chosen.flatten()]
        slots = torch.where(rank < share, chosen.flatten() * share + rank, experts * share)
        choices = slots.new_full((experts * share + 1,), len(slots))
        choices = choices.scatter_(0, slots, torch.arange(len(slots), device=slots.device))[:-1]
        places = torch.where(rank < share, slots, -1).view_as(chosen)
        weights = nn.functional.pad(weights.flatten(), (0, 1)).index_select(0, choices)
        sources = (choices // top).clamp(max=len(tokens) - 1)

        sent = [self.here * share] * self.group.size()
        rows = _Exchange.apply(_Copy.apply(tokens, sources, places), sent, sent, way)
        weights = _Exchange.apply(weights, sent, sent, way)
        rows, weights = _Gather.apply(rows, parts), _Gather.apply(weights, parts)
        ranks = self.group.size() * parts.size()
        rows = rows.unflatten(0, (ranks, self.here, share)).transpose(0, 1).flatten(0, 2)
        weights = weights.unflatten(0, (ranks, self.here, share)).transpose(0, 1).flatten()
        rows = self.networks(rows, weights, [ranks * share] * self.here)
        rows = rows.unflatten(0, (self.here, ranks, share)).transpose(0, 1).flatten(0, 2)
        rows = _Exchange.apply(_Scatter.apply(rows, parts), sent, sent, way)
        return _Add.apply(rows, sources, places)

    def _all(self, tokens: Tensor, weights: Tensor, counts: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """All tokens of each expert; the host waits to learn how many."""
        top, way, coming = self.mixture.top, self.way, self._coming(counts)
        sent, received = (each.view(-1, self.here).sum(1).tolist() for each in (counts, coming))
        mine = coming.view(-1, self.here).sum(0).tolist()

        sources, places = order // top, places.view(-1, top)
        rows = _Exchange.apply(_Copy.apply(tokens, sources, places), sent, received, way)
        weights = _Exchange.apply(weights.flatten().index_select(0, order), sent, received, way)
        expert = torch.arange(len(coming), device=tokens.device) % self.here
        expert = expert.repeat_interleave(coming, output_size=sum(received))
        order = expert.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = self.networks(_Sort.apply(rows, order, back), weights.index_select(0, order), mine)
        rows = _Exchange.apply(_Sort.apply(rows, back, order), received, sent, way)
        return _Add.apply(rows, sources, places)


class Mixed(nn.Module):
    """Experts, and perhaps a small network beside them that sees all tokens."""

    def __init__(self, split: Split, name: str, shape: Shape, way: Way) -> None:
        super().__init__()
        assert shape.mixture is not None
        self.kind, self.shared = shape.activation, shape.mixture.shared
        self.experts = Experts(split, f"{name}.experts", shape, way)
        if self.shared:
            many = blocks(shape)
            self.up = Column(split, f"{name}.up", shape.hidden, many * self.shared, many, bias=False)
            self.down = Row(split, f"{name}.down", self.shared, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.experts(x)
        if self.shared:
            out = out + self.down(megatron_model.bias_activation(self.up(x), None, self.kind))
        return out


class ExpertLayer(nn.Module):
    """A layer of a GPT with experts in place of its feed-forward network."""

    def __init__(self, split: Split, number: int, shape: Shape, way: Way) -> None:
        super().__init__()
        self.way = way
        self.before, self.between = Norm(split, shape), Norm(split, shape)
        self.attention = attention_of(split, f"{number}.attention", shape, way)
        self.mixed = Mixed(split, str(number), shape, way)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        recompute = self.way.recompute == "activations"
        normed, where = again(recompute, self.before, x)
        with where:
            mixed = self.attention(normed, turn)
        x = megatron_model.bias_dropout_add(mixed, self.attention.output.bias, x, self.way.dropout)
        normed, where = again(recompute, self.between, x)
        with where:
            out = self.mixed(normed)
        return megatron_model.bias_dropout_add(out, None, x, self.way.dropout)
