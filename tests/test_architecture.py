"""Who may import whom, which third-party package lives where, and a few habits: read from the sources.

Imports inside functions count like those at the top. ``if TYPE_CHECKING`` blocks do not run and do not count.
"""

import ast
import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "npattn"

CORE = ("_typing", "_check", "_arrays", "_threads", "_dropout")

#: package -> what it may import beside itself; the first entry that is a prefix of a module's name counts.
MAY_IMPORT = {
    "_typing": (),
    "_arrays": ("_typing",),
    "_dropout": ("_typing", "_arrays"),
    "_check": ("_typing", "_arrays"),
    "_threads": ("_typing",),
    "masks": CORE,
    "plans": ("masks", *CORE),
    "kernels.contract": CORE,
    "kernels.select": CORE,
    "kernels.edge.contract": ("plans", *CORE),
    "kernels": ("plans", "kernels", *CORE),
    "functional": (
        *(
            "kernels.select",
            "kernels.contract",
            "kernels.edge.contract",
            "kernels.linear",
            "kernels.linear_attention",
            "kernels.pointwise",
            "kernels.stats",
        ),
        *("plans", "masks", *CORE),
    ),
    "nn": ("functional", "masks", "cache", *CORE),
    "cache": ("functional", "masks", *CORE),
    "io": CORE,
    "models": ("nn", "cache", "io", "functional", "masks", *CORE),
    "optim": ("kernels.pointwise", *CORE),
    "graph": ("nn", "functional", "plans", "masks", *CORE),
    "analysis": ("functional", "masks", *CORE),
    "plots": ("analysis", "masks", "plans", *CORE),
}
#: programs and test tools: they may import anything, and nothing imports them
TOP = ("", "__main__", "_cli", "testing")
TOOLS = ("_cli", "testing")

#: third-party package -> modules (or packages) that may import it; "*" stands for one name
HOMES = {
    "numba": (
        "kernels._jit",
        "kernels._parts",
        "kernels._simd",
        "kernels._team",
        "kernels.*.numba_cpu",
        *TOOLS,
    ),
    "llvmlite": ("kernels._jit", "kernels._parts", "kernels._simd", "kernels.*.numba_cpu", *TOOLS),
    "cupy": ("kernels._cuda", "kernels.*.cupy_cuda", *TOOLS),
    "cupy_backends": ("kernels._cuda",),
    # plots._graphs: spring_layout, when no positions are given
    "networkx": ("graph", "plots._graphs", *TOOLS),
    "scipy": ("graph", "masks.explicit", *TOOLS),
    "matplotlib": ("plots",),
    "ml_dtypes": ("_arrays", "io", "testing", "kernels"),
    "threadpoolctl": ("_cli", "_threads"),
}
#: implementations must not know of each other, nor of the oracle
IMPLEMENTATIONS = ("oracle", "numpy_tiled", "numpy_segment", "numba_cpu", "cupy_cuda")


