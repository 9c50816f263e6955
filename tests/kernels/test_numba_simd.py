"""The vector layer by itself: exp and tanh, conversions, the hash, transposes and the matmul, at this width.

``test_every_width_passes`` runs this file and the tile kernels' once more at the widths that were not chosen.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn._dropout import R0, R1, keep_mask, threshold

jit_module = pytest.importorskip("npattn.kernels._jit")
if jit_module.INTERPRETED:
    pytest.skip("explicit vectors do not run interpreted", allow_module_level=True)

from numba import types  # noqa: E402

from npattn.kernels._jit import address, jit  # noqa: E402
from npattn.kernels._simd import _host, exp, hashing, matmul, storage, transpose, vectors  # noqa: E402

load, store, vector_bytes, scalar_bytes = (
    vectors.load, vectors.store, vectors.vector_bytes, vectors.scalar_bytes,
)  # fmt: skip
_exp, _tanh, _fold, _drop, _matmul = exp.exp, exp.tanh, hashing.fold, hashing.drop, matmul.matmul
_square, _load_half, _store_half = transpose.square, storage.load_half, storage.store_half
_load_bfloat, _store_bfloat = storage.load_bfloat, storage.store_bfloat
_splat, _cast, _hsum, _hmax = vectors.splat, vectors.cast, vectors.hsum, vectors.hmax
_store_scalar, _word = vectors.store_scalar, vectors.load_int64


@jit
def map_exp(source, target, count, one):
    for i in range(count):
        store(target + i * vector_bytes(one), _exp(load(source + i * vector_bytes(one), one)))


@jit
def map_tanh(source, target, count, one):
    for i in range(count):
        store(target + i * vector_bytes(one), _tanh(load(source + i * vector_bytes(one), one)))


@jit
def product(a, a_row, a_col, b, b_row, c, c_row, rows, count, depth, accumulate, one):
    _matmul(a, a_row, a_col, b, b_row, c, c_row, rows, count, depth, accumulate, one)


@jit
def transposed(source, source_row, target, target_row, one):
    _square(source, source_row, target, target_row, one)


@jit
def there_and_back(source, half, bfloat, count, width, one):
    for i in range(count):
        value = load(source + i * vector_bytes(one), one)
        _store_half(half + i * width * 2, value)
        _store_bfloat(bfloat + i * width * 2, value)


@jit
def back(half, bfloat, wide_half, wide_bfloat, count, width, one):
    for i in range(count):
        store(wide_half + i * vector_bytes(one), _load_half(half + i * width * 2, one))
        store(wide_bfloat + i * vector_bytes(one), _load_bfloat(bfloat + i * width * 2, one))


@jit
def dropped(target, words, count, width, limit, one):
    for i in range(count):
        kept = _drop(_splat(one), _word(words), _word(words + 8), i * width, limit, one)
        store(target + i * vector_bytes(one), kept)


@jit(returns=types.intp)
def folded(words, count):
    state = _word(words)
    for i in range(1, count):
        state = _fold(state, _word(words + 8 * i))
    return state


@jit
def reduced(source, target, one):
    _store_scalar(target, _hsum(load(source, one)))
    _store_scalar(target + scalar_bytes(one), _hmax(load(source, one)))


def _units(ours: Any, exact: Any, dtype: Any) -> float:
    """The largest error in units of the last place of the exact result."""
    unit = np.spacing(np.abs(exact).astype(dtype)).astype(np.longdouble)
    return float(np.max(np.abs(ours.astype(np.longdouble) - exact) / unit))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_is_within_two_units_in_the_last_place(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    reach = 88.0 if dtype == np.float32 else 709.0
    parts = [rng.uniform(-reach, reach, 1 << 14), rng.uniform(-1, 1, 1 << 14), -rng.exponential(20, 1 << 14)]
    parts.append(rng.uniform(-104, -86, 1 << 12) if dtype == np.float32 else rng.uniform(-745, -700, 1 << 12))
    x = np.concatenate(parts).astype(dtype)  # the last part gives denormals
    y = np.empty_like(x)
    map_exp(address(x), address(y), x.nbytes // (4 * _host.WIDTH), dtype(1))
    assert _units(y, np.exp(x.astype(np.longdouble)), dtype) < 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_and_tanh_at_the_ends(dtype: Any) -> None:
    x = np.resize(np.array([np.nan, np.inf, -np.inf, 0, 1e30, -1e30, -0.0, -2000], dtype), 64)
    y = np.empty_like(x)
    map_exp(address(x), address(y), x.nbytes // (4 * _host.WIDTH), dtype(1))
    np.testing.assert_array_equal(y[:8], [np.nan, np.inf, 0, 1, np.inf, 0, 1, 0])
    map_tanh(address(x), address(y), x.nbytes // (4 * _host.WIDTH), dtype(1))
    np.testing.assert_array_equal(y[:8], [np.nan, 1, -1, 0, 1, -1, 0, -1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh_is_within_two_units_in_the_last_place(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-12, 12, 1 << 14), rng.uniform(-1, 1, 1 << 14)]).astype(dtype)
    y = np.empty_like(x)
    map_tanh(address(x), address(y), x.nbytes // (4 * _host.WIDTH), dtype(1))
    assert _units(y, np.tanh(x.astype(np.longdouble)), dtype) < 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("depth", [1, 37])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_matmul_of_any_size_and_stride(dtype: Any, depth: int, count: int) -> None:
    rng = np.random.default_rng(0)
    lanes = _host.lanes(np.dtype(dtype).itemsize * 8)
    tolerance = 1e-4 if dtype == np.float32 else 1e-12
    for rows in range(1, 14):
        for order in "CF":
            a = np.asarray(rng.standard_normal((rows, depth)).astype(dtype), order=order)
            b = rng.standard_normal((depth, count * lanes)).astype(dtype)
            c = rng.standard_normal((rows, count * lanes)).astype(dtype)
            for accumulate in (False, True):
                expected = a @ b + (c if accumulate else 0)
                product(
                    address(a), *a.strides, address(b), b.strides[0], address(c), c.strides[0], rows, count,
                    depth, accumulate, dtype(1),
                )  # fmt: skip
                np.testing.assert_allclose(c, expected, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transpose_of_a_square(dtype: Any) -> None:
    lanes = _host.lanes(np.dtype(dtype).itemsize * 8)
    source = np.arange(lanes * (lanes + 3)).reshape(lanes, lanes + 3).astype(dtype)
    target = np.empty((lanes, lanes + 1), dtype)
    transposed(address(source), source.strides[0], address(target), target.strides[0], dtype(1))
    np.testing.assert_array_equal(target[:, :lanes], source[:, :lanes].T)


def test_sixteen_bit_formats_round_to_nearest_even_and_back() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.standard_normal(1000), [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65520, 1e-7, 6e-8, 1e30],
         1 + np.arange(64) / 4096, rng.standard_normal(500) * 1e-5]
    ).astype(np.float32)  # fmt: skip
    x = np.resize(x, 1600)
    half, bfloat = np.empty(x.size, np.float16), np.empty(x.size, ml_dtypes.bfloat16)
    count = x.size // _host.WIDTH
    there_and_back(address(x), address(half), address(bfloat), count, _host.WIDTH, np.float32(1))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16))
        np.testing.assert_array_equal(
            bfloat.astype(np.float32), x.astype(ml_dtypes.bfloat16).astype(np.float32)
        )
    wide = np.empty((2, x.size), np.float32)
    back(
        address(half), address(bfloat), address(wide[0]), address(wide[1]), count, _host.WIDTH, np.float32(1)
    )
    np.testing.assert_array_equal(wide[0], half.astype(np.float32))
    np.testing.assert_array_equal(wide[1], bfloat.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout_words_are_those_of_keep_mask(dtype: Any) -> None:
    seed, b, h, i, p = 0xFEDCBA9876543210, 3, 5, 70_000, 0.35
    parts = [np.array([start, seed & 0xFFFFFFFF, seed >> 32, b, h, i], np.int64) for start in (R0, R1)]
    words = np.array([folded(address(part), part.size) for part in parts])
    lanes = _host.lanes(np.dtype(dtype).itemsize * 8)
    kept = np.empty(512, dtype)
    dropped(address(kept), address(words), 512 // lanes, lanes, threshold(p), dtype(1))
    expected = keep_mask(seed, (*tuple(map(np.array, (b, h, i))), np.arange(512)), p)
    np.testing.assert_array_equal(kept != 0, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_horizontal_sum_and_maximum(dtype: Any) -> None:
    lanes = _host.lanes(np.dtype(dtype).itemsize * 8)
    source = np.random.default_rng(0).permutation(lanes).astype(dtype)
    target = np.empty(2, dtype)
    reduced(address(source), address(target), dtype(1))
    assert target.tolist() == [lanes * (lanes - 1) / 2, lanes - 1]


# --- other widths, interpretation, and the disk cache, each in a fresh process
# --------------------------------


def _run(code: str, *arguments: str, cwd: Any = None, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


_AGAINST_ORACLE = """
import sys
import numpy as np
import npattn
from npattn.kernels._simd import _host
assert _host.WIDTH == int(sys.argv[1])
rng = np.random.default_rng(0)
for dtype in (np.float32, np.float64):
    q, k, v, dout = (rng.standard_normal((1, 2, n, d)).astype(dtype)
                     for n, d in ((70, 20), (133, 20), (133, 35), (70, 35)))
    for options in ({}, {"mask": npattn.masks.Causal(), "softcap": 2.0, "sinks": np.zeros(2, dtype)},
                    {"bias": rng.standard_normal((70, 133)).astype(dtype), "dropout_p": 0.3, "seed": 5},
                    {"mask": rng.random((70, 133)) < 0.5}):
        (out, pull), (exact, pull_exact) = (
            npattn.attention_vjp(q, k, v, **options, backend=name) for name in ("numba", "oracle"))
        tolerance = 2e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(out, exact, atol=tolerance)
        for ours, theirs in zip(pull(dout), pull_exact(dout)):
            if theirs is not None:
                np.testing.assert_allclose(ours, theirs, atol=10 * tolerance)
