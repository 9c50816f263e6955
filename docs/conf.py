"""Configuration of the documentation: ``sphinx-build -W -b html docs docs/_build``."""

import inspect
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import npattn

project = "npattn"
author = "the npattn authors"
project_copyright = "npattn authors, BSD-3-Clause"
version = release = npattn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "numpydoc",
    "myst_parser",
    "matplotlib.sphinxext.plot_directive",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_imported_members = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the Parameters sections say it in words and shapes
numpydoc_show_class_members = False

plot_html_show_source_link = False
plot_html_show_formats = False
plot_formats = [("png", 110)]
plot_include_source = True

html_theme = "alabaster"
html_title = f"npattn {version}"
html_static_path = ["_static"]
html_css_files = ["npattn.css"]
html_theme_options = {
    "description": "Attention without a deep-learning framework",
    "page_width": "68rem",
    "sidebar_width": "15rem",
    "fixed_sidebar": True,
    "show_powered_by": False,
}


#: Each page of the reference: its module, heading and first sentence.
PAGES = {
    "npattn": (
        "Attention",
        "Exact attention, what belongs to it, and threads. The functions also live in ``npattn.functional``.",
    ),
    "npattn.functional": ("Other functions", "What layers are made of; each with its pullback in ``_vjp``."),
    "npattn.masks": ("Masks", "Which query may see which key."),
    "npattn.nn": ("Layers", "Dataclasses of arrays with explicit pullbacks."),
    "npattn.models": ("Models", "Published architectures that load published weights."),
    "npattn.cache": ("Caches", "Keys and values kept while a text grows."),
    "npattn.optim": ("Optimisers", "Steps in place over dictionaries of arrays."),
    "npattn.graph": ("Graphs", "Attention along edges."),
    "npattn.io": ("Files", "Arrays by name, read and written."),
    "npattn.analysis": ("Analysis", "What attention does and what it costs: arrays in, arrays out."),
    "npattn.plots": ("Plots", "The same as pictures; every function takes and returns matplotlib Axes."),
    "npattn.testing": ("Testing", "Gradient checks and comparisons, for these tests and for yours."),
}


def public_names(module):
    """The names a module offers: its ``__all__``, or what it holds of npattn without underscore."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return [
        name
        for name in names
        if not inspect.ismodule(getattr(module, name))
        and getattr(getattr(module, name), "__module__", "").startswith("npattn")
    ]


def write_reference(folder):
    """One page for each module, listing its public names: written anew by each build, so none is missing."""
    folder.mkdir(exist_ok=True)
    listed, pages = set(), set()
    for name, (heading, sentence) in PAGES.items():
        module = import_module(name)
        own = [item for item in public_names(module) if id(getattr(module, item)) not in listed]
        listed |= {id(getattr(module, item)) for item in own}
        lines = [heading, "=" * len(heading), "", sentence, "", f".. currentmodule:: {name}", ""]
        for title, is_kind in (("Functions", False), ("Classes", True)):
            items = sorted(item for item in own if inspect.isclass(getattr(module, item)) is is_kind)
            if items:
                lines += [
                    f".. rubric:: {title}",
                    "",
                    ".. autosummary::",
                    "   :toctree: .",
                    "   :nosignatures:",
                    "",
                ]
                lines += [f"   {item}" for item in items] + [""]
        page = folder / f"{name.replace('.', '-')}.rst"
        pages |= {page.name, *(f"{name}.{item}.rst" for item in own)}
        text = "\n".join(lines)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for stale in folder.glob("*.rst"):  # of names that have moved or gone
        if stale.name not in pages:
            stale.unlink()


write_reference(Path(__file__).parent / "generated")


def skip_plain_fields(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples: the class docstring describes them together."""
    if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number"):
        return True
    return skip


def setup(app):
    """Register the filter above."""
    app.connect("autodoc-skip-member", skip_plain_fields)
