"""The two lines of ByteScheduler's paper: ``from foretrain.mxnet import ScheduledKVS; kvs = ScheduledKVS(kvs)``."""

from foretrain.plugins.mxnet import ScheduledKVS

__all__ = ["ScheduledKVS"]
