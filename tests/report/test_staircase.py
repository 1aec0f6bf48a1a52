from xml.etree import ElementTree

import pytest

from foretrain.report.release_plot import staircase, staircase_svg, steps, ticks
from foretrain.units import MILLISECOND
from foretrain.workload.step import Gradient, Layer, Workload

SVG = "{http://www.w3.org/2000/svg}"


def workload(name="net"):
    """Four layers; the gradients of the last two leave together at 2 ms, those of the first two at 20 ms."""
    layers = tuple(Layer(f"l{i}", MILLISECOND, b * MILLISECOND) for i, b in enumerate((1, 18, 0, 2)))
    gradients = tuple(
        Gradient(f"l{i}.<w>", 1_000_000 * (i + 1), i, r * MILLISECOND) for i, r in enumerate((21, 20, 2, 2))
    )
    return Workload(name, 8, layers, gradients)


def test_the_staircase_as_data():
    data = steps(workload())
    assert data.times == (0.0, 2.0, 2.0, 20.0, 21.0)
    assert data.sizes == (0.0, 3.0, 7.0, 9.0, 10.0)
    assert data.bands == ((2.0, 2.0), (20.0, 21.0))
    assert data.labels == ("2 gradients, 7.00 MB", "2 gradients, 3.00 MB")
    assert data.names[-1] == "l0.<w>, 1.00 MB"
    assert data.title == "net: 4 gradients (10.0 MB) in 2 blocks, backward 21.0 ms"


def test_the_svg_is_well_formed_and_has_every_gradient_twice():
    root = ElementTree.fromstring(staircase_svg(workload("a <b> & c")))
    assert len(root.findall(f"{SVG}circle")) == 2 * 4
    assert len(root.findall(f"{SVG}rect")) == 1 + 2 * 2
    hints = [title.text for title in root.iter(f"{SVG}title")]
    assert hints[0] == "a <b> & c: 4 gradients (10.0 MB) in 2 blocks, backward 21.0 ms"
    assert "l3.<w>, 4.00 MB, at 2 ms" in hints
    texts = {text.text for text in root.findall(f"{SVG}text")}
    assert {"released (MB)", "released (gradients)", "time since backward begins (ms)"} <= texts


def test_the_figure_has_both_staircases_and_names():
    figure = staircase(workload())
    size, count, numbers = figure.data
    assert list(size["y"]) == [0.0, 3.0, 7.0, 9.0, 10.0, 10.0]
    assert list(count["y"]) == [0, 1, 2, 3, 4, 4]
    assert "l0.<w>, 1.00 MB" in size["customdata"]
    assert numbers["text"] == ["1", "2"]
    assert figure.layout["yaxis"]["1"]["title"] == "released (MB)"
    assert figure.layout["xaxis"]["2"]["title"] == "time since backward begins (ms)"


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (10, [0, 2, 4, 6, 8, 10]),
        (0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
        (107.2, [0, 20, 40, 60, 80, 100]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_ticks_are_round(most, expected):
    assert ticks(most) == pytest.approx(expected)
