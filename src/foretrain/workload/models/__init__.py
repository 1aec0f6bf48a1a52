"""The zoo: well-known models as workloads, from their architecture and a device's rates; needs no torch.

net.py         the builder: follows shapes, counts parameters, multiplications and memory traffic
convnets.py …  one file per family, written like the model's own definition
cost.py        architecture + device + batch → times and gradients
catalog.py     the names, their defaults, and `zoo`
"""

from foretrain.workload.models.catalog import zoo, zoo_models

__all__ = ["zoo", "zoo_models"]
