"""Explorer: a page on loopback that answers at once what another GPU, link, batch or schedule would bring.

    question (URL) ─▶ answer: two simulations, figures as data ─▶ page
                  └─▶ worker process: the same with knobs searched; curves; loads of a network

answers.py  what is asked, and what is answered    server.py  HTTP on loopback, and the worker
explore.html, explore.js  the page; style and charts are those of `foretrain.report`
"""

from foretrain.explore.answers import Opened, Question, opened
from foretrain.explore.server import Explorer

__all__ = ["Explorer", "Opened", "Question", "opened"]
