from pathlib import Path

from foretrain.comm.bounded import optireduce
from foretrain.network import jit
from foretrain.network.fluid import kernel
from foretrain.network.packet import event_kernel

KEY = ("signature", ("x86_64-linux", "skylake", "+avx2"), "bytecode")
FOR_ANY = ("signature", ("x86_64-linux", "generic", ""), "bytecode")


class Kept(dict):
    """A file of what numba keeps of one kernel."""

    load = dict.get
    save = dict.__setitem__
    flush = dict.clear


def test_kernel_of_a_wheel_goes_before_that_of_this_processor():
    own, carried = Kept({KEY: "own"}), Kept({FOR_ANY: "carried"})
    assert jit._CarriedFirst(own, carried).load(KEY) == "carried"
    assert jit._CarriedFirst(own, Kept()).load(KEY) == "own"
    assert jit._CarriedFirst(Kept(), Kept()).load(KEY) is None


def test_what_is_compiled_here_is_kept_here():
    own, carried = Kept(), Kept()
    jit._CarriedFirst(own, carried).save(KEY, "own")
    assert (own, carried) == ({KEY: "own"}, {})


def test_kernel_is_compiled_anew_when_a_file_of_its_package_changes(tmp_path: Path):
    (tmp_path / "one.py").write_text("x = 1")
    before = jit._stamp((tmp_path,))
    (tmp_path / "one.py").write_text("x = 2")
    jit._stamp.cache_clear()
    assert jit._stamp((tmp_path,)) != before


def test_packages_whose_kernels_a_kernel_may_call():
    network = Path(jit.__file__).parent
    for one, folders in (
        (kernel.advance, ["fluid"]),
        (event_kernel.run, ["packet"]),
        (optireduce.transform, ["../comm/bounded", "packet"]),
    ):
        function = getattr(one, "py_func", one)
        assert jit._folders(function) == tuple((network / folder).resolve() for folder in folders)
