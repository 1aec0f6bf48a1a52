"""The fake device's allocator: closed forms, a slow twin, and records of PyTorch 2.13's own allocator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.live.device.allocator_twin import Full, Twin
from tests.live.device.oracle.record import PROGRAMS, build_shell, comparable, differing

HERE = Path(__file__).parent
MIB = 2**20
GIB = 2**30

Shell = Callable[..., list[str]]


@pytest.fixture(scope="session")
def shell() -> Shell:
    """Runs commands (`shell.cpp`) on a fresh allocator; the lines it printed."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("the allocator is C++, and there is no compiler: install g++")
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    program = build_shell(PROGRAMS)

    def run(*commands: str) -> list[str]:
        text = "\n".join(commands) + "\n"
        return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()

    return run


def statistics(lines: list[str]) -> dict[str, int]:
    """The last printed ``memory_stats``."""
    return {name: int(value) for line in lines if line.startswith("stat ") for _, name, value in [line.split()]}


def segments(lines: list[str]) -> list[tuple[int, int, list[tuple[int, str]]]]:
    """Address, size and blocks (size, state) of all printed segments."""
    found: list[tuple[int, int, list[tuple[int, str]]]] = []
    for line in lines:
        words = line.split()
        if words[0] == "segment":
            found.append((int(words[1]), int(words[2]), []))
        elif words[0] == "block":
            found[-1][2].append((int(words[2]), words[4]))
    return found


@pytest.mark.parametrize(
    ("divisions", "request_size", "size"),
    [
        ("", 1, 512),
        ("", 513, 1024),
        ("", 10 * MIB + 1, 10 * MIB + 512),
        ("4", 1200, 1536),  # not above 512 B times 4: rounded to 512 B
        ("4", 84 * MIB, 96 * MIB),  # PyTorch's test_allocator_settings: 64 MiB in steps of 16
        ("4", 64 * MIB, 64 * MIB),
        ("4", 5000, 5120),
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", 84 * MIB, 88 * MIB),
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", 400 * MIB, 512 * MIB),  # 256 MiB in steps of 128
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", 1100 * MIB + 1, 1100 * MIB + 512),
    ],
)
def test_sizes_are_rounded_to_512_bytes_or_to_divisions_of_a_power_of_2(
    shell: Shell, divisions: str, request_size: int, size: int
) -> None:
    options = f"conf roundup_power2_divisions:{divisions}" if divisions else "conf"
    printed = shell("new 1073741824 0 0", options, f"rounded {request_size}")
    assert int(printed[-1].split()[1]) == size


def test_nothing_is_no_memory(shell: Shell) -> None:
    printed = shell("new 1073741824 0 0", "alloc a 0 0", "free a", "stats")
    assert printed[0] == "at 0"
    assert not any(statistics(printed)[name] for name in ("allocation.all.allocated", "reserved_bytes.all.current"))


def test_giving_memory_back_waits_for_the_device_once(shell: Shell) -> None:
    three = [f"alloc n{i} {12 * MIB} 0" for i in range(3)]
    printed = shell(
        "new 1073741824 0 0", *three, "empty", "synchronized", "free n0", "free n2", "empty", "synchronized"
    )
    assert printed[3:] == ["synchronized 0", "synchronized 1"]


