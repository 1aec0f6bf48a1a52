"""Optimizers on a server over a transport with bounded loss: the server, and the ranks' copies of its parameters."""
