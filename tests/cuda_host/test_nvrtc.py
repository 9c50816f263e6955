"""Every specialisation compiles for the real architectures: no spills, no warnings, tensor cores used.

Needs no GPU, but the wheels cupy-cuda13x, nvidia-cuda-nvrtc and nvidia-cuda-runtime.
"""

import re
import shutil
import subprocess

import pytest

from npattn.kernels import _cuda
from npattn.kernels.edge import cuda_launch as edge
from npattn.kernels.tile import cuda_launch as tile

ARCHITECTURES = ("sm_80", "sm_90", "sm_90a")
FAMILIES = ("forward", "decode", "backward_rows", "backward_cols", "backward_atomic", "dbias")
NOTHING, EVERYTHING = (False, False, False), (True, True, True)  # bias, softcap, dropout
FEATURES = {
    "nothing": NOTHING,
    "bias": (True, False, False),
    "softcap": (False, True, False),
    "dropout": (False, False, True),
    "everything": EVERYTHING,
}


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    """The compiler, or the reason why there is none."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed", exc_type=ImportError)
    try:
        _cuda.compile_cubin('extern "C" __global__ void nothing() {}', "sm_80")
    except Exception as error:
        pytest.skip(f"NVRTC cannot be used: {str(error).splitlines()[0]}")


def check(kernel, arch):
    """Compile; assert what the log must not say; return the cubin."""
    cubin, log = _cuda.compile_cubin(_cuda.source_text(kernel), arch, ("--ptxas-options=-v",))
    found = _cuda.resources(log)
    assert found, log
    for entry in found:
        assert entry.spills == 0, entry
        assert entry.stack == 0, entry
        assert entry.registers <= 255
    assert not re.search(r"C75\d\d|warning", log), log
    return cubin


def tile_kernel(family, c_type, head_dim, features):
    return tile.specialise(family, c_type, head_dim, head_dim, *features)


def edge_kernel(direction, score, c_type, cut, features, with_edge_features=False):
    bias, softcap, dropout = features
    return edge.specialise(
        direction, score, c_type, cut, bias, softcap and score == "dot", dropout, with_edge_features
    )


QUICK_WGMMA = ("f16-128-nothing", "bf16-64-everything")
WGMMA = [
    pytest.param(
        *(c_type, dim, features),
        id=f"{c_type}-{dim}-{name}",
        marks=[] if f"{c_type}-{dim}-{name}" in QUICK_WGMMA else pytest.mark.slow,
    )
    for c_type in ("f16", "bf16")
    for dim in (64, 128)
    for name, features in FEATURES.items()
]
QUICK = [
    ("forward", "f16", 128, EVERYTHING, "sm_90"),
    ("forward", "bf16", 64, NOTHING, "sm_80"),
    ("backward_cols", "bf16", 128, NOTHING, "sm_90a"),
    ("decode", "float", 64, NOTHING, "sm_80"),
]


@pytest.mark.parametrize(("family", "c_type", "head_dim", "features", "arch"), QUICK)
def test_a_choice_of_attention_kernels_compiles_without_spills(family, c_type, head_dim, features, arch):
    check(tile_kernel(family, c_type, head_dim, features), arch)


@pytest.mark.slow
@pytest.mark.parametrize("features", [NOTHING, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("c_type", ["f16", "bf16", "float", "double"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_attention_kernel_compiles_without_spills(arch, family, c_type, head_dim, features):
    if family == "backward_atomic" and (c_type == "double" or head_dim > 128):
        pytest.skip("there is no such kernel")
    check(tile_kernel(family, c_type, head_dim, features), arch)


@pytest.mark.parametrize("family", ["forward_wgmma", "forward_tma"])
@pytest.mark.parametrize(("c_type", "dim", "features"), WGMMA)
def test_the_kernel_for_sm_90a_compiles_without_spills(family, c_type, dim, features, tmp_path):
    kernel = tile.specialise(family, c_type, dim, dim, *features)
    cubin = check(kernel, "sm_90" + kernel.variant)
    if shutil.which("nvdisasm") is not None:
        sass = disassembled(cubin, tmp_path)
        assert f"HGMMA.64x{dict(kernel.defines)['STEP']}x16.F32" in sass  # logits
        assert re.search(rf"HGMMA\.64x{dim}x16\.F32.*\.tnspB", sass)  # output
        assert "USETMAXREG" in sass
        assert ("UTMALDG.4D" if family == "forward_tma" else "LDGSTS") in sass
        assert not re.search(r"\b(LDL|STL)\b", sass)


def disassembled(cubin, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin + b"\0")  # CuPy drops the last byte
    return subprocess.run(["nvdisasm", str(path)], capture_output=True, text=True, check=True).stdout


def test_paged_decoding_compiles():
    check(tile.specialise("decode", "f16", 128, 128, False, False, False, True), "sm_80")


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a == "sm_90" else pytest.mark.slow) for a in ARCHITECTURES]
)
@pytest.mark.parametrize("c_type", ["f16", "float"])
@pytest.mark.parametrize("score", ["dot", "additive", "dynamic"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_edge_kernels_compile_without_spills(direction, score, c_type, arch):
    cut = edge.cut_of(2 if c_type == "f16" else 4, 8, 1 if score == "additive" else 16, 16)
    check(edge_kernel(direction, score, c_type, cut, EVERYTHING), arch)
    if score != "additive":
        check(edge_kernel(direction, score, c_type, cut, NOTHING, with_edge_features=True), arch)


@pytest.mark.skipif(shutil.which("nvdisasm") is None, reason="there is no disassembler (nvdisasm)")
@pytest.mark.parametrize(
    ("c_type", "instruction"), [("f16", "HMMA.16816"), ("float", "HMMA.1688"), ("double", "DMMA")]
)
def test_machine_code_uses_tensor_cores(c_type, instruction, tmp_path):
    cubin = check(tile_kernel("forward", c_type, 64, NOTHING), "sm_90")
    sass = disassembled(cubin, tmp_path)
    assert instruction in sass
    assert "LDGSTS" in sass  # cp.async
    if c_type == "f16":
        assert "LDSM" in sass  # ldmatrix
    assert not re.search(r"\b(LDL|STL)\b", sass)  # no local memory
