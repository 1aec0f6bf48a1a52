"""Reports: tables, pictures, self-contained pages and traces.

    rich.print(summary(comparison))              # the table, what bounds it and the advice, for a terminal
    page(comparison, "vgg16.html")               # one file that needs no network
    write_trace(comparison.runs, "vgg16.json")   # for ui.perfetto.dev and chrome://tracing
    lanes_svg(runs), staircase_svg(workload)     # stand-alone pictures

Figures are data that ``chart.js`` draws in a page. Jinja2 and perfetto are imported by the functions that need them and
are the extra ``foretrain[report]``.
"""

from foretrain.report.page import bars, curves, page
from foretrain.report.release_plot import staircase, staircase_svg
from foretrain.report.table import summary, table
from foretrain.report.timeline_plot import lanes, lanes_svg
from foretrain.report.trace import write_trace

__all__ = [
    "bars",
    "curves",
    "lanes",
    "lanes_svg",
    "page",
    "staircase",
    "staircase_svg",
    "summary",
    "table",
    "write_trace",
]
