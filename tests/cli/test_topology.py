"""``foretrain topology``, run as a user runs it."""

import json
from pathlib import Path

import pytest

from foretrain.cli import main
from foretrain.network.fabrics import FABRICS
from foretrain.network.servers import SERVERS


def test_show_prints_and_writes_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    html, numbers, saved = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.toml"
    main(["topology", "show", "dgx-h100:4", "--html", str(html), "--json", str(numbers), "--save", str(saved)])
    shown = capsys.readouterr().out
    for words in ("32 on 4 servers", "gpu – nvswitch", "3600 Gbps", "bisection"):
        assert words in shown.replace("3.60 Tbps", "3600 Gbps")
    assert html.read_text().lower().startswith("<!doctype html>")
    assert json.loads(numbers.read_text())["counts"]["gpu"] == 32
    main(["topology", "show", str(saved)])
    again = capsys.readouterr().out
    assert shown.startswith(again.rstrip())  # What was written is named behind it.


def test_list_names_every_fabric_and_server(capsys: pytest.CaptureFixture[str]):
    main(["topology", "list"])
    shown = capsys.readouterr().out
    for name in (*FABRICS, *SERVERS[1:]):
        assert name in shown


def test_a_mistake_is_one_message(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["topology", "show", "fat_tre:4@1Gbps"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "did you mean 'fat_tree'" in message
    assert message.count("\n") == 1


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["topology", "show", "star:2@1Gbps", "--html", str(tmp_path / "no" / "a.html")])
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        main(["topology", "show", "star:2@1Gbps", "--save", str(tmp_path / "a.yaml")])
    refused = capsys.readouterr()
    assert "neither .toml nor .graphml" in refused.err
    assert refused.out == ""
