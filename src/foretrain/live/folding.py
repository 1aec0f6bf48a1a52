"""Folding: few live ranks represent the many that act alike.

    folding = Folding.discover(1024, groups, families, messages)
    folding.live                     # (0, 256, 512, 768): one per stage of the pipeline
    folding.representative(300)      # 256

# Note [Symmetric ranks]
A collective is symmetric in its members, so that one of them can represent all. A message is not: a pipeline's stages
do different work. So a rank is identified by its *places*: in every family of groups (those that the script made at one
place or one after the other) in which messages are sent, its index in its own group; and for messages over the world,
its index in its *chain*, one of the shifted copies of rank 0's connected ranks that tile the world. Ranks of equal
places act alike. The live ranks are those that rank 0 reaches by messages; they have every place once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import pairwise, takewhile

from foretrain.errors import ConfigError

Group = tuple[int, ...]
Message = tuple[int, int, Group]
"""Source and target by world ranks, and the group they were addressed in."""

_MOST_LINES = 12
_MOST_RANGES = 4


class Folding:
    """Live ranks, and the ranks that each of them represents.

    Args:
        world: ranks in all.
        live: those that run.
        representative: for each rank the live one that stands for it.
        chains: for messages over the world, what is added to a rank to get to the same place of each other chain.

    Attributes:
        world, live: as given; ``live`` ascending.
        final: whether messages to ranks that are not live are taken for those of the ranks that stand for them. Else
            they show that more ranks must be live.
        uneven: whether there are live ranks that represent nobody, perhaps in groups whose other members are
            represented elsewhere.
    """

    def __init__(self, world: int, live: Iterable[int], representative: Sequence[int], shifts: Sequence[int] = ()):
        self.world = world
        self.live: tuple[int, ...] = tuple(sorted(live))
        self._representative = tuple(representative)
        self._shifts = tuple(shifts)
        self._families: dict[int, list[Group]] = {}
        self._family_of: dict[Group, int] = {}
        self._group_of: dict[int, dict[int, Group]] = {}
        self._messaging: list[int] = []
        self.final = True
        self.uneven = False
        self._images: dict[Group, tuple[Group, ...]] = {}

    @classmethod
    def all_live(cls, world: int) -> Folding:
        """Return the folding in which every rank runs."""
        _check_world(world)
        return cls(world, range(world), range(world))

    @classmethod
    def discover(
        cls,
        world: int,
        groups: Sequence[Group] = (),
        families: Sequence[int] = (),
        messages: Iterable[Message] = (),
        *,
        heard: Collection[int] = (0,),
        also: Iterable[int] = (),
        n: int | None = None,
    ) -> Folding:
        """Find as few live ranks as messages allow; see Note [Symmetric ranks].

        Args:
            world: ranks in all.
            groups: world ranks in each group's order.
            families: for each group its family.
            messages: what was sent, both ends of it.
            heard: ranks all of whose messages are among ``messages``. What rank 0 sends over the world to rank s, rank
                s is taken to send to 2s, and so on to the end of the smallest group that has both, until it has been
                heard.
            also: ranks that must be live, with all their peers.
            n: how many live ranks to have, at most: beside the fewest, further ones in order with all their peers.

        Raises:
            ConfigError: a group or message names a rank that there is not, lists are of different lengths, or ``n`` is
                more than the world or less than the fewest.
        """
        _check_world(world)
        if n is not None and not 1 <= n <= world:
            raise ConfigError("live", n, f"is not a number of ranks among {world}", f"write 1 to {world}, or auto")
        if len(groups) != len(families):
            raise ConfigError("families", len(families), "are not one per group", f"give {len(groups)}")
        known = cls.all_live(world)
        for group, family in zip(groups, families, strict=True):
            known.add(group, family)
        sent = list(messages)
        for source, target, _ in sent:
            if not (0 <= source < world and 0 <= target < world):
                raise ConfigError("messages", (source, target), "names no rank", f"they are 0 to {world - 1}")
        everyone = tuple(range(world))
        inside = sorted({known._family_of[g] for *_, g in sent if g != everyone and known._apart(g)})
        over = [(a, b) for a, b, g in sent if g == everyone or not known._apart(g)]
        chain, shifts = _chains(world, over, heard, [*groups, everyone])
        places = list(zip(*(known._places(family) for family in inside), chain, strict=True))
        near = _neighbours(_pairs(places, known, inside, bool(over)))
        few = _live(places, near)
        live = few.union(*(_connected(rank, near) for rank in also))
        if n is not None:
            few = live = _more_live(live, n, world, near)
        made = cls(world, live, _represented(places, few, live), shifts)
        made.uneven = live != few and len(live) < world
        for group, family in zip(groups, families, strict=True):
            made.add(group, family)
        made._messaging = inside
        made.final = n is not None
        return made

    def add(self, group: Group, family: int) -> None:
        """Add a group of a family that the script has made; a known one changes nothing.

        Raises:
            ConfigError: it is no group of ranks of the world.
        """
        if not group or not 0 <= min(group) <= max(group) < self.world or len(set(group)) < len(group):
            raise ConfigError(
                "group", group[:8], "is no group of different ranks", f"ranks are 0 to {self.world - 1}, see --nproc"
            )
        owners = self._group_of.setdefault(family, {})
        if group in self._family_of and any(owners.get(rank) == group for rank in group[:1]):
            return
        siblings = self._families.setdefault(family, [])
        siblings.append(group)
        owners.update((rank, group) for rank in group if rank not in owners)
        mine = self._family_of.get(group)
        # The same ranks may form a group of several families; the largest tells most about who is alike.
        if mine is None or len(self._families[mine]) < len(siblings):
            self._family_of[group] = family
        self._images.clear()

    @property
    def groups(self) -> tuple[tuple[Group, int], ...]:
        """Return all groups that were added, each with its family."""
        return tuple((group, family) for family, groups in self._families.items() for group in groups)

    def representative(self, rank: int) -> int:
        """Return the live rank that stands for ``rank``."""
        return self._representative[rank]

    def sibling(self, family: int, rank: int) -> Group | None:
        """Return the group of a family that has ``rank``; None without one."""
        return self._group_of.get(family, {}).get(rank)

    def multiplicity(self, group: Group) -> dict[int, int]:
        """Return how many members each live member of ``group`` stands for; they sum to the group's size.

        Members whose representative is in another group are spread over the live ones; empty where none is live.
        """
        live = [rank for rank in group if rank in self._alive]
        counts = dict.fromkeys(live, 0)
        strangers = 0
        for rank in group:
            mine = self._representative[rank]
            if mine not in counts:
                if not live:
                    return {}
                mine = live[strangers % len(live)]
                strangers += 1
            counts[mine] += 1
        return counts

    def images(self, group: Group) -> tuple[Group, ...]:
        """Return ``group`` and the groups of represented ranks that communicate whenever it does.

        A group without live members is the image of exactly one of its family, that of its first member's
        representative.
        """
        found = self._images.get(group)
        if found is None:
            family = self._family_of.get(group)
            found = self._images[group] = (group, *(() if family is None else self._represented_by(group, family)))
        return found

    def message_images(self, source: int, target: int, group: Group | None = None) -> tuple[tuple[int, int], ...]:
        """Return the messages that are sent at the moment when ``source`` sends to ``target``, both live; itself first.

        Args:
            source, target: world ranks.
            group: the group it is addressed in; by default one of those in which messages are sent that has both.
        """
        family = self._family_of.get(group) if group is not None else self._family_with(source, target)
        if family is None or group == tuple(range(self.world)):
            shifted = ((source + by, target + by) for by in self._shifts)
            pairs = [(a, b) for a, b in shifted if max(a, b) < self.world and (a, b) != (source, target)]
        else:
            own = self._group_of[family][source]
            places = own.index(source), own.index(target)
            others = (other for other in self._families[family] if other != own and len(other) == len(own))
            pairs = [(other[places[0]], other[places[1]]) for other in others]
        return (source, target), *((a, b) for a, b in pairs if self._representative[a] == source)

    def describe(self) -> tuple[str, ...]:
        """Describe which rank stands for which, a line for each class."""
        if len(self.live) == self.world:
            return (f"all {self.world:,} ranks live" if self.world > 1 else "1 rank",)
        members: dict[int, list[int]] = {rank: [] for rank in self.live}
        for rank, mine in enumerate(self._representative):
            members[mine].append(rank)
        count = len(self.live)
        lines = [f"{self.world:,} ranks in {count:,} class{'es' if count > 1 else ''}"]
        lines += [
            f"rank {rank} stands for {_ranges(ranks)} ({len(ranks):,})"
            for rank, ranks in list(members.items())[:_MOST_LINES]
        ]
        if count > _MOST_LINES:
            lines.append(f"and {count - _MOST_LINES:,} more")
        return tuple(lines)

    @cached_property
    def _alive(self) -> frozenset[int]:
        return frozenset(self.live)

    def _apart(self, group: Group) -> bool:
        """Return whether ``group`` is of a family of disjoint groups, so that ranks have one place each."""
        family = self._family_of.get(group)
        return family is not None and sum(map(len, self._families[family])) == len(self._group_of[family])

    def _represented_by(self, group: Group, family: int) -> Iterable[Group]:
        owners = self._group_of[family]
        for other in self._families[family]:
            folded = other != group and self._alive.isdisjoint(other)
            if folded and owners.get(self._representative[other[0]]) == group:
                yield other

    def _family_with(self, source: int, target: int) -> int | None:
        """Return the family of a group in which both ends send messages."""
        for family in self._messaging:
            own = self._group_of[family].get(source, ())
            if target in own:
                return family
        return None

    def _places(self, family: int) -> list[object]:
        """Return each rank's index in its group of ``family``; for one that has none, a value of its own."""
        places: list[object] = [("alone", rank) for rank in range(self.world)]
        for group in self._families[family]:
            for index, rank in enumerate(group):
                if self._group_of[family][rank] is group:
                    places[rank] = index
        return places


