"""Every public name says what it does: a numpydoc docstring with parameters, results and an example."""

import inspect
import re
from importlib import import_module

import pytest

MODULES = (
    *(
        "npattn",
        "npattn.functional",
        "npattn.masks",
        "npattn.nn",
        "npattn.models",
        "npattn.cache",
        "npattn.optim",
    ),
    *("npattn.graph", "npattn.io", "npattn.analysis", "npattn.plots", "npattn.testing"),
)


def public_names():
    """(module, name) of every public function and class, each object once."""
    seen = {}
    for module_name in MODULES:
        module = import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        for name in names:
            value = getattr(module, name)
            ours = getattr(value, "__module__", "").startswith("npattn")
            if ours and (inspect.isfunction(value) or inspect.isclass(value)):
                seen.setdefault(id(value), (module_name, name))
    return sorted(seen.values())


def sections(text):
    """The numpydoc sections of a docstring: heading -> body."""
    parts = re.split(r"^[ ]*([A-Z][A-Za-z ]+)\n[ ]*-{3,}\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def is_record(value):
    """A named tuple, an exception or a protocol: described by its fields, its name or its methods."""
    return inspect.isclass(value) and (
        hasattr(value, "_fields") or issubclass(value, Exception) or getattr(value, "_is_protocol", False)
    )


def is_made_elsewhere(text):
    """Whether a class says that its objects come from somewhere else than its constructor."""
    return re.search(r"[Mm]ade by ``", text) is not None


@pytest.mark.parametrize(("module", "name"), public_names())
def test_docstring_says_what_goes_in_and_what_comes_out(module, name):
    value = getattr(import_module(module), name)
    text = inspect.getdoc(value)
    assert text, f"{module}.{name} has no docstring"
    assert len(text.splitlines()[0]) <= 110
    found = sections(text)
    if is_record(value):
        return
    target = value.__init__ if inspect.isclass(value) else value
    parameters = [p for p in inspect.signature(target).parameters.values() if p.name != "self"]
    missing = []
    if parameters and target is not object.__init__ and not is_made_elsewhere(text):
        if "Parameters" not in found:
            missing.append("Parameters")
        else:
            documented = set(
                re.findall(
                    r"\w+",
                    " ".join(re.findall(r"^[ ]*([*\w, ]+?)(?: ?:.*)?$", found["Parameters"], re.MULTILINE)),
                )
            )
            missing += [
                f"parameter {p.name}"
                for p in parameters
                if p.name not in documented and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ]
    if inspect.isfunction(value) and "Returns" not in found and "Yields" not in found:
        annotation = inspect.signature(value).return_annotation
        if annotation not in (None, "None"):
            missing.append("Returns")
    if ">>>" not in found.get("Examples", ""):
        missing.append("Examples")
    assert not missing, f"{module}.{name} lacks {', '.join(missing)}"


@pytest.mark.parametrize(("module", "name"), public_names())
def test_public_methods_have_docstrings(module, name):
    value = getattr(import_module(module), name)
    if not inspect.isclass(value):
        return
    bare = [
        method
        for method, function in vars(value).items()
        if not method.startswith("_")
        and inspect.isfunction(function)
        and not inspect.getdoc(getattr(value, method))
    ]
    assert not bare, f"{module}.{name} has methods without a docstring: {', '.join(bare)}"
