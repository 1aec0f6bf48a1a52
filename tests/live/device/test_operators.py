"""Operators of simulated GPUs: their kernels, shapes, values where they can be known, and what a GPU refuses."""

import sys

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretrain.live.device.operators import _entries, cuda_operators
from tests.live.command import on_gpus, simulate

LIST = """
- func: add.Tensor(Tensor self, Tensor other) -> Tensor
  structured_delegate: add.out
- func: add.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)
  structured: True
  ufunc_inner_loop:
    Generic: add (AllAndComplex)
- func: view(Tensor self) -> Tensor
  dispatch:
    CPU, CUDA, Meta: view
  autogen: view.out
- func: mkldnn_linear(Tensor self) -> Tensor
  dispatch:
    MkldnnCPU: mkldnn_linear
"""


def test_an_entry_of_pytorchs_list_names_the_keys_of_its_kernels() -> None:
    assert dict(_entries(LIST)) == {
        "add.Tensor": (frozenset(), "add.out"),
        "add.out": (frozenset({"CUDA"}), ""),
        "view": (frozenset({"CPU", "CUDA", "Meta"}), ""),
        "mkldnn_linear": (frozenset({"MkldnnCPU"}), ""),
    }
    names = cuda_operators()
    assert len(names) == len(set(names)) > 1200
    assert {"add.Tensor", "mm", "_foreach_add_.List", "_fused_adamw_", "convolution"} <= set(names)
    assert not {"einsum", "linear", "mkldnn_linear"} & set(names)


@on_gpus()
def test_attention_takes_the_kernel_that_a_gpu_would() -> None:
    import pytest
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def kernel(dtype, width=64, **given):
        q = torch.randn(2, 8, 256, width, device="cuda", dtype=dtype, requires_grad=True)
        k = q[:, :2] if given.get("enable_gqa") else q
        output = nn.functional.scaled_dot_product_attention(q, k, k, **given)
        output.sum().backward()
        assert q.grad.shape == q.shape
        return type(output.grad_fn).__name__.removeprefix("ScaledDotProduct").removesuffix("AttentionBackward0")

    half, mask = torch.bfloat16, torch.zeros(256, 256, device="cuda", dtype=torch.bfloat16)
    assert kernel(half, is_causal=True) == kernel(half, enable_gqa=True) == "Flash"
    assert kernel(half, attn_mask=mask) == kernel(torch.float32) == "Efficient"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert kernel(half) == "Efficient"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert kernel(half) == "Cudnn"
    with sdpa_kernel(SDPBackend.MATH):
        assert {"View", "Copy"} & {word for word in ("View", "Copy") if word in kernel(half)}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        kernel(torch.float32)


