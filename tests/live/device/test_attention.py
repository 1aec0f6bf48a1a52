"""Which kernel scaled dot-product attention takes, as a GPU since Ampere would."""

from __future__ import annotations

from pathlib import Path

from tests.live.device.simulated import simulated


def test_attention_takes_the_kernel_that_a_gpu_would(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as attend

        def kernel(dtype, width=64, **given):
            q = torch.randn(2, 8, 256, width, device="cuda", dtype=dtype, requires_grad=True)
            k = q[:, :2] if given.get("enable_gqa") else q
            output = attend(q, k, k, **given)
            output.sum().backward()
            assert q.grad.shape == q.shape
            return type(output.grad_fn).__name__.removeprefix("ScaledDotProduct").removesuffix("AttentionBackward0")

        half, mask = torch.bfloat16, torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
        assert kernel(half, is_causal=True) == "Flash"
        assert kernel(half, enable_gqa=True) == "Flash"
        assert kernel(half, attn_mask=mask) == "Efficient"
        assert kernel(torch.float32) == "Efficient"
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            assert kernel(half) == "Efficient"
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            assert kernel(half) == "Cudnn"
        with sdpa_kernel(SDPBackend.MATH):
            assert "View" in kernel(half) or "Copy" in kernel(half)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            try:
                kernel(torch.float32)
            except RuntimeError as error:
                assert "No available kernel" in str(error)
            else:
                raise AssertionError
        """,
    )


def test_flex_attention_never_builds_the_matrix_of_scores(tmp_path: Path) -> None:
    simulated(
        tmp_path,
        """
        from torch.nn.attention.flex_attention import flex_attention

        for dtype in (torch.bfloat16, torch.float32):
            q = torch.randn(1, 4096, 8, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
            k = torch.randn(1, 8, 4096, 64, device="cuda", dtype=dtype, requires_grad=True)
            torch.cuda.reset_peak_memory_stats()
            output = flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + i)
            assert output.shape == q.shape and output.stride() == q.stride()
            output.sum().backward()
            assert q.grad.shape == q.shape and k.grad.shape == k.shape
            assert torch.cuda.max_memory_allocated() < 8 * 4096 * 4096
        """,
    )
