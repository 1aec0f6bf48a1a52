"""Releases of PyTorch, by made-up version strings: what is tested, what is warned of, what is refused."""

import logging
import sys
import types
from pathlib import Path

import pytest

from foretrain import torch_version
from foretrain.errors import ForetrainError, MissingExtra
from foretrain.torch_version import (
    TESTED,
    nccl_classes,
    register_nccl,
    release_of,
    require_simulable_torch,
    require_torch,
    was_tested,
)


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Make `import torch` find nothing but a version."""
    torch = types.ModuleType("torch")
    vars(torch)["__version__"] = version
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch_version, "_warn", torch_version._warn.__wrapped__)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0+cpu", (2, 13)),
        ("2.15.0a0+gitd0f2af8", (2, 15)),
        ("2.15rc1", (2, 15)),
        ("2.14.1", (2, 14)),
        ("3.0.dev20270101+cu140", (3, 0)),
        ("unknown", (0, 0)),
    ],
)
def test_release_is_read_from_a_version(version: str, release: tuple[int, int]) -> None:
    assert release_of(version) == release


def test_tested_releases_are_those_of_the_table_in_every_build() -> None:
    for release in TESTED:
        assert all(release_of(build) == release_of(release.release) for build in release.builds)
        assert all(was_tested(build) for build in release.builds)
        assert was_tested(f"{release.release}.9+rocm7.2")
    assert not was_tested("2.1.3")
    assert not was_tested("2.130.0")


@pytest.mark.parametrize("version", ["2.12.1", "2.99.0+cu200", "3.0.0"])
def test_runtime_warns_of_an_untested_release_and_goes_on(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, version)
    require_torch("attach")
    assert f"torch {version} is not among the releases that foretrain was tested with (2.13 to 2.15)" in caplog.text
    assert "attach goes on" in caplog.text


def test_runtime_warns_once_in_a_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    warn = torch_version._warn
    installed(monkeypatch, "3.1.0")
    monkeypatch.setattr(torch_version, "_warn", warn)
    monkeypatch.setenv("RANK", "1")
    require_torch("attach")
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    for _ in range(3):
        require_torch("attach")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("release", TESTED, ids=lambda release: release.release)
def test_tested_release_needs_no_word(
    release: torch_version.TestedRelease, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for build in release.builds:
        installed(monkeypatch, build)
        require_torch()
        assert require_simulable_torch("the simulated GPU") == build
    assert not caplog.records


def test_simulation_names_what_an_untested_release_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.99.0")
    monkeypatch.setattr(torch_version, "_SIMULATION_NEEDS", ("json.dumps", "json._gone.deep", "no_such_package.there"))
    with pytest.raises(ForetrainError, match=r"2\.99\.0 is installed, and lacks json\._gone\.deep, no_such_package"):
        require_simulable_torch("the simulated GPU")


def test_simulation_warns_of_an_untested_release_that_lacks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, "2.99.0")
    monkeypatch.setattr(torch_version, "_SIMULATION_NEEDS", ("json.decoder.JSONDecoder.decode",))
    with caplog.at_level(logging.WARNING):
        assert require_simulable_torch("the simulated GPU") == "2.99.0"
    assert "was tested with 2.13 to 2.15, not with 2.99.0" in caplog.text


def test_simulation_needs_what_the_installed_torch_has() -> None:
    pytest.importorskip("torch")
    assert torch_version._lacking(torch_version._SIMULATION_NEEDS) == []


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for required in (require_torch, require_simulable_torch):
        with pytest.raises(MissingExtra, match=r"recording needs the package 'torch'.*foretrain\[torch\]"):
            required("recording")


class _Table:
    """`torch.distributed.Backend` since 2.14, as far as it is used."""

    def __init__(self) -> None:
        self.made: dict[str, object] = {}

    def register_backend(self, name: str, create: object, **_: object) -> None:
        self.made[name] = create


def test_every_backend_of_nccl_is_made_by_the_first_creator() -> None:
    kinds = types.SimpleNamespace(NCCL=1, CUSTOM=2)
    group, create = types.SimpleNamespace(BackendType=kinds), object()
    since = types.SimpleNamespace(
        Backend=_Table(),
        ProcessGroup=group,
        _create_nccl_process_group=create,
        _create_nccl2_process_group=object(),
        _FR_SELF_RECORDING_BACKENDS={"gloo"},
    )
    register_nccl(since)  # pyright: ignore[reportArgumentType]
    assert since.Backend.made == dict.fromkeys(("nccl", "nccl-legacy", "nccl2", "nccl-lazy"), create)
    assert "ProcessGroupNCCL2" in nccl_classes(since)  # pyright: ignore[reportArgumentType]
    assert {"gloo", "nccl"} <= since._FR_SELF_RECORDING_BACKENDS
    before = types.SimpleNamespace(Backend=_Table())
    register_nccl(before)  # pyright: ignore[reportArgumentType]
    assert not before.Backend.made
    assert nccl_classes(before) == ("ProcessGroupNCCL",)  # pyright: ignore[reportArgumentType]


def test_page_on_versions_has_the_table_of_tested_releases() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    for one in TESTED:
        row = (f"PyTorch {one.release}", ", ".join(one.builds), ", ".join(one.pythons), one.how)
        assert f"| {' | '.join(row)} |" in page
