"""Records what PyTorch 2.13's own caching allocator does, for ``test_allocator.py`` to compare with.

The allocator is taken from the CUDA wheel of torch 2.13.0 (``libc10_cuda.so``, ``libc10.so``) and runs without a GPU
over the runtime in ``cudart.cpp``; ours runs the same commands, and they must agree. To record anew, on Linux x86-64:

    pip download --no-deps torch===2.13.0 && unzip torch-2.13.0-*.whl 'torch/lib/libc10*' -d wheel
    python tests/live/device/oracle/record.py wheel/torch/lib             # writes recorded.json
    python tests/live/device/oracle/record.py wheel/torch/lib --fuzz 1000  # only compares, on that many sequences
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[3] / "src/foretrain/live/device/native"
PROGRAMS = HERE.parents[3] / ".pytest_cache" / "d" / "allocator"
"""Where tests keep what `build_shell` makes."""
MIB = 2**20

OPTIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "max_split_size_mb:24,max_non_split_rounding_mb:22",
    "max_split_size_mb:32,expandable_segments:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,16:8,>:1]",
    "large_segment_size_mb:40",
    "large_segment_size_mb:22,expandable_segments:True",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.7",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8,max_split_size_mb:30",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8,expandable_segments:True",
)


def commands(seed: int, options: str, length: int) -> list[str]:
    """A random life of a device: sizes around all borders, up to three streams, events, options changed on the way."""
    chance = random.Random(seed)
    streams = chance.choice((1, 1, 2, 3))
    largest = chance.choice((20, 60, 200)) * MIB
    lines = [f"new {chance.choice((256, 512, 1024)) * MIB} {chance.choice((0, 30 * MIB))} 1", f"conf {options}"]
    live: list[str] = []
    for index in range(length):
        kind = chance.random()
        if kind < 0.5 or not live:
            lines.append(f"alloc n{index} {_size(chance, largest)} {chance.randrange(streams)}")
            live.append(f"n{index}")
        elif kind < 0.9:
            lines.append("free " + live.pop(chance.randrange(len(live))))
        elif kind < 0.94:
            lines.append(f"use {chance.choice(live)} {chance.randrange(streams)}")
        elif kind < 0.97:
            lines.append(f"finish {chance.randrange(streams)}")
        else:
            lines.append(_rare(chance))
    return [*lines, "stats", "snapshot"]


def _size(chance: random.Random, largest: int) -> int:
    borders = (512, 513, MIB, MIB + 1, 2 * MIB, 3 * MIB, 5 * MIB, 10 * MIB, 10 * MIB + 1, 20 * MIB)
    ranges = ((1, 2000), (1, MIB), (MIB, 10 * MIB), (10 * MIB, largest))
    return chance.choice(borders) if chance.random() < 0.3 else chance.randint(*chance.choice(ranges))


def _rare(chance: random.Random) -> str:
    # Not to a lower max_split_size: where a larger block is split already PyTorch gives back a part of a segment.
    options = [text for text in OPTIONS if "max_split" not in text]
    fraction = f"fraction {chance.choice((0.5, 0.9, 1))}"
    return chance.choice(("empty", "reset_peak", "reset_accumulated", fraction, f"conf {chance.choice(options)}"))


def outcome(program: list[str], lines: list[str]) -> list[str]:
    """What a program printed, as far as both programs print it alike."""
    process = subprocess.run(program, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    # PyTorch leaves in an inactive block what was once requested of it.
    return comparable(re.sub(r"(block \d+ \d+) \d+ inactive", r"\1 0 inactive", process.stdout).splitlines())


def comparable(lines: list[str]) -> list[str]:
    """What both allocators print alike: without what ours alone prints, and the words of errors."""
    kept = (line for line in lines if not line.startswith(("tag", "message", "stat max_split_size")))
    return [re.sub(r"^error .*", "error", line) for line in kept]


def differing(theirs: list[str], ours: list[str]) -> list[tuple[str, str]]:
    """The lines in which the two differ, less those that hang on the order in which PyTorch visits streams.

    Events of several streams that are over at once free their blocks in the order of a hash map of pointers. That
    shows in how much was inactive in between.
    """
    if len(theirs) != len(ours):
        return [(f"{len(theirs)} lines", f"{len(ours)} lines")]
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if a != b]
    return [(a, b) for a, b in pairs if not re.match(r"stat inactive_split\S*\.(peak|allocated|freed) ", a)]


def build_shell(into: Path) -> Path:
    """Compiles `shell.cpp` with our allocator, unless it is in the folder; the program's path."""
    sources = [HERE.parent / "shell.cpp", *sorted(NATIVE.glob("allocator*.cpp"))]
    compiler = os.environ.get("CXX", "g++")
    digest = hashlib.sha256(compiler.encode())
    for source in [*sources, *sorted(NATIVE.glob("*.h"))]:
        digest.update(source.read_bytes())
    program = into / f"shell-{digest.hexdigest()[:16]}"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=into) as folder:  # others may build it, too
            made = Path(folder, "shell")
            subprocess.run([compiler, "-std=c++17", "-O2", f"-I{NATIVE}", *map(str, sources), "-o", made], check=True)
            made.replace(program)
    return program


def build(libraries: Path, into: Path) -> tuple[list[str], list[str]]:
    """Compiles both programs; their command lines, PyTorch's first."""
    import torch

    include = Path(torch.__file__).parent / "include"
    compiler = os.environ.get("CXX", "g++")
    shared = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{NATIVE}"]
    runtime, management = into / "libcudart.so.13", into / "libnvidia-ml.so.1"
    script = f"-Wl,-soname,libcudart.so.13,--version-script={HERE / 'cudart.map'}"
    subprocess.run([*shared, str(HERE / "cudart.cpp"), script, "-o", str(runtime)], check=True)
    subprocess.run([*shared, str(HERE / "nvml.cpp"), str(runtime), "-o", str(management)], check=True)
    paths = [f"-I{HERE / 'include'}", f"-I{include}", f"-L{libraries}", f"-L{into}"]
    links = ["-lc10", "-lc10_cuda", "-l:libcudart.so.13", f"-Wl,-rpath,{libraries}:{into}"]
    oracle = [compiler, "-std=c++20", "-O1", "-w", *paths, str(HERE / "oracle.cpp"), *links]
    subprocess.run([*oracle, "-o", str(into / "oracle")], check=True)
    return ["env", f"LD_LIBRARY_PATH={into}", str(into / "oracle")], [str(build_shell(into))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=Path, help="folder of libc10_cuda.so")
    parser.add_argument("--fuzz", type=int, default=0, help="sequences to compare only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        oracle, shell = build(arguments.libraries.resolve(), Path(folder))
        records = []
        for seed in range(arguments.fuzz or len(OPTIONS)):
            lines = commands(seed, OPTIONS[seed % len(OPTIONS)], 1000 if arguments.fuzz else 150)
            theirs = outcome(oracle, lines)
            if wrong := differing(theirs, outcome(shell, lines)):
                raise SystemExit(f"seed {seed} ({lines[1]}): {wrong[:5]}")
            records.append({"commands": lines, "outcome": theirs})
    if not arguments.fuzz:
        (HERE.parent / "recorded.json").write_text(json.dumps(records, indent=0) + "\n")
    print(f"{len(records)} sequences agree")


if __name__ == "__main__":
    main()
