"""What the pictures show: values, limits, labels, and pixels once rendered."""

import io

import numpy as np
import pytest
from matplotlib import pyplot

import npattn
from npattn import analysis, masks, plots
from npattn.masks.base import Extent
from npattn.plans.build import tile_plan

WORDS = ["the", "cat", "sat", "on", "the", "mat"]


def random_weights(*shape, causal=False):
    logits = 2 * np.random.default_rng(5).normal(size=shape)
    if causal:
        logits = np.where(np.tri(*shape[-2:], dtype=bool), logits, -np.inf)
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def render(ax):
    """The figure's pixels, (height, width, 4), drawn for real."""
    buffer = io.BytesIO()
    ax.figure.savefig(buffer, format="rgba", dpi=80)
    width, height = (int(size * 80) for size in ax.figure.get_size_inches())
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(height, width, 4)


def pixel_at(ax, pixels, x, y):
    """The colour drawn at the data coordinates (x, y)."""
    ax.figure.set_dpi(80)
    column, row = ax.transData.transform((x, y))
    return pixels[pixels.shape[0] - 1 - int(row), int(column), :3]


def texts(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


class TestHeatmap:
    def test_draws_the_weights_with_tokens_on_both_axes(self):
        weights = random_weights(6, 6)
        ax = plots.attention_heatmap(weights, WORDS, title="layer 0")
        np.testing.assert_array_equal(ax.images[0].get_array(), weights)
        assert texts(ax.xaxis) == texts(ax.yaxis) == WORDS
        assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "layer 0")
        assert ax.images[0].get_clim() == (0.0, weights.max())

    def test_query_zero_is_the_upper_row(self):
        weights = np.eye(4)[[3, 1, 2, 0]]
        ax = plots.attention_heatmap(weights, values=False)
        pixels = render(ax)
        bright, dark = pixel_at(ax, pixels, 3, 0), pixel_at(ax, pixels, 0, 0)
        assert bright[0] > 200  # viridis' yellow
        assert bright[2] < 60
        assert dark.min() > 220  # grey: exactly zero
        assert ax.transData.transform((0, 0))[1] > ax.transData.transform((0, 3))[1]

    def test_masked_pairs_are_grey_and_small_ones_are_not(self):
        weights = random_weights(6, 6, causal=True)
        shown = plots.attention_heatmap(weights).images[0].get_array()
        np.testing.assert_array_equal(shown.mask, weights == 0)

    def test_values_are_written_into_small_pictures_only(self):
        ax = plots.attention_heatmap(random_weights(6, 6, causal=True))
        assert len(ax.texts) == 21
        assert ax.texts[0].get_text() == "1.00"
        assert len(plots.attention_heatmap(random_weights(20, 20)).texts) == 0

    def test_given_scale_is_kept(self):
        assert plots.attention_heatmap(random_weights(3, 3), vmax=1.0).images[0].get_clim() == (0.0, 1.0)

    def test_given_axes_are_drawn_on_and_returned(self):
        _, (left, right) = pyplot.subplots(1, 2)
        assert plots.attention_heatmap(random_weights(3, 3), ax=right) is right
        assert not left.images
        assert len(pyplot.get_fignums()) == 1

    def test_long_texts_get_every_nth_label(self):
        ax = plots.attention_heatmap(random_weights(200, 200), [f"w{n}" for n in range(200)])
        assert texts(ax.xaxis) == [f"w{n}" for n in range(0, 200, 5)]
        np.testing.assert_array_equal(ax.get_xticks(), np.arange(0, 200, 5))

    def test_dollar_signs_are_drawn_as_they_are(self):
        render(plots.attention_heatmap(random_weights(2, 2), ["$5", "a$_{b"]))

    def test_keys_of_another_text_have_their_own_names(self):
        ax = plots.attention_heatmap(random_weights(2, 3), ["le", "chat"], key_tokens=["the", "cat", "!"])
        assert texts(ax.xaxis) == ["the", "cat", "!"]
        assert texts(ax.yaxis) == ["le", "chat"]

    def test_leading_axes_of_one_are_dropped_others_are_an_error(self):
        assert plots.attention_heatmap(random_weights(1, 1, 4, 4)).images[0].get_array().shape == (4, 4)
        with pytest.raises(ValueError, match=r"weights\[0, 2\]"):
            plots.attention_heatmap(random_weights(1, 2, 4, 4))

    def test_wrong_number_of_tokens_is_an_error(self):
        with pytest.raises(ValueError, match="5 tokens for 6"):
            plots.attention_heatmap(random_weights(6, 6), WORDS[:5])

    def test_all_zero_and_half_precision_weights_are_drawn(self):
        render(plots.attention_heatmap(np.zeros((3, 3))))
        render(plots.attention_heatmap(random_weights(3, 3).astype(np.float16)))