print("ok")
"""


@pytest.mark.parametrize("width", [16, 8, 4])
def test_attention_agrees_with_the_oracle_at_every_width(width: int) -> None:
    """Width 16 runs only where the processor has the registers: LLVM would split it, slowly but right."""
    assert _run(_AGAINST_ORACLE, str(width), NPATTN_VECTOR_WIDTH=str(width)) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 4])
def test_every_width_passes(width: int) -> None:
    if os.environ.get("NPATTN_VECTOR_WIDTH"):
        pytest.skip("this is the run at a forced width")
    names = ("test_numba_tile.py", "test_linear_kernels.py")
    files = [str(Path(__file__)), *(str(Path(__file__).parent / name) for name in names)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *files],
        env={**os.environ, "NPATTN_VECTOR_WIDTH": str(width)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_wrong_width_is_named() -> None:
    code = "try:\n import npattn.kernels._simd._host\nexcept ValueError as error: print(error)"
    assert "NPATTN_VECTOR_WIDTH" in _run(code, NPATTN_VECTOR_WIDTH="5")


def test_interpreted_the_numpy_implementation_serves() -> None:
    """NUMBA_DISABLE_JIT=1: explicit vectors cannot run, so numba says why not and auto takes numpy."""
    code = """
import numpy as np, npattn
x = np.ones((1, 1, 3, 4), np.float32)
assert npattn.attention(x, x, x).shape == x.shape
try:
    npattn.attention(x, x, x, backend="numba")
