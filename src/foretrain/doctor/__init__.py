"""Examination of the hosts of a job before it runs: what is installed, which network it takes, how fast that is."""
