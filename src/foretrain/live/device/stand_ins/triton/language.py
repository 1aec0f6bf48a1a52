"""Triton's language: names in the sources of kernels, which nobody compiles here."""

from __future__ import annotations

from typing import Any

__path__: list[str] = []  # its modules have names as well, which foretrain.live.device.stand_ins finds


class dtype:  # noqa: N801
    """A type of numbers, or of pointers to them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"triton.language.{self.name}"


class constexpr:  # noqa: N801
    """A value that is known when a kernel is compiled."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Name:
    """A function or type of the language: what is made of it is named, and nothing else."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> _Name:
        return _Name(f"{self.__name__}(...)")  # e.g. the type of a pointer, which annotates a parameter

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


_TYPES = (
    *("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8e4nv", "float8e5", "float8e4b15", "float16", "bfloat16", "float32", "float64", "void"),
)
globals().update({name: dtype(name) for name in _TYPES})


def placeholder(name: str) -> Any:
    """Return what stands for a name of the language."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name)


__getattr__ = placeholder