except ValueError as error:
    print("NUMBA_DISABLE_JIT" in str(error))
"""
    assert _run(code, NUMBA_DISABLE_JIT="1") == "True"


@pytest.mark.skipif(not _host.IS_X86, reason="names features of x86 processors")
@pytest.mark.parametrize("features", ["", "+sse4.1,+sse4.2", "+avx,+avx2,+fma"])
def test_processors_without_conversions_or_rounding_compute_too(features: str, tmp_path: Path) -> None:
    """No F16C: float16 goes to NumPy. No SSE4.1: exp rounds without the instruction."""
    code = """
import numpy as np, npattn
from npattn.kernels._simd import _host
assert not _host.HAS_HALF
rng = np.random.default_rng(0)
q, k, v, dout = (5 * rng.standard_normal((1, 2, 70, 16)) for _ in range(4))
for dtype, limit in (("f4", 3e-5), ("f8", 1e-12)):
    arrays = [x.astype(dtype) for x in (q, k, v)]
    out, pullback = npattn.attention_vjp(*arrays, softcap=3.0, backend="numba")
    exact, exact_pullback = npattn.attention_vjp(*map(np.float64, arrays), softcap=3.0, backend="oracle")
    grads = zip((out, *pullback(dout.astype(dtype))[:3]), (exact, *exact_pullback(dout)[:3]), strict=True)
    assert all(abs(a - b).max() < limit for a, b in grads)
half = [x.astype("f2") for x in (q, k, v)]
assert abs(npattn.attention(*half).astype("f8") - npattn.attention(*half, backend="oracle")).max() < 0.02
try:
    npattn.attention(*half, backend="numba")