def test_compared_pictures_share_their_scale():
    full, causal = random_weights(6, 6), random_weights(6, 6, causal=True)
    axes = plots.compare_attention(full, causal, WORDS)
    assert axes.shape == (2,)
    assert [ax.get_title() for ax in axes] == ["full", "causal"]
    assert axes[0].images[0].get_clim() == axes[1].images[0].get_clim() == (0.0, 1.0)
    assert axes[1].images[0].get_array().mask.sum() == 15
    render(axes[0])


def test_head_grid_draws_each_head_in_its_place():
    weights = random_weights(1, 5, 6, 6)
    axes = plots.head_grid(weights, WORDS)
    assert axes.shape == (2, 3)
    for head, ax in enumerate(axes.ravel()[:5]):
        np.testing.assert_array_equal(ax.images[0].get_array(), weights[0, head])
        assert ax.get_title() == f"head {head}"
        assert ax.images[0].get_clim() == (0.0, weights.max())
    assert not axes[1, 2].axison
    assert texts(axes[0, 0].yaxis) == WORDS
    assert texts(axes[1, 0].xaxis) == WORDS
    render(axes[0, 0])


def test_head_grid_takes_axes_and_refuses_too_few():
    _, axes = pyplot.subplots(1, 2)
    assert plots.head_grid(random_weights(2, 4, 4), axes=axes).ravel()[1] is axes[1]
    with pytest.raises(ValueError, match="got 2"):
        plots.head_grid(random_weights(5, 4, 4), axes=axes)


def test_head_summary_draws_the_four_numbers_of_analysis():
    weights = random_weights(2, 4, 6, 6) ** np.array([0.2, 1, 4, 2])[:, None, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    summary = analysis.head_summary(weights)
    for source in (weights, summary):
        axes = plots.head_summary(source)
        for ax, values in zip(axes.ravel(), summary[:4], strict=True):
            np.testing.assert_array_equal([bar.get_height() for bar in ax.patches], values)
        assert axes[0, 1].get_ylim() == axes[1, 1].get_ylim() == (0.0, 1.0)
        colours = [bar.get_facecolor() for bar in axes[0, 0].patches]
        assert len(set(colours)) == 3
        assert colours[summary.most_focused][0] > 0.7  # red
    assert "most focused: head 2" in axes[0, 0].get_title()
    render(axes[0, 0])


def test_head_summary_of_statistics_equals_that_of_weights():
    q, k = np.random.default_rng(0).normal(size=(2, 3, 20, 8))
    heights = [
        [bar.get_height() for ax in plots.head_summary(source).ravel() for bar in ax.patches]
        for source in (npattn.attention_weights(q, k), npattn.attention_stats(q, k))
    ]
    np.testing.assert_allclose(heights[0], heights[1], rtol=1e-6)


def test_agreement_is_drawn_from_zero_to_one():
    weights = random_weights(3, 5, 5)
    image = plots.head_agreement(weights).images[0]
    np.testing.assert_array_equal(image.get_array(), analysis.head_agreement(weights))
    assert image.get_clim() == (0.0, 1.0)


def test_distance_lines_are_the_profile():
    weights = random_weights(3, 30, 30, causal=True)
    profile = analysis.distance_profile(weights)
    for source in (weights, profile):
        ax = plots.distance_profile(source)
        assert len(ax.lines) == 3
        used = profile.distance <= 0
        np.testing.assert_array_equal(ax.lines[1].get_xdata(), profile.distance[used])
        np.testing.assert_array_equal(ax.lines[1].get_ydata(), profile.weight[1, used])
    near = plots.distance_profile(weights, most=4)
    np.testing.assert_array_equal(near.lines[0].get_xdata(), np.arange(-4, 5))
    render(near)


def test_positional_encoding_is_centred_on_zero():
    encoding = npattn.nn.SinusoidalPosition(16)(np.zeros((1, 50, 16), np.float32))[0]
    image = plots.positional_encoding(encoding).images[0]
    np.testing.assert_array_equal(image.get_array(), encoding)
    low, high = image.get_clim()
    assert low == -high
    assert high == abs(encoding).max()


def test_positional_curves_are_the_columns():
    encoding = np.random.default_rng(0).normal(size=(12, 9))
    ax = plots.positional_curves(encoding, [0, 8])
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), encoding[:, 8])
    assert [line.get_label() for line in ax.lines] == ["feature 0", "feature 8"]
    assert len(plots.positional_curves(encoding).lines) == 6
    with pytest.raises(IndexError):
        plots.positional_curves(encoding, [9])


