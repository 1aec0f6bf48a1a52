from foretrain.live.device.operators import _entries, cuda_operators

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
- func: einsum(Tensor self) -> Tensor
- func: mkldnn_linear(Tensor self) -> Tensor
  dispatch:
    MkldnnCPU: mkldnn_linear
"""


def test_what_an_entry_says_of_its_kernels() -> None:
    assert dict(_entries(LIST)) == {
        "add.Tensor": (frozenset(), "add.out"),
        "add.out": (frozenset({"CUDA"}), ""),
        "view": (frozenset({"CPU", "CUDA", "Meta"}), ""),
        "einsum": (frozenset(), ""),
        "mkldnn_linear": (frozenset({"MkldnnCPU"}), ""),
    }


def test_operators_with_cuda_kernels_of_their_own() -> None:
    names = cuda_operators()
    assert len(names) == len(set(names))
    assert len(names) > 1200
    assert {"add.Tensor", "mm", "_foreach_add_.List", "_fused_adamw_", "convolution"} <= set(names)
    assert not {"einsum", "linear", "mkldnn_linear"} & set(names)
