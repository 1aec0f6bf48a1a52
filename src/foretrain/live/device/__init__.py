"""A CUDA device that is not there: device type ``cuda`` in a stock CPU build of PyTorch, without data or compute.

An extension in C++ (``native/``, compiled on first use by `build`) makes ``torch.empty(device="cuda")`` an ordinary
tensor, so autograd, autocast, DistributedDataParallel's reducer, FSDP and DTensor see what they see on a GPU. Its
kernels infer shapes, keep real values where control flow may hang on them, and write what a GPU would do into the
rank's log (`foretrain.live.event_log`). The rest of the package is Python around it:

`operators` which operators have kernels on CUDA · `cuda`, `streams` and `graphs` what ``torch.cuda`` asks of its C part
· `groups` process groups · `clocks` virtual time · `pricing` what an operator costs · `compiler` what ``torch.compile``
does · `profiling` what ``torch.profiler`` shows · `rank` one rank: the device activated, the script run · `zygote` the
process that all ranks are forked from.
"""
