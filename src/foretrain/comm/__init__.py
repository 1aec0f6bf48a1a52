"""Moves gradients between processes, in the order that a policy decides. Knows buffers and no framework."""
