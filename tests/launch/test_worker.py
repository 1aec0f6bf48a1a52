"""One rank of ``foretrain run``."""

import logging
import sys

import pytest

from foretrain.launch.worker import print_script_traceback, run_as_main, show_log


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


def test_the_script_sees_what_python_would_show_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour; print(__name__, sys.argv, sys.path[0], neighbour.NAME, __file__)")
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["cwd", *sys.path])
    run_as_main(str(script), ["-x", "1"])
    del sys.modules["neighbour"]
    assert capsys.readouterr().out.strip() == f"__main__ {[str(script), '-x', '1']} {tmp_path} neighbour {script}"


def test_tracebacks_begin_in_the_script(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("def step():\n    raise ArithmeticError('too bad')\n\nstep()\n")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(ArithmeticError) as caught:
        run_as_main(str(script), [])
    print_script_traceback(caught.type, caught.value, caught.tb.tb_next)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].endswith('script.py", line 4, in <module>')
    assert lines[-1] == "ArithmeticError: too bad"


@pytest.mark.parametrize("use", [lambda torch: torch.cuda.set_device("cuda:0"), lambda torch: torch.ones(1).cuda()])
def test_scripts_that_need_cuda_are_told_of_simulate(use, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((AttributeError, AssertionError, RuntimeError)) as caught:
        use(torch)
    print_script_traceback(caught.type, caught.value, caught.tb)
    assert "to forecast it on GPUs that are not here use foretrain simulate" in capsys.readouterr().err
