"""How long a user waits: ``foretrain --help``, and comparing all policies on VGG-16, tuned and not.

The baseline, in the same interleaved run, is starting Python and importing the libraries the command line is made of.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from measure import finish, interleaved, options, spread

from foretrain.experiments import compare
from foretrain.workload import zoo

CLUSTER = "4x8xV100@100Gbps"


def command(*arguments: str) -> None:
    """Runs Python in a process of its own and throws the output away."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """Prints medians and the RESULT line."""
    arguments = options(__doc__ or "")
    times = interleaved(
        {
            "python": lambda: command("-c", "import tyro, rich, msgspec"),
            "help": lambda: command("-m", "foretrain", "--help"),
            "command untuned": lambda: command(
                "-m", "foretrain", "compare", "vgg16", "--cluster", CLUSTER, "--no-tune"
            ),
            "command tuned": lambda: command("-m", "foretrain", "compare", "vgg16", "--cluster", CLUSTER),
            "compare untuned": lambda: compare(zoo("vgg16"), CLUSTER, tuned=False, trace=False),
            "compare tuned": lambda: compare(zoo("vgg16"), CLUSTER, trace=False),
            "compare tuned, link-bound": lambda: compare(zoo("vgg16"), "4x1xV100@10Gbps,ps=4", trace=False),
        }
    )
    for name, values in times.items():
        print(f"{name:28s} {spread(values):>32s} s   {median(values) / median(times['python']):6.2f} × baseline")
    values = {
        "help_s": median(times["help"]),
        "help_vs_python": median(times["help"]) / median(times["python"]),
        "compare_untuned_s": median(times["compare untuned"]),
        "compare_tuned_s": median(times["compare tuned"]),
        "compare_tuned_link_bound_s": median(times["compare tuned, link-bound"]),
        "command_tuned_s": median(times["command tuned"]),
    }
    finish(arguments, "command", values, times)


if __name__ == "__main__":
    main()
