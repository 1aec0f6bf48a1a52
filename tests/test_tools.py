"""The programs that set environments up: what they say before they download, and what is a pair of versions."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("environment")


@pytest.fixture
def matrix(environment: ModuleType) -> ModuleType:
    return importlib.import_module("matrix")


def test_downloads_are_told_with_the_largest_first(environment: ModuleType) -> None:
    files = {"torch 2.15.0": 539_136_850, "numpy 2.5": 16_000_000, "here 1": 0, "secret 2": None}
    told = environment.report(Path(".venv"), files).splitlines()
    assert told[0] == ".venv: 555.1 MB in 2 files will be downloaded, unless they are in the cache"
    assert told[1].split() == ["539.1", "MB", "torch", "2.15.0"]
    assert told[-1].strip() == "of unknown size: secret 2"
    assert not any("CUDA" in line for line in told)


def test_gigabytes_are_told_with_the_remedy(environment: ModuleType) -> None:
    assert "whl/cpu" in environment.report(Path(".venv"), {"torch": 3_000_000_000})
    assert "3.0 GB in 1 files" in environment.report(Path(".venv"), {"torch": 3_000_000_000})


def test_file_on_this_machine_is_no_download(environment: ModuleType) -> None:
    assert environment.size("file:///opt/wheels/torch-2.13.0-cp311-cp311-linux_x86_64.whl") == 0
    assert environment.size("http://127.0.0.1:9/nobody-listens-here.whl") is None


def test_packages_of_this_python_are_found_by_its_torch(environment: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    assert environment.packages_with_torch()[0] == str(Path(torch.__file__).parents[1])


def test_uv_is_told_the_settings_of_pip_or_not_asked(environment: ModuleType) -> None:
    told = "\n".join(
        (
            ":env:.find-links='/opt/wheels'",
            "global.extra-index-url='file:///a file:///b'",
            "global.find-links='/elsewhere'",
            "global.cert='/etc/ca.crt'",
            "download.no-binary=':all:'",
        )
    )
    arguments, variables = environment.as_uv(told)
    assert arguments == [
        *("--extra-index-url", "file:///a", "--extra-index-url", "file:///b"),
        *("--find-links", "/opt/wheels"),
    ]
    assert variables == {"SSL_CERT_FILE": "/etc/ca.crt"}
    assert environment.as_uv("install.no-binary=':all:'") is None


@pytest.mark.process
def test_environment_has_the_torch_of_the_python_that_made_it(environment: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made = tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    python = environment.create(made)
    code = "import sys, importlib.util; print(sys.prefix); print(importlib.util.find_spec('torch').origin)"
    prefix, origin = subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert prefix == str(made)
    assert origin == torch.__file__


def test_pair_has_an_environment_of_its_own(matrix: ModuleType) -> None:
    one = matrix.pair("2.15.0/3.12", Path("folder"))
    assert (one.torch, one.python, one.name) == ("2.15.0", "3.12", "2.15.0/3.12")
    assert one.folder == Path("folder/torch2.15.0-py3.12")
    assert one.wanted[0] == "torch==2.15.0"
    with pytest.raises(SystemExit, match=r"'2\.15\.0' is no pair of versions; write e\.g\. 2\.15\.0/3\.12"):
        matrix.pair("2.15.0", Path("folder"))


def test_pair_without_its_python_is_told_and_no_failure(matrix: ModuleType, tmp_path: Path) -> None:
    one = matrix.pair("2.15.0/3.99", tmp_path)
    assert matrix.prepared(one, []) is None
    assert one.found == ["not run: no Python 3.99 on this machine"]
    assert not one.failed


def test_python_of_this_version_is_found(matrix: ModuleType) -> None:
    found = matrix.interpreter("{}.{}".format(*sys.version_info))
    assert found is None or Path(found).exists()


def test_every_simulated_example_has_a_cluster(matrix: ModuleType) -> None:
    assert set(matrix.EXAMPLES) == {path.name for path in (TOOLS.parent / "examples" / "simulate").glob("*.py")}
