"""``python -m foretrain``."""

from foretrain.cli import main

main()
