"""Apex: what is fused there is fused in PyTorch by now, and takes the time of that."""
