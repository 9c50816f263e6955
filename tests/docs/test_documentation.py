"""The documentation's examples run, its links lead somewhere, and every public name is in the reference."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_examples_of(page):
    """The ``>>>`` examples of a page, one after another, as a reader types them."""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report, names = [], {}
    for number, block in enumerate(python_blocks(page)):
        if ">>>" not in block:
            compile(block, f"{page}, block {number}", "exec")
            continue
        test = parser.get_doctest(block, names, f"{page}, block {number}", str(DOCS / page), 0)
        runner.run(test, out=report.append, clear_globs=False)
        names = test.globs
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_to_pages(page):
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert (DOCS / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_index_lists_every_page():
    listed = set(re.findall(r"^([\w/]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert {page.removesuffix(".md") for page in PAGES} - {"index"} == listed


def test_the_page_of_examples_lists_every_example():
    listed = set(re.findall(r"`(\w+\.py)` \|", (DOCS / "examples.md").read_text()))
    assert listed == {path.name for path in (DOCS.parent / "examples").glob("[!_]*.py")}
