import os
import stat
from pathlib import Path

import pytest
from rich.table import Table

from foretrain import files
from foretrain.errors import ConfigError
from foretrain.files import stdout_console, temporary_folder, write_atomically


def test_text_and_bytes_arrive_whole(tmp_path):
    write_atomically(tmp_path / "text", "Σ…\n")
    write_atomically(str(tmp_path / "bytes"), b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == "Σ…\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "text"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure, moment):
    target = tmp_path / "kept"
    target.write_text("old")

    def fail(*_):
        raise failure

    monkeypatch.setattr(files.os, moment, fail)
    with pytest.raises(ConfigError if isinstance(failure, OSError) else failure):
        write_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert target.read_text() == "old"


def test_permissions_are_the_umasks_for_a_new_file_and_the_old_ones_for_an_old_file(tmp_path):
    old = tmp_path / "old"
    old.write_text("")
    old.chmod(0o640)
    write_atomically(old, "x")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    plain = tmp_path / "plain"
    plain.write_text("")
    write_atomically(tmp_path / "new", "x")
    assert (tmp_path / "new").stat().st_mode == plain.stat().st_mode


def test_a_symbolic_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("real")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_the_system_refuses_is_explained(tmp_path):
    missing = tmp_path / "no" / "where.toml"
    with pytest.raises(ConfigError, match=r"where\.toml' cannot be written \(No such file or directory\)"):
        write_atomically(missing, "x")
    with pytest.raises(ConfigError, match=r"cannot be written \(Is a directory\)"):
        write_atomically(tmp_path, "x")
    assert list(Path(tmp_path).iterdir()) == []


def test_a_temporary_folder_goes_with_its_block_and_one_left_by_a_killed_owner_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "mine-left"
    left.mkdir()
    (tmp_path / "other").mkdir()
    with temporary_folder("mine-") as first, temporary_folder("mine-") as second:
        (first / "file").write_text("")
        assert sorted(tmp_path.iterdir()) == sorted([first, second, tmp_path / "other"])
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]


def test_tables_on_a_stdout_that_is_no_terminal_have_no_blanks_at_the_ends_of_lines(capsys):
    table = Table("name", "notes", box=None)
    table.add_row("a", "short")
    table.add_row("b", "much longer than the first")
    console = stdout_console()
    console.print(table)
    console.print("x  \n y ", end="  z\n")
    assert capsys.readouterr().out == " name  notes\n a     short\n b     much longer than the first\nx\n y   z\n"
    assert console.encoding.startswith("utf")
