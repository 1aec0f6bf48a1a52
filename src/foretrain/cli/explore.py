"""``foretrain explore``: a page that answers at once what another GPU, link, batch or schedule would bring."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import tyro

from foretrain.errors import ConfigError


def explore(
    workload: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD|RESULT.json")] = "resnet50",
    *,
    port: int = 0,
    browser: bool = True,
) -> None:
    """Explore scenarios in a browser: GPU, link, hosts, batch, schedule, and the verdict at once.

    Serves a page on this machine alone (127.0.0.1) until Ctrl-C.

    Args:
        workload: a model of the zoo, a recorded workload's .toml file, or a result's .json of simulate or search.
        port: port of the page; 0 takes a free one.
        browser: open the page in a browser.
    """
    from foretrain.explore import Explorer, Question, opened

    if not 0 <= port <= 65535:
        raise ConfigError("port", port, "is no port", "write e.g. --port 8080, or leave it out")
    source, model = opened(workload)
    try:
        explorer = Explorer(source, Question(model=model), port=port)
    except OSError as error:
        raise ConfigError("port", port, f"cannot be used ({error.strerror})", "leave it out") from None
    with explorer:
        sys.stdout.write(f"{explorer.url}\n")
        sys.stdout.flush()
        sys.stderr.write("foretrain: Ctrl-C ends it\n")
        if browser:
            import webbrowser

            webbrowser.open(explorer.url)
        threading.Event().wait()