except ValueError as error:
    print("F16C" in str(error))
"""
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    assert _run(code, NUMBA_CACHE_DIR=str(tmp_path), **environment) == "True"


_SMALL = """
import numpy as np, npattn
from npattn.kernels._jit import jit
from npattn.kernels.tile.numba_cpu import _backward
x = np.ones((1, 1, 3, 4), np.float32)
assert npattn.get_num_threads() >= 1
_backward.row_units.version((0, 0, 0, 0, np.float32(1)))
origins = _backward.row_units.origins
print(origins.count("disk"), origins.count("compiler"))
"""


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """A copy of the package, to be changed at will."""
    import shutil

    import npattn

    target = tmp_path / "site" / "npattn"
    ignore = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    shutil.copytree(Path(npattn.__file__).parent, target, ignore=ignore)
    return target


def test_a_change_in_any_kernel_source_invalidates_the_cache(copied_package: Path, tmp_path: Path) -> None:
    """A vector routine lives in another file than the cached kernel: Numba alone would run stale code."""
    environment = {"PYTHONPATH": str(copied_package.parent), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert _run(_SMALL, cwd=tmp_path, **environment) == "0 1"
    assert _run(_SMALL, cwd=tmp_path, **environment) == "1 0"
    with (copied_package / "kernels" / "_simd" / "exp.py").open("a") as file:
        file.write("\n# changed\n")
    assert _run(_SMALL, cwd=tmp_path, **environment) == "0 1"


def test_code_of_sources_edited_meanwhile_is_not_kept(copied_package: Path, tmp_path: Path) -> None:
    """A process that began before the edit reads some sources after it."""
    environment = {"PYTHONPATH": str(copied_package.parent), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    edit = f"""
from npattn.kernels._jit import source_stamp
source_stamp()
with open({str(copied_package / "kernels" / "_simd" / "exp.py")!r}, "a") as file:
    file.write("# changed")
"""
    assert _run(edit + _SMALL, cwd=tmp_path, **environment) == "0 1"
    assert not list((tmp_path / "cache").rglob("*row_units*.nbc"))


def test_a_damaged_cache_is_compiled_anew(copied_package: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(copied_package.parent), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert _run(_SMALL, cwd=tmp_path, **environment) == "0 1"
    (data,) = (tmp_path / "cache").rglob("*row_units*.nbc")
    (index,) = (tmp_path / "cache").rglob("*row_units*.nbi")
    whole = data.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * len(whole)):
        data.write_bytes(damaged)
        assert _run(_SMALL, cwd=tmp_path, **environment) == "0 1"
        assert _run(_SMALL, cwd=tmp_path, **environment) == "1 0"
    index.write_bytes(b"nothing")
    assert _run(_SMALL, cwd=tmp_path, **environment) == "0 1"


def test_threads_that_want_one_kernel_at_once_compile_it_once() -> None:
    code = """
import threading, numpy as np
from npattn.kernels.pointwise.numba_cpu import _flat
gate = threading.Barrier(4)
def want():
    gate.wait()
    _flat._silu_units.version((0, 0, 0, 0, np.float32(1)))
threads = [threading.Thread(target=want) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(len(_flat._silu_units.origins))
"""
    assert _run(code) == "1"


def test_without_a_writable_place_everything_compiles_uncached(copied_package: Path, tmp_path: Path) -> None:
    """A read-only install and no home: no warning, no error, no cache."""
    blocked = tmp_path / "file"
    blocked.write_text("")  # a folder cannot be made below a file, whoever asks
    for folder in copied_package.rglob("*"):
        if folder.is_dir() and any(folder.glob("*.py")):
            (folder / "__pycache__").write_text("")
    environment = {
        "PYTHONPATH": str(copied_package.parent),
        "HOME": str(blocked),
        "XDG_CACHE_HOME": str(blocked),
    }
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    assert _run(_SMALL, cwd=tmp_path, **environment, NUMBA_CACHE_DIR="") == "0 1"


def test_imported_from_a_zip_everything_compiles_uncached(copied_package: Path, tmp_path: Path) -> None:
    import zipfile

    archive = tmp_path / "npattn.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in copied_package.rglob("*.py"):
            file.write(path, path.relative_to(copied_package.parent))
    assert _run(_SMALL, cwd=tmp_path, PYTHONPATH=str(archive), HOME=str(tmp_path)) == "0 1"
