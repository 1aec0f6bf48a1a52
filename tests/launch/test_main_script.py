import sys

import pytest

from foretrain.launch.worker import print_script_traceback, run_as_main


def test_the_script_sees_what_python_would_show_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour; print(__name__, sys.argv, sys.path[0], neighbour.NAME, __file__)")
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["cwd", *sys.path])
    run_as_main(str(script), ["-x", "1"])
    assert capsys.readouterr().out.strip() == f"__main__ {[str(script), '-x', '1']} {tmp_path} neighbour {script}"


def test_what_the_script_raises_is_print_script_traceback(tmp_path, monkeypatch, capsys):
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