def _check_world(world: int) -> None:
    if world < 1:
        raise ConfigError("world", world, "is not a number of ranks", "start at least 1")


def _chains(
    world: int, over: list[tuple[int, int]], heard: Collection[int], groups: Iterable[Group]
) -> tuple[list[int], list[int]]:
    """Return each rank's place in its chain of messages over the world, and by how much the chains are shifted.

    Where shifted copies of rank 0's chain do not tile the world every rank is a place of its own.
    """
    if not over:
        return [0] * world, []
    chain = sorted(_connected(0, _neighbours(over)))
    strides = {abs(b - a) for a, b in over if a in chain}
    if len(strides) == 1 and (unheard := set(chain) - set(heard)):
        stride = strides.pop()
        around = set(min((group for group in groups if set(chain) <= set(group)), key=len))
        chain = sorted({*chain, *takewhile(around.__contains__, range(min(unheard), world, stride))})
    place = [-1] * world
    shifts = []
    for rank in range(world):
        if place[rank] >= 0:
            continue
        copy = [rank + one for one in chain]
        if copy[-1] >= world or any(place[one] >= 0 for one in copy):
            return list(range(world)), []
        shifts.append(rank)
        for one, index in zip(copy, chain, strict=True):
            place[one] = index
    return place, shifts


