"""Transports of a packet network, one file each: sending, reaction to losses and to marks."""
