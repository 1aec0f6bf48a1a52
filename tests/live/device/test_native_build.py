from pathlib import Path

import pytest

from foretrain.live.device import native_build
from foretrain.live.device.native_build import BuildError, compiler, headers
from foretrain.torch_version import torch_version
from tests.waiting import until


def test_compiler_that_is_asked_for_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env -i g++")
    assert compiler() == ["env", "-i", "g++"]
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(BuildError, match="CXX: 'no-such-compiler' is no compiler"):
        compiler()


def test_no_compiler_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"apt install g\+\+"):
        compiler()


def test_missing_headers_are_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match=r"Python's headers.*apt install python3\.\d+-dev"):
        headers()
    (tmp_path / "Python.h").touch()
    assert headers() == tmp_path


def test_another_release_or_compiler_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    names = [native_build._fingerprint("2.13.0"), native_build._fingerprint("2.13.1")]
    monkeypatch.setenv("CXX", "clang++")
    names.append(native_build._fingerprint("2.13.0"))
    assert len(set(names)) == 3
    assert all("/" not in name for name in names)


def test_cache_that_cannot_be_written_is_replaced_by_a_folder_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = native_build._writable(native_build._cache() / "torch")
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert "cannot be written (Not a directory)" in caplog.text


def test_units_hold_every_file_once() -> None:
    held = [name for unit in native_build._UNITS for name in unit]
    assert sorted(held) == sorted(path.stem for path in native_build._SOURCES.glob("*.cpp"))


def test_what_was_installed_is_preferred_and_replaced_if_it_does_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = native_build._fingerprint(torch_version("the simulated GPU"))
    installed, kept = (
        tmp_path / root / name / native_build._FILE for root in ("installed", "kept/foretrain/simulated_gpu")
    )
    for path in (installed, kept):
        path.parent.mkdir(parents=True)
        path.write_text(path.parent.parent.name)
    monkeypatch.setattr(native_build, "_PREBUILT", installed.parents[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))

    def loaded(path: Path) -> str:
        if path == installed:
            raise ImportError("version `GLIBC_2.36' not found")
        return path.read_text()

    assert native_build.built() == installed
    monkeypatch.setattr(native_build, "_loaded", loaded)
    assert native_build.load() == "simulated_gpu"
    assert "GLIBC_2.36" in caplog.text


@pytest.mark.process
def test_compiling_ends_with_its_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho $$ > {begun}.new && mv {begun}.new {begun}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with native_build.building():
        until(begun.exists)
        pid = int(begun.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.process
@pytest.mark.smoke
def test_failure_of_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[tuple[int, int]] = []
    with native_build.building() as wait, pytest.raises(BuildError, match="does not compile: `false` failed"):
        wait(lambda done, every: told.append((done, every)))
    assert {every for _, every in told} == {20}
