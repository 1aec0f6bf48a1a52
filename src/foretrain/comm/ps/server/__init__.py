"""Shard of the parameter server: sockets, the job that it serves, sums, and snapshots."""
