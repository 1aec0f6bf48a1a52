"""One rank of ``foretrain run``."""

import logging

import pytest

pytest.importorskip("torch")

from foretrain.launch.worker import show_log


@pytest.fixture
def logger():
    """As it was, after the test."""
    logger = logging.getLogger("foretrain")
    before = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def test_choices_searches_and_warnings_go_to_stderr(logger, capsys):
    show_log()
    logging.getLogger("foretrain.auto").info("auto: plain DDP")
    logger.info("tuned after %d samples", 3)
    logger.warning("a warning")
    logger.debug("nobody's business")
    assert capsys.readouterr().err.splitlines() == [
        "foretrain: auto: plain DDP",
        "foretrain: tuned after 3 samples",
        "foretrain: a warning",
    ]