def module_name(path):
    """npattn/masks/base.py -> masks.base; npattn/masks/__init__.py -> masks; npattn/__init__.py -> ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources():
    return {module_name(path): ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name):
    """(module, line) of every import in a module of the package, absolute, outside ``if TYPE_CHECKING``."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"npattn.{name}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("npattn.") in sources()
                found.append((full if is_module else node.module, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(sources()[name])
    return found


def matches(name, pattern):
    """Whether ``pattern`` (names, "*" for one) is name or a package above it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=False))


def owner(name):
    return next((package for package in MAY_IMPORT if matches(name, package)), None)


def layer(name):
    return name.partition(".")[0]


@pytest.mark.parametrize("name", [name for name in sources() if layer(name) not in TOP])
def test_a_module_imports_only_what_the_design_allows(name):
    package = owner(name)
    assert package is not None, f"npattn.{name} has no place in MAY_IMPORT: put it into a package that has"
    for imported, line in imports(name):
        if imported == "npattn" or imported.startswith("npattn."):
            target = imported.removeprefix("npattn").removeprefix(".")
            allowed = (layer(package) if package not in CORE else package, *MAY_IMPORT[package])
            if package.startswith("kernels."):
                allowed = (package, *MAY_IMPORT[package])
            assert any(matches(target, other) for other in allowed), (
                f"npattn.{name}:{line} imports {imported}; {package} may import {allowed}"
            )


@pytest.mark.parametrize("name", [name for name in sources() if layer(name) == "kernels"])
def test_an_implementation_knows_no_other(name):
    own = next((part for part in name.split(".") if part in IMPLEMENTATIONS), None)
    for imported, line in imports(name):
        others = [part for part in imported.split(".") if part in IMPLEMENTATIONS and part != own]
        assert not others, f"npattn.{name}:{line} imports {imported}"


@pytest.mark.parametrize("package", HOMES)
def test_a_third_party_package_has_its_homes(package):
    for name in sources():
        for imported, line in imports(name):
            if layer(imported) == package:
                homes = HOMES[package]
                assert any(matches(name, home) for home in homes), (
                    f"npattn.{name}:{line} imports {imported}; {homes}"
                )


def test_nothing_else_is_imported():
    known = {*sys.stdlib_module_names, "npattn", "numpy", *HOMES}
    for name in sources():
        for imported, line in imports(name):
            assert layer(imported) in known, f"npattn.{name}:{line} imports {imported}"


def test_the_checker_sees_imports_inside_functions():
    tree = ast.parse("def f():\n    import numba\n    from npattn.kernels import oracle\n")
    sources()["masks.planted"] = tree
    try:
        assert [module for module, _ in imports("masks.planted")] == ["numba", "npattn.kernels.oracle"]
        with pytest.raises(AssertionError, match="kernels"):
            test_a_module_imports_only_what_the_design_allows("masks.planted")
        with pytest.raises(AssertionError, match="numba"):
            test_a_third_party_package_has_its_homes("numba")
    finally:
        del sources()["masks.planted"]


# Habits


def calls(name):
    return (node for node in ast.walk(sources()[name]) if isinstance(node, ast.Call))


@pytest.mark.parametrize("name", sources())
def test_no_fastmath(name):
    """It promises that no infinity occurs; our empty rows use them."""
    for node in calls(name):
        for keyword in node.keywords:
            if keyword.arg == "fastmath":
                assert not (isinstance(keyword.value, ast.Constant) and keyword.value.value is True), (
                    node.lineno
                )


@pytest.mark.parametrize("name", sources())
def test_no_global_random_state(name):
    """np.random.default_rng and the classes are fine; np.random.normal and its like share a hidden state."""
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
            assert node.attr == "default_rng" or node.attr[0].isupper(), f"npattn.{name}:{node.lineno}"


@pytest.mark.parametrize("name", [name for name in sources() if layer(name) not in ("__main__", "_cli")])
def test_the_library_does_not_print(name):
    for node in calls(name):
        assert not (isinstance(node.func, ast.Name) and node.func.id == "print"), (
            f"npattn.{name}:{node.lineno}"
        )


def test_no_file_is_two_files():
    """300 lines are long, 500 need a reason, 800 are two files."""
    for path in PACKAGE.rglob("*.py"):
        lines = len(path.read_text("utf-8").splitlines())
        assert lines <= 800, f"{path.relative_to(ROOT)} has {lines} lines"


def test_every_module_says_what_it_is():
    for name, tree in sources().items():
        assert ast.get_docstring(tree), f"npattn.{name} has no docstring"


# A fresh interpreter


def run(program, *flags):
    command = [sys.executable, *flags, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = ("numba", "llvmlite", "cupy", "networkx", "scipy", "matplotlib", "ml_dtypes", "threadpoolctl")


@pytest.mark.parametrize(
    "statement",
    [
        "import npattn",
        "import npattn.masks",
        "import npattn.functional",
        "import npattn.nn",
        "import npattn.optim",
        "import npattn.cache",
        "import npattn.io",
        "import npattn; npattn.attention; npattn.get_num_threads; npattn.masks.Causal().to_dense(3, 3)",
    ],
)
def test_an_import_loads_nothing_heavy_starts_no_thread_and_warns_of_nothing(statement):
    run(
        f"""
        {statement}
        import sys, threading
        loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r}))
        assert not loaded, loaded
        assert threading.active_count() == 1
        """,
        *("-W", "error"),
    )


def test_everything_light_works_where_nothing_heavy_can_be_imported():
    """NumPy computes, masks and layers work, and ``backend="numba"`` says why not."""
    run(
        f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {HEAVY!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocker())
        import numpy as np
        import npattn
        from npattn import masks

        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, 3, 40, 8)).astype(np.float32)
        mask = masks.Causal() & masks.Window(9)
        out, pullback = npattn.attention_vjp(x, x, x, mask=mask, dropout_p=0.1, seed=1)
        assert np.isfinite(out).all() and np.isfinite(pullback(out).key).all()
        assert npattn.attention_weights(x, x, rows=[3]).shape == (2, 3, 1, 40)
        layer = npattn.nn.Linear(8, 4, rng=rng)
        y, back = layer.vjp(x)
        assert back(y)[0].shape == x.shape
        try:
            npattn.attention(x, x, x, backend="numba")
        except ValueError as error:
            assert "not installed" in str(error)
        else:
            raise SystemExit("numba cannot be there")
        """,
        *("-W", "error"),
    )


@pytest.mark.parametrize(
    "module", ["masks", "plans", "kernels", "functional", "nn", "optim", "analysis", "testing", "io"]
)
def test_each_package_can_be_imported_first(module):
    """No import cycle that works in one order only."""
    run(f"import npattn.{module}")
