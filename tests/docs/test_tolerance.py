"""What the page on tolerance shows runs."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "network" / "tolerance.md"


def test_the_example_runs(capsys):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(compile(code, "tolerance.md", "exec"), {})
    size, result = capsys.readouterr().out.splitlines()
    mean, share = map(float, result.split())

    assert size == "[10000. 10000.]"
    # A packet with the sums of two ranks is lost, and all four lack them.
    assert mean == pytest.approx(4 - 2 * 365 / 10_500)
    assert 0 < share < 0.02
