"""A CUDA device that is not there: device type ``cuda`` in a stock CPU build of PyTorch, without data and without compute."""
