"""FlashAttention 3 under the name of the module that its own repository builds."""

from foretrain.live.device.stand_ins.flash_attn_3 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
