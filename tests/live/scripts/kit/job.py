"""Run as a module: python -m kit.job."""

import json
import sys

from .layers import trained

trained(steps=2)
print(json.dumps({"name": __name__, "package": __package__, "arguments": sys.argv[1:]}))