def test_out_of_memory_in_torchs_words(shell: Shell) -> None:
    printed = shell(
        f"new {80 * GIB - 900 * MIB} {600 * MIB} 0", f"alloc a {78 * GIB} 0", f"alloc b {3 * MIB} 0", "alloc c 1 0",
        f"alloc d {600 * MIB} 0", "free a", f"alloc d {600 * MIB} 0"
    )  # fmt: skip
    assert printed[3] == (
        "oom CUDA out of memory. Tried to allocate 600.00 MiB. GPU 0 has a total capacity of 79.12 GiB of which"
        " 526.00 MiB is free. Including non-PyTorch memory, this process has 78.61 GiB memory in use. Of the allocated"
        " memory 78.00 GiB is allocated by PyTorch, and 19.00 MiB is reserved by PyTorch but unallocated. If reserved"
        " but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
        " fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert printed[4].startswith("at"), "the allocator goes on after it ran out of memory"


def test_a_memory_fraction_is_a_limit_and_named(shell: Shell) -> None:
    printed = shell("new 1073741824 0 0", "fraction 0.5", f"alloc a {500 * MIB} 0", f"alloc b {20 * MIB} 0")
    assert printed[0].startswith("at")
    assert " 512.00 MiB allowed; Of the allocated memory 500.00 MiB is allocated" in printed[1]
    assert shell("new 1073741824 0 0", "fraction 1.5")[0].startswith("error invalid fraction")


def test_an_absurd_request(shell: Shell) -> None:
    printed = shell("new 1073741824 0 0", f"alloc a {2**60} 0")
    assert printed == ["oom CUDA out of memory. Tried to allocate more than 1EB memory."]


@pytest.mark.parametrize(
    ("size", "text"),
    [(512, "512 bytes"), (1025, "1.00 KiB"), (20 * MIB, "20.00 MiB"), (GIB, "1024.00 MiB"), (3 * GIB // 2, "1.50 GiB")],
)
def test_sizes_as_c10_writes_them(shell: Shell, size: int, text: str) -> None:
    assert shell(f"format {size}") == [f"text {text}"]


def test_expandable_segments_grow_by_pages_and_shrink_to_them(shell: Shell) -> None:
    begin = ("new 1073741824 0 0", "conf expandable_segments:True", f"alloc a {30 * MIB} 0", f"alloc b {25 * MIB} 0")
    printed = shell(*begin, "snapshot")
    assert segments(printed)[0][:2] == (0, 60 * MIB)
    printed = shell(*begin, "free a", "empty", "stats", "snapshot")
    assert statistics(printed)["reserved_bytes.all.current"] == 40 * MIB
    assert segments(printed) == [
        (20 * MIB, 40 * MIB, [(10 * MIB, "inactive"), (25 * MIB, "active_allocated"), (5 * MIB, "inactive")])
    ]


def test_breakdown_by_purpose_now_and_at_the_peak(shell: Shell) -> None:
    printed = shell(
        "new 1073741824 0 0",
        f"alloc weight {20 * MIB} 0 0", f"alloc early {12 * MIB} 0 3", f"alloc late {10 * MIB} 0 3", "free late",
        "tag early 1", "stats", f"alloc after {2 * MIB} 0 4", "tag after 2", "stats"
    )  # fmt: skip
    tags = [[int(word) // MIB for word in line.split()[2:]] for line in printed if re.match("tag [0-4] ", line)]
    parameters, gradients, optimizer, activations, _ = tags[:5]
    assert (parameters, gradients, optimizer, activations) == ([20, 20], [12, 12], [0, 0], [0, 10])
    # What was given out after the peak is not part of it, whatever it turns out to be.
    assert tags[5:] == [[20, 20], [12, 12], [2, 0], [0, 10], [0, 0]]


def test_peaks_are_reset_to_what_is(shell: Shell) -> None:
    printed = shell("new 1073741824 0 0", f"alloc a {30 * MIB} 0 3", "free a", "reset_peak", "stats")
    assert statistics(printed)["allocated_bytes.all.peak"] == 0
    assert statistics(printed)["reserved_bytes.all.peak"] == 30 * MIB
    assert f"tag 3 0 {30 * MIB}" in printed  # What the memory was for at most is told of the whole run.


def test_where_an_allocation_lies(shell: Shell) -> None:
    printed = shell("new 1073741824 0 0", f"alloc a {3 * MIB} 0", f"alloc b {4 * MIB} 0", "find b", "free b", "find b")
    assert printed[2] == f"found {4 * MIB} 0 {20 * MIB}"
    assert printed[3].startswith("error invalid device pointer")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("garbage_collection_threshold:1.0", "set it in (0.0, 1.0)"),
        ("max_split_size_mb:19", "too small, must be >= 20"),
        ("large_segment_size_mb:64,max_split_size_mb:40", "too small, must be >= 64"),
        ("large_segment_size_mb:10", "must be > 10 MB"),
        ("roundup_power2_divisions:3", "has to be power of 2"),
        ("roundup_power2_divisions:[3:4]", "intervals have to be power of 2"),
        ("roundup_power2_divisions:[4:4", "ends too early"),
        ("expandable_segments:true", "must be True or False"),
        ("expandable_segments", "ends too early"),
        ("backend:mine", "Unknown allocator backend"),
    ],
)
def test_options_that_make_no_sense(shell: Shell, options: str, problem: str) -> None:
    (printed,) = shell("new 1073741824 0 0", f"conf {options}")
    assert printed.startswith("error")
    assert problem in printed


def test_unknown_options_are_ignored_with_a_message(shell: Shell) -> None:
    printed = shell("new 1073741824 0 0", "conf foo:1,bar:[2,3],expandable_segments:True,backend:cudaMallocAsync")
    assert [re.findall("'(.*?)' is ignored", line) for line in printed[:3]] == [["foo"], ["bar"], ["backend"]]
    assert printed[3].split()[5] == "1"


@pytest.mark.parametrize("index", range(12))
def test_agrees_with_pytorchs_own_allocator(shell: Shell, index: int) -> None:
    """`recorded.json` has what libc10_cuda.so of torch 2.13.0 did (``oracle/record.py``), block for block."""
    record = json.loads((HERE / "recorded.json").read_text())[index]
    assert differing(record["outcome"], comparable(shell(*record["commands"]))) == []


SIZES = st.one_of(
    st.integers(1, 3000),
    st.integers(1, MIB),
    st.integers(MIB, 10 * MIB),
    st.integers(10 * MIB, 60 * MIB),
    st.sampled_from([512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB]),
)
STEPS = st.one_of(
    st.tuples(st.just("alloc"), SIZES, st.integers(0, 2)),
    st.tuples(st.just("alloc"), SIZES, st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("use"), st.integers(0, 1000), st.integers(0, 2)),
    st.tuples(st.sampled_from(["finish", "empty"]), st.just(0), st.integers(0, 2)),
)


def play(twin: Twin, steps: list[tuple[str, int, int]]) -> tuple[list[str], list[str]]:
    """Lets the twin take the steps. The commands they are, and what the allocator must print."""
    commands: list[str] = []
    expected: list[str] = []
    live = {}
    for number, (kind, value, stream) in enumerate(steps):
        name = sorted(live)[value % len(live)] if live else None
        if kind == "alloc":
            commands.append(f"alloc n{number:04} {value} {stream}")
            try:
                segment, piece = live[f"n{number:04}"] = twin.allocate(value, stream)
                expected.append(f"at {segment.address + piece.offset}")
            except Full:
                expected.append("oom")
        elif kind == "finish":
            commands.append(f"finish {stream}")
            twin.finish(stream)
        elif kind == "empty":
            commands.append("empty")
            twin.empty()
        elif name and kind == "free":
            commands.append(f"free {name}")
            twin.release(*live.pop(name))
        elif name:
            commands.append(f"use {name} {stream}")
            twin.use(*live[name], stream)
    return commands, expected


@given(
    steps=st.lists(STEPS, max_size=120),
    capacity=st.sampled_from([64, 150, 400]),
    overhead=st.sampled_from([0, 7 * MIB]),
    max_split=st.sampled_from([None, 24]),
    poll_always=st.booleans(),
)
@pytest.mark.smoke
def test_agrees_with_the_twin(
    shell: Shell,
    steps: list[tuple[str, int, int]],
    capacity: int,
    overhead: int,
    max_split: int | None,
    poll_always: bool,
) -> None:
    """Where a request is met, that it is met whenever it can be, and everything that must hold of the books."""
    twin = Twin(capacity * MIB, overhead, max_split and max_split * MIB, poll_always)
    commands, expected = play(twin, steps)
    options = f"conf max_split_size_mb:{max_split}" if max_split else "conf"
    printed = shell(f"new {capacity * MIB} {overhead} {int(poll_always)}", options, *commands, "stats", "snapshot")
    assert [line.split()[0] if line.startswith("oom") else line for line in printed[1 : 1 + len(expected)]] == expected

    found = statistics(printed)
    mapped = segments(printed)
    assert found["reserved_bytes.all.current"] == sum(size for _, size, _ in mapped) == twin.reserved
    assert found["segment.all.current"] == len(mapped) == len(twin.segments)
    assert found["num_alloc_retries"] == twin.retries
    assert found["reserved_bytes.all.peak"] + overhead <= capacity * MIB or not found["reserved_bytes.all.peak"]
    ends = [address + size for address, size, _ in mapped]
    assert all(end <= begin for end, (begin, _, _) in zip(ends, mapped[1:], strict=False)), "segments overlap"
    assert all(sum(size for size, _ in blocks) == total for _, total, blocks in mapped), "blocks fill their segment"
    in_state: dict[str, int] = defaultdict(int)
    for _, _, blocks in mapped:
        for size, state in blocks:
            in_state[state] += size
    assert found["allocated_bytes.all.current"] == in_state["active_allocated"] == twin.allocated
    assert found["active_bytes.all.current"] == in_state["active_allocated"] + in_state["active_pending_free"]
    for name in {key.split(".")[0] for key in found if key.endswith("small_pool.current")}:
        for metric in ("current", "allocated", "freed"):
            small, large = found[f"{name}.small_pool.{metric}"], found[f"{name}.large_pool.{metric}"]
            assert found[f"{name}.all.{metric}"] == small + large
        assert found[f"{name}.all.current"] == found[f"{name}.all.allocated"] - found[f"{name}.all.freed"]
        assert 0 <= found[f"{name}.all.current"] <= found[f"{name}.all.peak"]
