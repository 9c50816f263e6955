"""The HTML head view, read back from the file and used with the mouse in a real browser."""

import base64
import json
import re

import numpy as np
import pytest
from browser import CHROMIUM, Browser

from npattn import plots

TOKENS = ["the", "cat", "sat", "on", "the", "<b>mat</b>", "&", "slept", "</script>", "."]


def random_weights(*shape, causal=False):
    rng = np.random.default_rng(5)
    logits = 2 * rng.normal(size=shape)
    if causal:
        logits = np.where(np.tri(*shape[-2:], dtype=bool), logits, -np.inf)
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def data_of(path):
    page = path.read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(found.group(1))


def test_page_holds_the_weights_to_eight_bits_of_their_root(tmp_path):
    weights = [random_weights(1, 3, 10, 10), random_weights(2, 10, 10, causal=True)]
    data = data_of(plots.save_html(tmp_path / "view.html", weights, TOKENS))
    assert data["tokens"] == TOKENS
    assert data["keys"] is None
    for layer, stored in zip(weights, data["layers"], strict=True):
        level = np.frombuffer(base64.b64decode(stored["weights"]), np.uint8).reshape(stored["heads"], 10, 10)
        error = abs((level / 255.0) ** 2 - layer.reshape(level.shape))
        assert error.max() <= 0.004
        assert (level[layer.reshape(level.shape) == 0] == 0).all()


def test_page_needs_nothing_from_the_network(tmp_path):
    page = plots.save_html(tmp_path / "view.html", random_weights(2, 10, 10), TOKENS).read_text()
    assert not re.search(r"https?://|src=|@import|url\(", page)


def test_title_is_escaped(tmp_path):
    page = plots.save_html(
        tmp_path / "v.html", random_weights(1, 10, 10), TOKENS, title="<i>&</i>"
    ).read_text()
    assert "<title>&lt;i&gt;&amp;&lt;/i&gt;</title>" in page


def test_tokens_of_another_length_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"layer 0 has weights of shape \(2, 10, 10\).* 3 tokens"):
        plots.save_html(tmp_path / "view.html", random_weights(2, 10, 10), ["a", "b", "c"])
    assert not list(tmp_path.iterdir())


def test_no_layers_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one layer"):
        plots.save_html(tmp_path / "view.html", [], TOKENS)


def test_too_many_weights_are_refused(tmp_path):
    huge = np.broadcast_to(np.float64(0.0), (65, 1000, 1000))
    with pytest.raises(ValueError, match="65,000,000 weights are too many"):
        plots.save_html(tmp_path / "view.html", huge, ["x"] * 1000)


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt install chromium"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.errors == []


def shown(browser, box="queries"):
    """The weights that the page says it draws, by token, and the opacity of the colours it drew."""
    weights = browser.run(
        f"[...document.querySelectorAll('#{box} .token')].map(t => parseFloat(t.dataset.weight))"
    )
    colours = browser.run(
        f"[...document.querySelectorAll('#{box} .token')].map(t => getComputedStyle(t).backgroundColor)"
    )
    opacity = [float(re.findall(r"[\d.]+", colour)[3]) if "rgba" in colour else 1.0 for colour in colours]
    return np.array(weights, np.float64), np.array(opacity)


@needs_browser
def test_hovering_a_token_shows_what_it_attends_to(tmp_path, browser):
    weights = [random_weights(3, 10, 10), random_weights(2, 10, 10, causal=True)]
    browser.open(plots.save_html(tmp_path / "view.html", weights, TOKENS))
    texts = browser.run("[...document.querySelectorAll('#queries .token')].map(t => t.textContent)")
    assert texts == TOKENS  # also those that look like markup
    assert browser.run("document.querySelectorAll('.current').length") == 0

    browser.hover("#queries .token", 4)
    drawn, opacity = shown(browser)
    np.testing.assert_allclose(drawn, weights[0].mean(axis=0)[4], atol=0.005)  # the mean of the heads
    np.testing.assert_allclose(opacity, 0.9 * drawn / drawn.max(), atol=0.01)
    assert browser.run("document.querySelector('.current').dataset.place") == "4"
    first = browser.run("document.querySelector('#largest td').textContent")
    assert first == TOKENS[int(np.argmax(drawn))]

    browser.hover("#queries .token", 7)
    np.testing.assert_allclose(shown(browser)[0], weights[0].mean(axis=0)[7], atol=0.005)


@needs_browser
def test_layer_head_and_direction_can_be_chosen(tmp_path, browser):
    weights = [random_weights(3, 10, 10), random_weights(2, 10, 10, causal=True)]
    browser.open(plots.save_html(tmp_path / "view.html", weights, TOKENS))
    assert browser.run("document.querySelectorAll('#heads canvas').length") == 3
    change = "(s => {{ s.value = {1}; s.dispatchEvent(new Event('change')); }})(document.getElementById({0}))"
    browser.run(change.format("'layer'", "'1'"))
    assert browser.run("document.querySelectorAll('#heads canvas').length") == 2
    browser.click("#heads figure", 1)
    browser.hover("#queries .token", 3)
    np.testing.assert_allclose(shown(browser)[0], weights[1][1, 3], atol=0.005)
    assert browser.run("document.getElementById('head').value") == "1"
    browser.run(change.format("'direction'", "'from'"))
    np.testing.assert_allclose(shown(browser)[0], weights[1][1, :, 3], atol=0.005)


@needs_browser
def test_click_holds_a_token_and_arrows_move_it(tmp_path, browser):
    browser.open(plots.save_html(tmp_path / "view.html", random_weights(1, 10, 10), TOKENS))
    current = "document.querySelector('.current').dataset.place"
    browser.click("#queries .token", 2)
    browser.hover("#queries .token", 6)
    assert browser.run(current) == "2"
    browser.press("ArrowRight")
    assert browser.run(current) == "3"
    browser.click("#queries .token", 3)
    browser.hover("#queries .token", 6)
    assert browser.run(current) == "6"


@needs_browser
def test_attention_over_another_text_lights_up_the_other_text(tmp_path, browser):
    weights = random_weights(2, 4, 10)
    page = plots.save_html(tmp_path / "cross.html", weights, ["le", "chat", "a", "dormi"], key_tokens=TOKENS)
    browser.open(page)
    browser.hover("#queries .token", 1)
    np.testing.assert_allclose(shown(browser, "keys")[0], weights.mean(axis=0)[1], atol=0.005)
    browser.hover("#keys .token", 8)
    np.testing.assert_allclose(shown(browser)[0], weights.mean(axis=0)[:, 8], atol=0.005)


@needs_browser
def test_head_pictures_show_the_weights(tmp_path, browser):
    weights = random_weights(2, 10, 10, causal=True)
    browser.open(plots.save_html(tmp_path / "view.html", weights, TOKENS))
    alpha = browser.run(
        "(c => Array.from(c.getContext('2d').getImageData(0, 0, 10, 10).data).filter((_, n) => n % 4 === 3))"
        "(document.querySelectorAll('#heads canvas')[1])"
    )
    np.testing.assert_allclose((np.array(alpha).reshape(10, 10) / 255) ** 2, weights[1], atol=0.005)
