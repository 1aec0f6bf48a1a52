"""HTTP server of the explorer: on loopback alone, with one worker process for what takes longer than a moment.

The standard library's server is enough for one reader, and adds no dependency. A page elsewhere cannot ask through a
name that resolves to loopback, since the Host header is checked; nor is any path of a request a path of a file.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from multiprocessing import get_context
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from foretrain.device.presets import preset_names
from foretrain.errors import ConfigError, ForetrainError
from foretrain.explore import answers
from foretrain.explore.answers import ENGINES, FABRICS, FILE, Opened, Question
from foretrain.parent_death import end_with_parent
from foretrain.planner.candidate_search import COMPRESSIONS
from foretrain.report.document import asset
from foretrain.schedule import IDEAL, POLICIES
from foretrain.workload import zoo_models

Work = Callable[[Question, Opened], str]
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_JSON, _HTML = "application/json", "text/html; charset=utf-8"
_LONGEST = 2000
"""Characters of a request's path and query."""


_ATTEMPTS = 3
"""Workers that may be killed over one answer."""
_KILLED = f"the process that searches was killed {_ATTEMPTS} times; does this machine have too little memory?"
_NOT_STARTED = (
    "the process that searches does not start; what it wrote to standard error says why; a script that makes an "
    "Explorer must do so under: if __name__ == '__main__'"
)
_SLOW: dict[str, Work] = {
    "/tuned": partial(answers.answer, tuned=True),
    "/tuned/page": partial(answers.saved_page, tuned=True),
    "/tuned/trace": partial(answers.trace, tuned=True),
    "/curves": answers.over_rates,
    "/network": answers.network,
}
"""Requests that the worker process answers; a newer one of the same kind replaces one that waits."""

_QUESTIONS = ("/answer", "/tuned", "/curves", "/network")
"""Requests whose answer is an object, with ``error`` in it where the question is refused."""

_YIELDING = 10
"""Niceness of the worker: a search leaves the cores to what the page waits for, the next answer and its painting."""


def _begin_worker() -> None:
    """Leave Ctrl-C, which the terminal sends to this process, too, to the server, end with it, and yield to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    if hasattr(os, "nice"):
        os.nice(_YIELDING)


class Explorer:
    """Server in a thread of its own, and its worker process. A context manager.

    Attributes:
        url: where the page is.
    """

    def __init__(self, source: Opened, first: Question, *, port: int = 0) -> None:
        self.source = source
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.explorer = self
        # The system ends a worker with the thread that started it, and threads of requests end.
        self._starter = ThreadPoolExecutor(1, "worker starter")
        self._pool, self._ready = self._start_pool()
        self._closing = False
        self._waiting: dict[str, Future[str]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._http.serve_forever, name="explorer", daemon=True)
        self.port = self._http.server_address[1]
        self.url = (
            f"http://127.0.0.1:{self.port}/?{first.query()}{'#' + next(iter(source.results)) if source.results else ''}"
        )

    def __enter__(self) -> Explorer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing = True
            for future in self._waiting.values():
                future.cancel()
        self._http.shutdown()
        self._thread.join()
        for process in list(getattr(self._pool, "_processes", None) or ()):
            self._pool._processes[process].terminate()  # what it computes nobody waits for
        self._pool.shutdown(cancel_futures=True)
        self._starter.shutdown()
        self._http.server_close()

    def slowly(self, kind: str, question: Question) -> str | None:
        """Return the worker's answer; None where a newer request of that kind came before it began."""
        began = False
        for _ in range(_ATTEMPTS):
            with self._lock:
                pool, ready = self._pool, self._ready
            try:
                with self._lock:
                    if (before := self._waiting.get(kind)) is not None:
                        before.cancel()
                    future = self._waiting[kind] = pool.submit(_SLOW[kind], question, self.source)
                return future.result()
            except CancelledError:
                return None
            except BrokenProcessPool:
                with self._lock:
                    if self._closing:
                        return None
                    if self._pool is pool:
                        self._pool, self._ready = self._start_pool()
                began = began or ready.exception() is None
        raise ForetrainError(_KILLED if began else _NOT_STARTED)

    def _start_pool(self) -> tuple[ProcessPoolExecutor, Future[Any]]:
        """Return a pool, and what its worker does first.

        The worker is started by a thread that lasts as long as the explorer.
        """
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin_worker)
        return pool, self._starter.submit(pool.submit, preset_names).result()

    def choices(self) -> dict[str, Any]:
        """Return what the page's controls offer."""
        file = [[FILE, self.source.source]] if self.source.workload else []
        return {
            "model": [*file, *([name, name] for name in zoo_models())],
            "gpu": [[name, name] for name in preset_names()],
            "engine": [list(item) for item in ENGINES.items()],
            "schedule": [[name, name] for name in POLICIES if name != IDEAL],
            "compression": [["none", "none"], *([name, name] for name in COMPRESSIONS)],
            "fabric": [list(item) for item in FABRICS.items()],
            "results": list(self.source.results),
        }


class _Server(ThreadingHTTPServer):
    explorer: Explorer
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    # One segment for headers and body, which does not wait for the acknowledgement of another.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer a request from the page, and refuse any other."""
        assert isinstance(self.server, _Server)
        explorer = self.server.explorer
        if self.headers.get("Host", "") not in (f"127.0.0.1:{explorer.port}", f"localhost:{explorer.port}"):
            return self._send(403, '{"error": "this server answers to its own name on this machine alone"}')
        if len(self.path) > _LONGEST:
            return self._send(414, '{"error": "the address is too long"}')
        place = urlsplit(self.path)
        try:
            self._answer(explorer, place.path, dict(parse_qsl(place.query)))
        except ForetrainError as error:
            # A browser would log another status as an error of the page, which shows what is wrong with a question.
            refused = isinstance(error, ConfigError) and place.path in _QUESTIONS
            self._send(200 if refused else 400, json.dumps({"error": str(error)}))
        return None

    def _answer(self, explorer: Explorer, path: str, query: dict[str, str]) -> None:
        texts = {"/": ("explore.html", _HTML), "/explore.js": ("explore.js", "text/javascript")}
        if path in texts:
            name, kind = texts[path]
            return self._send(200, (resources.files("foretrain.explore") / name).read_text("utf-8"), kind)
        if path in ("/chart.js", "/style.css"):
            return self._send(200, asset(path[1:]), "text/javascript" if path.endswith("js") else "text/css")
        if path == "/choices":
            return self._send(200, json.dumps(explorer.choices()))
        if path == "/results":
            return self._send(200, answers.results(explorer.source))
        if path == "/results/trace":
            return self._send(200, answers.result_trace(explorer.source).decode())
        if path == "/answer":
            return self._send(200, answers.answer(Question.of(query, explorer.source), explorer.source))
        if path == "/trace":
            return self._send(200, answers.trace(Question.of(query, explorer.source), explorer.source))
        if path == "/page":
            page = answers.saved_page(Question.of(query, explorer.source), explorer.source)
            return self._send(200, page, _HTML)
        if path in _SLOW:
            found = explorer.slowly(path, Question.of(query, explorer.source))
            if found is None:
                return self._send(409, '{"error": "a newer question came"}')
            return self._send(200, found, _HTML if path.endswith("/page") else _JSON)
        return self._send(404, '{"error": "there is nothing here"}')

    def _send(self, status: int, text: str, kind: str = _JSON) -> None:
        body = text.encode()
        try:
            self.send_response(status)
            headers = {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "Content-Security-Policy": _POLICY,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page has asked something newer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: a request of the page is no news."""
