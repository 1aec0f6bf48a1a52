"""Keras on TensorFlow, without the packages that the two import where they find them, for what no test uses.

These take a third of the seconds that a rank needs to start.
"""

import os
import sys
from importlib import import_module

os.environ |= {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
sys.modules |= dict.fromkeys(("jax", "pandas", "sklearn"))

keras, tf = import_module("keras"), import_module("tensorflow")