@on_gpus(says="calls flex_attention without torch.compile")
def test_flex_attention_never_builds_the_matrix_of_scores() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(1, 4096, 8, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        k = torch.randn(1, 8, 4096, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        output = flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + i)
        assert (output.shape, output.stride()) == (q.shape, q.stride())
        output.sum().backward()
        assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
        assert torch.cuda.max_memory_allocated() < 8 * 4096 * 4096


@on_gpus()
def test_flex_attention_takes_the_time_of_the_keys_that_its_mask_keeps() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (torch.randn(1, 8, 16384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    documents, window = torch.zeros(16384, device="cuda", dtype=torch.int32), torch.tensor(1024, device="cuda")

    def causal(b, h, i, j):
        return i >= j

    def windowed(b, h, i, j):
        return (i >= j) & (i - j < window) & (documents[i] == documents[j])

    def took(call):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call().sum().backward()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    compiled = torch.compile(flex_attention)
    masks = [None, *(create_block_mask(mask, None, None, 16384, 16384) for mask in (causal, windowed))]
    dense, before, near = (took(lambda mask=mask: compiled(q, k, v, block_mask=mask)) for mask in masks)
    same = took(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    assert abs(before / same - 1) < 0.1
    assert 1.5 * before < dense < 2.5 * before
    assert dense / 14 < near < dense / 8  # 9 of 128 blocks, and launches


@on_gpus(says="taken to be balanced")
def test_unknown_values_are_counted_as_capacity_is_planned() -> None:
    import pytest

    choices = torch.randint(8, (100_003,), device="cuda")
    assert choices.bincount(minlength=8).tolist() == [12501] * 3 + [12500] * 5
    assert choices.float().histc(4, 0, 8).tolist() == [25001] * 3 + [25000]
    assert choices.bincount(choices.double(), minlength=8).shape == (8,)
    assert (choices > 3).nonzero().shape == (100_003, 1)
    assert choices[choices > 3].shape == (100_003,)
    rows = torch.empty(100, 50, 8, device="cuda")
    assert rows[:, torch.empty(50, 8, device="cuda") > 0].shape == (100, 400)
    rows[rows > 1] = 0
    rows[rows > 1] = torch.empty(40_000, device="cuda")
    assert torch.isfinite(choices.float()).all()
    assert not torch.isnan(choices.float()).any()
    assert choices.unique().shape == (100_003,)
    values, inverse, counts = choices.view(-1, 1).unique(dim=0, return_inverse=True, return_counts=True)
    assert (*values.shape, *inverse.shape, *counts.shape) == (100_003, 1, 100_003, 100_003)
    with pytest.raises(RuntimeError, match="minlength"):
        choices.bincount()
    choices = torch.tensor([3, 0, 3, 1], device="cuda")  # known ones are counted as they are
    assert choices.bincount().tolist() == [1, 1, 0, 2]
    assert choices[choices > 0].tolist() == [3, 3, 1]
    assert not (choices > 0).all()
    choices[choices > 0] = torch.tensor([7, 8, 9], device="cuda")
    assert choices.tolist() == [7, 0, 8, 9]
    assert choices.unique().tolist() == [0, 7, 8, 9]


@on_gpus()
def test_a_map_of_chosen_experts_has_as_many_ones_as_choices_and_as_many_for_each_expert() -> None:
    from torch.nn.functional import one_hot

    tokens, experts, chosen = 1000, 8, 2
    scores = torch.randn(tokens, experts, device="cuda")
    choices = scores.topk(chosen).indices
    routed = torch.zeros_like(scores).int().scatter(1, choices, 1).bool()  # as Megatron-LM does it
    titan = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, choices, True)
    assert titan.sum(dim=0).tolist() == routed.sum(dim=0).tolist() == [tokens * chosen // experts] * experts
    assert routed.sum() == tokens * chosen
    assert routed.long().sum(dim=1, keepdim=True).tolist() == [[chosen]] * tokens
    places = torch.arange(tokens, device="cuda").expand(experts, -1).masked_select(routed.T.contiguous())
    assert places.shape == scores.T.contiguous().masked_select(routed.T).shape == (tokens * chosen,)
    by_expert = one_hot(choices, experts).permute(2, 1, 0)  # as transformers' experts
    assert [len(torch.where(each)[1]) for each in by_expert] == [tokens * chosen // experts] * experts
    known = torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    known.scatter_(1, torch.tensor([[1], [1], [3]], device="cuda"), 1)
    assert known.sum(0).tolist() == [0, 2, 0, 1]
    assert routed.zero_().sum() != tokens * chosen


@on_gpus("--live", "all")
def test_expected_counts_that_ranks_tell_each_other_agree() -> None:
    counts = torch.randint(32, (100_003,), device="cuda").bincount(minlength=32)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    assert arriving.view(8, 4).tolist() == [counts[dist.get_rank() * 4 :][:4].tolist()] * 8
    rows = torch.empty(sum(arriving.tolist()), 16, device="cuda")
    tokens = torch.empty(100_003, 16, device="cuda")
    dist.all_to_all_single(rows, tokens, arriving.view(8, 4).sum(1).tolist(), counts.view(8, 4).sum(1).tolist())


@on_gpus()
def test_operators_of_gpus_alone_train() -> None:
    x = torch.randn(16, 8, 32, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norm = nn.SyncBatchNorm(8, device="cuda")
    norm(x).sum().backward()
    assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, (8,))
    gru = nn.GRU(32, 64, batch_first=True, device="cuda")
    output, last = gru(torch.randn(16, 5, 32, device="cuda"))
    assert (output.shape, last.shape) == ((16, 5, 64), (1, 16, 64))
    output.sum().backward()
    assert all(p.grad.shape == p.shape for p in gru.parameters())
    scores = torch.randn(50, 300, 20, device="cuda", requires_grad=True)
    lengths = torch.full((300,), 50), torch.full((300,), 10)
    targets = torch.randint(1, 20, (300, 10), device="cuda")
    nn.functional.ctc_loss(scores.log_softmax(-1), targets, *lengths).backward()
    assert scores.grad.shape == scores.shape
    a, b = (torch.randn(64, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale, out = torch.ones((), device="cuda"), torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    assert torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=out.dtype, out=out) is out
    assert out.shape == (64, 64)


@on_gpus()
def test_operators_train_of_which_pytorch_knows_no_shapes() -> None:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
    from torch.distributions import Beta, Binomial, Dirichlet, Gamma

    large = (2048, 1024)
    x = torch.rand(large, device="cuda", requires_grad=True)
    classes = torch.zeros(large, dtype=torch.long, device="cuda")
    for call in (
        lambda: Gamma(x, x).rsample(),
        lambda: Beta(x, x).rsample(),
        lambda: Dirichlet(x).rsample(),
        lambda: Binomial(10, x).sample() + x,
        lambda: torch.logcumsumexp(x, 0),
        lambda: torch.matrix_exp(x.view(-1, 64, 64)),
        lambda: FakeQuantize(MovingAverageMinMaxObserver).to("cuda")(x),
        lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda: torch.fake_quantize_per_channel_affine(x, x[0].detach(), classes[0].int(), 1, -128, 127),
        lambda: nn.functional.multi_margin_loss(x, classes[:, 0]),
        lambda: nn.functional.multilabel_margin_loss(x, classes),
        lambda: nn.functional.fractional_max_pool3d(x.view(2, -1, 16, 16, 16), 2, output_size=8),
    ):
        x.grad = None
        call().sum().backward()
        assert x.grad.shape == large
    # The path without gradients, and without nested tensors.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 2).to("cuda").eval()
    padding = torch.zeros(4, 128, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        assert encoder(x.view(-1, 128, 512)[:4], src_key_padding_mask=padding).shape == (4, 128, 512)


@on_gpus()
def test_products_and_convolutions_follow_the_settings_of_tf32_midway() -> None:
    from tests.live.scripts.timing import seconds

    left = torch.empty(4096, 4096, device="cuda")
    plain = seconds(lambda: left @ left)
    torch.backends.cuda.matmul.allow_tf32 = True
    fast = seconds(lambda: left @ left)
    assert 4 * fast < plain
    torch.set_float32_matmul_precision("highest")
    assert seconds(lambda: left @ left) == plain
    torch.set_float32_matmul_precision("high")
    assert seconds(lambda: left @ left) == fast
    half = left.half()
    assert seconds(lambda: half @ half) < fast
    images, weights = torch.empty(32, 256, 28, 28, device="cuda"), torch.empty(256, 256, 1, 1, device="cuda")
    fast = seconds(lambda: nn.functional.conv2d(images, weights))
    torch.backends.cudnn.allow_tf32 = False
    assert 2 * fast < seconds(lambda: nn.functional.conv2d(images, weights))


@on_gpus()
def test_made_up_values_are_the_same_ones_however_many() -> None:
    dirt = [torch.rand(20_000) for _ in range(50)]
    del dirt
    assert torch.ones(20_000, device="cuda").tolist() == [1.0] * 20_000
    assert torch.ones(20_000, device="cuda", dtype=torch.int32).tolist() == [0] * 20_000
    pinned = torch.empty(20_000, pin_memory=True)
    pinned.copy_(torch.ones(20_000, device="cuda"))
    assert pinned.tolist() == [0.0] * 20_000


@on_gpus()
def test_a_result_too_large_for_values_is_computed_once() -> None:
    from foretrain.live.device import native_build

    counts = native_build.load().counts
    row = torch.arange(2048, device="cuda")
    assert (row - 1).tolist()[:3] == [-1, 0, 1]

    def computed(call):
        before = counts()["computed"]
        results = [call() for _ in range(5)]
        assert len({result.shape for result in results}) == 1
        return counts()["computed"] - before

    assert computed(lambda: row[:512] - row[:512]) == 5
    assert computed(lambda: row - row[:, None]) == 1


@on_gpus()
def test_factorizations_of_unknown_matrices_succeed_and_of_known_ones_as_they_do() -> None:
    import pytest

    from tests.live.scripts.timing import seconds

    large, batch = torch.randn(2048, 2048, device="cuda"), torch.randn(8, 64, 64, device="cuda")
    small = (large @ large)[:2, :2].contiguous()
    linalg = torch.linalg
    for matrix in (large, batch, small):
        for call in (linalg.inv, linalg.cholesky, linalg.lu_factor, linalg.eigh, linalg.svd):
            call(matrix)
        linalg.solve(matrix, matrix)
    assert seconds(lambda: linalg.eigh(large)) > 3 * seconds(lambda: linalg.cholesky(large))
    with pytest.raises(linalg.LinAlgError):
        linalg.inv(torch.zeros(2, 2, device="cuda"))


@on_gpus()
def test_tensors_on_different_devices_or_of_different_types_are_refused_in_pytorchs_words() -> None:
    import pytest

    functional = nn.functional
    for n in (4, 1024):
        here, host = torch.ones(n, n, device="cuda"), torch.ones(n, n)
        for add in (torch.Tensor.add, torch.Tensor.add_):
            with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu!"):
                add(here, host)
        with pytest.raises(RuntimeError, match="but got mat2 is on cpu, different from other tensors on cuda:0"):
            torch.mm(here, host)
        indices, weights = torch.zeros(n, dtype=torch.long), torch.ones(n, n, 1, 1)
        with pytest.raises(RuntimeError, match="but got index is on cpu"):
            functional.embedding(indices, here)
        with pytest.raises(RuntimeError, match="should be the same"):
            functional.conv2d(here.view(1, n, n, 1), weights)
        assert (here + torch.tensor(1.0)).shape == here.where(here > 0, torch.tensor(0.0)).shape == here.shape
        assert here[indices].shape == here.shape
        here[indices] = 1.0

        half, layer = here.half(), nn.Linear(n, n, device="cuda")
        with pytest.raises(RuntimeError, match="expected mat1 and mat2 to have the same dtype, but got: float != c10:"):
            torch.mm(here, half)
        with pytest.raises(RuntimeError, match="the same dtype, but got: c10::Half != float"):
            layer(half)
        with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
            torch.bmm(here[None], half[None])
        with pytest.raises(RuntimeError, match="should be the same"):
            functional.conv2d(half.view(1, n, n, 1), here.view(n, n, 1, 1))
        with torch.autocast("cuda", torch.bfloat16):
            layer(half)
        assert (here + half).dtype == torch.float


@pytest.mark.parametrize(("gpu", "able"), [("A100", False), ("L40S", True), ("H100", True)])
def test_eight_bits_need_a_gpu_that_has_them(gpu: str, able: bool) -> None:
    def script():
        import contextlib

        import pytest

        left = torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.ones((), device="cuda")
        refused = pytest.raises((RuntimeError, ValueError), match=r"with compute capability >= 9\.0 or 8\.9")
        with contextlib.nullcontext() if sys.argv[1] == "True" else refused:
            torch._scaled_mm(left, left.t(), scale, scale, out_dtype=torch.bfloat16)

    simulate(gpu, script, able)


@on_gpus(cluster="H100")
def test_a_model_is_traced() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(8 * 64, 4)).cuda()
    images = torch.rand(16, 8, 4, 4, device="cuda")
    traced = torch.jit.trace(model, images, check_trace=False)
    assert traced(images).shape == (16, 4)
    traced(images).sum().backward()
