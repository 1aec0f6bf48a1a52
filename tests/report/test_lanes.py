"""The static picture is valid, escaped, deterministic, and shows both schedules on one time axis."""

import dataclasses
from xml.etree import ElementTree

from foretrain.comparison import Comparison
from foretrain.report import lanes_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_is_valid_and_names_what_it_shows(comparison: Comparison):
    runs = comparison.runs[:2]
    text = lanes_svg(runs)
    root = ElementTree.fromstring(text)
    words = " ".join("".join(node.itertext()) for node in root.iter(f"{SVG}text"))
    for word in ("ddp", "p3", "GPU", "T*", "ms"):
        assert word in words
    assert text == lanes_svg(runs)
    assert root.find(f"{SVG}rect").get("fill") == "#ffffff"  # reads on a dark page too


def test_everything_lies_inside(comparison: Comparison):
    root = ElementTree.fromstring(lanes_svg(comparison.runs))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for node in root.iter(f"{SVG}text"):
        assert 0 <= float(node.get("x", 0)) <= width
        assert 0 <= float(node.get("y", 0)) <= height


def test_names_are_escaped(comparison: Comparison):
    named = dataclasses.replace(comparison.workload, name="<b>&\"'")
    run = dataclasses.replace(comparison.runs[0], workload=named)
    assert ElementTree.fromstring(lanes_svg([run])) is not None
