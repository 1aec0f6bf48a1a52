"""The check of links finds broken ones within the documentation, and tells gone pages from sites out of reach."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.processes import module_at

links = module_at(Path(__file__).parents[2] / "tools" / "links.py")


class Site(BaseHTTPRequestHandler):
    """Site with one page, one that is gone, and one that is not for programs."""

    def do_GET(self):
        self.send_response({"/here": 200, "/secret": 403}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    with HTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def unreachable():
    """An address that nobody listens at: its port is taken, and not opened."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.md").write_text("# One")
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "one.html").write_text('<h1 id="top">One</h1><a href="#top">up</a>')
    return tmp_path / "html"


def test_files_and_anchors_that_do_not_exist_are_found(folder, capsys):
    (folder / "two.html").write_text('<a href="one.html#top"></a><a href="one.html#end"></a><img src="gone.png">')
    readme = folder.parent / "README.md"
    readme.write_text("[good](docs/one.md#top) [bad](docs/one.md#end) [bad](docs/three.md)")
    assert links.main(folder, [readme]) == 1
    wrong = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert wrong[:4] == [
        "gone.png: there is no such file",
        "one.html#end: there is no such anchor",
        "docs/one.md#end: there is no such anchor",
        "docs/three.md: there is no such file",
    ]


def test_pages_that_are_gone_are_broken_and_sites_out_of_reach_are_listed(folder, site, unreachable, capsys):
    (folder / "two.html").write_text(f'<a href="{site}/here#part"></a><a href="{unreachable}/"></a>')
    readme = folder.parent / "README.md"
    readme.write_text(f"<{site}/secret>")
    assert links.main(folder, [readme]) == 0
    told = capsys.readouterr().out
    assert "3 pages of other sites" in told
    assert told.endswith("".join(f"\n  {url}" for url in sorted([f"{site}/secret", f"{unreachable}/"])) + "\n")

    readme.write_text(f"[gone]({site}/gone)")
    assert links.main(folder, [readme]) == 1
    assert f"{readme}: {site}/gone: 404" in capsys.readouterr().out