def _neighbours(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the ranks that each rank is connected with."""
    near: dict[int, list[int]] = {}
    for a, b in pairs:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    return near


def _connected(rank: int, near: dict[int, list[int]]) -> set[int]:
    """Return ``rank`` and all ranks it is connected with, directly or through others."""
    found, left = {rank}, [rank]
    while left:
        new = {other for other in near.get(left.pop(), ()) if other not in found}
        found |= new
        left += new
    return found


def _pairs(places: list[tuple[object, ...]], known: Folding, inside: list[int], over: bool) -> list[tuple[int, int]]:
    """Return neighbours in the groups and chains in which messages are sent."""
    pairs = [pair for family in inside for group in known._families[family] for pair in pairwise(group)]
    latest: dict[int, int] = {}
    for rank, (*_, place) in enumerate(places if over else ()):
        assert isinstance(place, int)
        # A rank less its place in its chain is by how much the chain is shifted.
        if rank - place in latest:
            pairs.append((latest[rank - place], rank))
        latest[rank - place] = rank
    return pairs


def _live(places: list[tuple[object, ...]], near: dict[int, list[int]]) -> set[int]:
    """Return the ranks that rank 0 reaches by messages; and for each place none of them has, its first rank's."""
    live = _connected(0, near)
    have = {places[rank] for rank in live}
    for rank, place in enumerate(places):
        if place not in have:
            more = _connected(rank, near)
            live |= more
            have |= {places[one] for one in more}
    return live


def _more_live(live: set[int], n: int, world: int, near: dict[int, list[int]]) -> set[int]:
    """Return ``live`` and further ranks in order, ``n`` at most, each with all ranks it is connected with."""
    if n < len(live):
        raise ConfigError("live", n, f"is less than the {len(live)} stages that messages connect", "write auto")
    for rank in range(world if n > len(live) else 0):
        more = set() if rank in live else _connected(rank, near)
        if len(live) + len(more - live) <= n:
            live |= more
    return live


def _represented(places: list[tuple[object, ...]], few: set[int], live: set[int]) -> list[int]:
    """Return for each rank the one of ``few`` of its places; where there are several they take turns.

    Ranks that are live for what they do themselves, e.g. print, represent nobody.
    """
    able: dict[tuple[object, ...], list[int]] = {}
    turn: dict[tuple[object, ...], int] = {}
    for rank in sorted(few):
        able.setdefault(places[rank], []).append(rank)
    found = []
    for rank, place in enumerate(places):
        if rank in live:
            found.append(rank)
            continue
        next_ = turn.get(place, 0)
        turn[place] = next_ + 1
        found.append(able[place][next_ % len(able[place])])
    return found


def _ranges(ranks: list[int]) -> str:
    """Format ranks as ``0-7, 16-23, …``; evenly spaced ones as ``0, 8, 16, …``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    shown = ["-".join(map(str, part)) for part in parts[:_MOST_RANGES]]
    return ", ".join(shown) + (", …" if len(parts) > _MOST_RANGES else "")
