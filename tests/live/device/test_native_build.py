from pathlib import Path

import pytest

from foretrain.live.device import native_build
from foretrain.live.device.native_build import BuildError, compiler


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
    folder = native_build._writable("torch")
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert "cannot be written (Not a directory)" in caplog.text
