"""Transports, queues and losses as text: ``"dctcp(payload=4096B)"``, ``"limit=300kB,mark=100kB"``, ``"0.1%"``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from foretrain.errors import ConfigError, unknown
from foretrain.network.packet.port_config import LinkLosses, Queues
from foretrain.network.packet.transports.transport import (
    Bounded,
    Dcqcn,
    Dctcp,
    Ndp,
    NewReno,
    Pfabric,
    Pias,
    Timely,
    Transport,
)
from foretrain.units import parse_size, parse_time

TRANSPORTS: Final[Mapping[str, type[Transport]]] = {
    each.__name__.lower(): each for each in (NewReno, Dctcp, Pias, Pfabric, Ndp, Dcqcn, Timely, Bounded)
}
"""Every transport by the name that commands take; its knobs are its fields."""
_SPEC = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_LOSS = re.compile(r"([0-9]*\.?[0-9]+)(%?)(?:x([0-9]*\.?[0-9]+))?")
_TIMES: Final = ("least_timeout", "most_timeout", "quiet", "decay", "raise_after", "low", "high", "trip")
_BYTES: Final = ("payload", "header", "reply", "demotions", "raise_bytes")
_CLASSES: Final = ("limit", "mark", "mark_from", "mark_to", "spare", "quantum", "xoff", "xon")
"""Bytes of each class of a queue; ``mark`` is both ends of marking."""
_QUEUES: Final = (*_CLASSES, "room", "cut_to", "shared")
"""Bytes of a queue."""
_NUMBERS: Final = ("mark_chance", "share", "strict", "nearest")


def transport(text: str) -> Transport:
    """Return the transport that ``text`` describes: a name, and knobs that differ from their defaults.

    Sizes and times have units (``payload=4096B``, ``least_timeout=1ms``); several sizes are joined by ``+``.

    Raises:
        ConfigError: what is wrong, and what to write instead.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError("transport", text, "is not a transport", "write e.g. 'dctcp(payload=4096B)'")
    name = match[1].lower()
    if name not in TRANSPORTS:
        raise unknown("transport", match[1], TRANSPORTS)
    fields = {field.name: field.default for field in dataclasses.fields(TRANSPORTS[name])}
    found: dict[str, Any] = {}
    for key, value in _pairs(match[2] or "", f"transport {name}"):
        if key not in fields:
            raise unknown(f"transport {name}: knob", key, fields)
        found[key] = _value(key, value, fields[key])
    try:
        return TRANSPORTS[name](**found)
    except ConfigError as error:
        raise error.at(f"transport {name}") from None


def queues(text: str) -> Queues:
    """Return the queues of every switch's ports that ``text`` describes.

    ``limit``, ``mark`` (or ``mark_from`` and ``mark_to``), ``spare``, ``quantum``, ``xoff`` and ``xon`` are sizes with
    units, one for all classes or eight joined by ``+``; so are ``room``, ``cut_to`` and ``shared``. ``mark_chance`` and
    ``share`` are numbers, ``strict`` a number of classes, ``nearest`` is 1 or 0; see `Queues`.

    Raises:
        ConfigError: what is wrong, and what to write instead.
    """
    found: dict[str, Any] = {}
    for key, value in _pairs(text, "queues"):
        if key in _QUEUES:
            several = key in _CLASSES and "+" in value
            size = _sizes(f"queues.{key}", value) if several else _size(f"queues.{key}", value)
            found |= dict.fromkeys(("mark_from", "mark_to") if key == "mark" else (key,), size)
        elif key == "nearest":
            found[key] = _flag(f"queues.{key}", value)
        elif key in _NUMBERS:
            found[key] = _number(f"queues.{key}", value, whole=key == "strict")
        else:
            raise unknown("queues", key, (*_QUEUES, *_NUMBERS))
    try:
        return Queues(**found)
    except ConfigError as error:
        raise error.at("queues") from None


def losses(text: str) -> tuple[tuple[str, LinkLosses], ...]:
    """Return the losses that ``text`` gives, with the links that they hold for.

    ``"*"`` means all links, ``"leaf0:spine1"`` those from one node to another.

    ``"0.1%"`` is of every wire, ``"leaf0:spine1=1%"`` of some; ``"1%x8"`` is lost in bursts of 8 packets on average.
    Several are separated by commas; the last one for a link wins.

    Raises:
        ConfigError: what is wrong, and what to write instead.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        where, equals, what = (word.strip() for word in part.rpartition("="))
        match = _LOSS.fullmatch(what)
        if match is None or (equals and where != "*" and not all(where.partition(":"))):
            raise ConfigError("losses", part, "does not read", "write e.g. '0.1%', 'leaf0:spine1=1%' or '1%x8'")
        share = float(match[1]) / (100 if match[2] else 1)
        found.append((where or "*", LinkLosses.bursts(share, float(match[3])) if match[3] else LinkLosses(share)))
    return tuple(found)


def _pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ConfigError(where, part, "is not name=value", "write e.g. 'limit=300kB' or 'payload=4096B'")
        if key in seen:
            raise ConfigError(f"{where}.{key}", value, "contradicts the value before it", "give each once")
        seen.add(key)
        yield key, value


def _value(key: str, text: str, default: Any) -> Any:
    if key in _TIMES:
        return parse_time(text, key)
    if key in _BYTES:
        return _sizes(key, text) if isinstance(default, tuple) else _size(key, text)
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        return _flag(key, text)
    return _number(key, text, whole=isinstance(default, int))


def _sizes(key: str, text: str) -> tuple[int, ...]:
    return tuple(parse_size(part.strip(), key) for part in text.split("+"))


def _size(key: str, text: str) -> int:
    if "+" in text:
        raise ConfigError(key, text, "is several sizes", "give one")
    return parse_size(text, key)


def _flag(key: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(key, text, "is neither 0 nor 1", "write 1 for yes, 0 for no")
    return text == "1"


def _number(key: str, text: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(key, text, f"is not {kind}", "write e.g. 8") from None
