"""Check links of the built documentation: ``python tools/links.py docs/_build/html README.md CHANGELOG.md``.

A link within it must lead to a file, and to an anchor where it names one. A link to another site must not be gone (404,
410). Sites that this machine does not reach are listed, and do not count as broken.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

GONE = (404, 410)
TIMEOUT = 10.0
"""Seconds for a site to answer."""


class Page(HTMLParser):
    """Anchors and links of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the anchor and the link of a tag."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.add(value)


def links_of(folder: Path, texts: Iterable[Path]) -> dict[Path, set[str]]:
    """Return the links of all pages of ``folder``, and of Markdown files beside ``docs``, by the file they stand in."""
    found = {path: Page(path.read_text("utf-8")).links for path in sorted(folder.rglob("*.html"))}
    for path in texts:
        found[path] = set(re.findall(r"\]\(([^)\s]+)\)|<(https?://[^>]+)>", path.read_text("utf-8")))
        found[path] = {one or other for one, other in found[path]}
    return found


def broken_within(folder: Path, links: dict[Path, set[str]]) -> list[str]:
    """Return the links to files or anchors that do not exist; a Markdown file under ``docs`` has those of its page."""
    anchors = {path.resolve(): Page(path.read_text("utf-8")).anchors for path in folder.rglob("*.html")}
    wrong = []
    for path, targets in links.items():
        for link in sorted(targets):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if not target.exists():
                wrong.append(f"{path}: {link}: there is no such file")
                continue
            docs = (path.parent / "docs").resolve()
            if target.suffix == ".md" and target.is_relative_to(docs):
                target = (folder / target.relative_to(docs)).with_suffix(".html").resolve()
            if parts.fragment and unquote(parts.fragment) not in anchors.get(target, {unquote(parts.fragment)}):
                wrong.append(f"{path}: {link}: there is no such anchor")
    return wrong


def answer(url: str) -> int | None:
    """Return the status with which a site answers; None where it cannot be reached."""
    try:
        with urlopen(Request(url, headers={"User-Agent": "foretrain-links"}), timeout=TIMEOUT) as response:
            return response.status
    except HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return None


def main(folder: Path, texts: list[Path]) -> int:
    """Print what is broken, and what was not checked; return the exit status."""
    links = links_of(folder, texts)
    wrong = broken_within(folder, links)
    sources = defaultdict(list)
    for path, targets in links.items():
        for link in targets:
            if link.startswith(("http://", "https://")):
                sources[link.partition("#")[0]].append(path)
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(sources, pool.map(answer, sources), strict=True))
    wrong += [f"{sources[url][0]}: {url}: {status}" for url, status in answers.items() if status in GONE]
    unknown = sorted(url for url, status in answers.items() if status is None or (status >= 400 and status not in GONE))

    print(*wrong, sep="\n", end="\n" * bool(wrong))
    total = sum(map(len, links.values()))
    print(f"{len(links)} files, {total} links, {len(wrong)} broken; {len(sources)} pages of other sites")
    if unknown:
        print(f"not checked, as this machine does not reach them ({len(unknown)}):", *unknown, sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), list(map(Path, sys.argv[2:]))))