@pytest.mark.parametrize(
    "mask",
    [masks.Full(), masks.Causal(), masks.Window(2, 1), masks.Strided(3), masks.Causal() & masks.Strided(2)],
)
def test_mask_picture_shows_the_dense_mask(mask):
    ax = plots.mask_picture(mask, 9, 11)
    np.testing.assert_array_equal(ax.images[0].get_array(), np.squeeze(mask.to_dense(9, 11)))
    assert type(mask).__name__.strip("_") in ax.get_title() or "&" in ax.get_title()
    render(ax)


def test_mask_picture_of_a_chosen_batch_element():
    mask = masks.Padding([4, 2])
    assert plots.mask_picture(mask, 3, 4, batch=1).images[0].get_array().sum() == 6


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Window(40), masks.Strided(50)])
def test_plan_picture_marks_whole_partial_and_absent_tiles(mask):
    len_q, len_k, tile = 100, 130, 32
    ax = plots.plan_picture(tile_plan(mask, Extent(1, 1, len_q, len_k), tile, tile))
    kinds = ax.images[0].get_array()
    dense = np.squeeze(mask.to_dense(len_q, len_k))
    for row, column in np.ndindex(kinds.shape):
        part = dense[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        assert kinds[row, column] == (2 if part.all() else 1 if part.any() else 0)
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, len_k), (len_q, 0))
    assert f"of {kinds.size} tiles" in ax.get_title()
    render(ax)


def test_cost_curves_are_the_costs_on_logarithmic_axes():
    axes = plots.cost_curves([256, 512, 1024])
    names = [line.get_label() for line in axes[0].lines]
    assert names[:2] == ["whole matrices", "tiles"]
    for length, flops, peak in zip(
        [256, 512, 1024], axes[0].lines[1].get_ydata(), axes[1].lines[1].get_ydata(), strict=True
    ):
        cost = analysis.attention_cost(length, heads=8)
        assert (flops, peak) == (cost.flops, cost.peak_bytes)
    assert axes[0].get_xscale() == axes[1].get_yscale() == "log"
    render(axes[0])


class TestGraph:
    @pytest.fixture
    def adjacency(self):
        return npattn.graph.Adjacency.from_edges([0, 1, 2, 3, 3], [1, 2, 0, 3, 0], 4)

    def test_edge_width_follows_the_weight(self, adjacency):
        weights = np.array([0.5, 1.0, 0.25, 1.0, 0.75])
        ax = plots.graph_attention(weights, adjacency, positions=[[0, 0], [1, 0], [1, 1], [0, 1]])
        widths = [arrow.get_linewidth() for arrow in ax.patches]
        np.testing.assert_allclose(widths, 0.2 + 3.8 * weights[[0, 1, 2, 4]])
        assert [text.get_text() for text in ax.texts] == ["0", "1", "2", "3"]
        render(ax)

    def test_arrows_go_from_source_to_target(self, adjacency):
        places = np.array([[0.0, 0.0], [4.0, 0.0], [4.0, 4.0], [0.0, 4.0]])
        ax = plots.graph_attention(np.ones(5), adjacency, positions=places)
        # FancyArrowPatch keeps the two ends it was given
        assert tuple(map(tuple, ax.patches[0]._posA_posB)) == ((0.0, 0.0), (4.0, 0.0))

    def test_heads_are_averaged_or_chosen(self, adjacency):
        weights = np.stack([np.linspace(0.1, 1, 5), np.linspace(1, 0.1, 5)], axis=1)
        mean = plots.graph_attention(weights, adjacency, positions=np.eye(4)[:, :2])
        assert len({round(arrow.get_linewidth(), 9) for arrow in mean.patches}) == 1
        one = plots.graph_attention(weights, adjacency, head=1, positions=np.eye(4)[:, :2])
        assert one.patches[0].get_linewidth() > one.patches[1].get_linewidth()

    def test_networkx_layouts_are_taken_as_they_are(self):
        networkx = pytest.importorskip("networkx")
        graph = networkx.karate_club_graph()
        adjacency = npattn.graph.Adjacency.from_networkx(graph)
        layout = networkx.circular_layout(graph)
        ax = plots.graph_attention(np.ones(adjacency.num_edges), adjacency, positions=layout)
        np.testing.assert_allclose(ax.collections[-1].get_offsets(), [layout[node] for node in graph])
        default = plots.graph_attention(np.ones(adjacency.num_edges), adjacency)
        assert len(default.patches) == adjacency.num_edges
        render(default)

    def test_wrong_sizes_are_named(self, adjacency):
        with pytest.raises(ValueError, match=r"\(5,\) or \(5, heads\)"):
            plots.graph_attention(np.ones(4), adjacency)
        with pytest.raises(ValueError, match=r"\(4, 2\)"):
            plots.graph_attention(np.ones(5), adjacency, positions=np.zeros((3, 2)))
        with pytest.raises(ValueError, match="no entry for 3 nodes, first of them 1"):
            plots.graph_attention(np.ones(5), adjacency, positions={0: (0, 0)})
