"""Masks as values: composition, identity, alignment, and what is refused."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.masks import (
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Extent,
    Full,
    GlobalTokens,
    Mask,
    Padding,
    Predicate,
    Prefix,
    Sparse,
    Strided,
    Window,
    bigbird,
    local_strided,
    longformer,
)
from npattn.plans.build import build_tile_plan, clear_plans, tile_plan
from npattn.plans.tiles import plan_to_dense


def csr(array):
    indptr = np.concatenate([[0], np.cumsum(array.sum(axis=1))])
    return SimpleNamespace(indptr=indptr, indices=np.nonzero(array)[1], shape=array.shape)


# alignment


@pytest.mark.parametrize("offset", [2**62, -(2**62), 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(
    "make",
    [
        Causal,
        lambda o: Window(3, 2, o),
        lambda o: Window(2**62, 2**62, o),
        lambda o: Window(None, 2, o),
        lambda o: Dilated(3, 2, o),
        lambda o: Dilated(2**40, 2**30, o),
    ],
)
def test_huge_offsets_do_not_overflow(make, offset):
    mask = make(offset)
    left, right, step = {
        Causal: lambda m: (None, 0, 1),
        Window: lambda m: (m.left, m.right, 1),
        Dilated: lambda m: (m.radius * m.dilation, m.radius * m.dilation, m.dilation),
    }[type(mask)](mask)
    expected = [
        [
            (left is None or i + offset - left <= j)
            and (right is None or j <= i + offset + right)
            and (i + offset - j) % step == 0
            for j in range(9)
        ]
        for i in range(7)
    ]
    np.testing.assert_array_equal(mask.to_dense(7, 9)[0, 0], expected)
    np.testing.assert_array_equal(
        plan_to_dense(build_tile_plan(mask, Extent(1, 1, 7, 9), 4, 32))[0, 0], expected
    )


def test_offset_none_puts_the_last_query_at_the_last_key():
    for mask in (Causal(), Window(None, 0), Window(10, 0)):
        assert mask.to_dense(3, 8)[0, 0, -1, -1]
        assert not mask.to_dense(3, 8)[0, 0, -2, -1]
    np.testing.assert_array_equal(Causal().to_dense(8, 3)[0, 0, :5], False)


def test_window_of_w_keys_ends_at_the_query():
    np.testing.assert_array_equal(Window(3).to_dense(9, 9)[0, 0].sum(1), [1, 2, 3, 4, 4, 4, 4, 4, 4])


def test_documents_window_counts_both_ways_unless_causal():
    both = Documents([5], window=1).to_dense(5, 5)
    np.testing.assert_array_equal(both, Window(1, 1).to_dense(5, 5))
    past = Documents([5], causal=True, window=1).to_dense(5, 5)
    np.testing.assert_array_equal(past, Window(1, 0).to_dense(5, 5))


def test_recipes_are_what_their_names_say():
    i, j = np.ogrid[:40, :40]
    np.testing.assert_array_equal(
        local_strided(6, 7).to_dense(40, 40)[0, 0], (abs(i - j) <= 3) | (i % 7 == 0) | (j % 7 == 0)
    )
    np.testing.assert_array_equal(
        longformer(4, [3, 20]).to_dense(40, 40)[0, 0],
        (abs(i - j) <= 4) | np.isin(i, [3, 20]) | np.isin(j, [3, 20]),
    )
    big = bigbird(4, 3, 1, 2, seed=1).to_dense(40, 40)[0, 0]
    blocks = big.reshape(10, 4, 10, 4)
    np.testing.assert_array_equal(blocks.all(axis=(1, 3)), blocks.any(axis=(1, 3)))
    per_row = blocks.any(axis=(1, 3)).sum(1)
    np.testing.assert_array_equal(per_row, [10, 5, 6, 6, 6, 6, 6, 6, 6, 5])
    np.testing.assert_array_equal(big, bigbird(4, 3, 1, 2, seed=1).to_dense(40, 40)[0, 0])
    assert not np.array_equal(big, bigbird(4, 3, 1, 2, seed=2).to_dense(40, 40)[0, 0])


# identity


def every_mask():
    array = np.random.default_rng(0).random((6, 7)) < 0.5
    return [
        Full(),
        Causal(),
        Causal(3),
        Causal([1, 2]),
        Window(3),
        Window(3, None),
        Padding([3, 4]),
        Padding([3, 4], [1, 2]),
        Prefix(3),
        Documents([2, 4], [3, 4]),
        Documents([2, 4], [3, 4], causal=True),
        GlobalTokens([1]),
        Strided(3),
        Dilated(3, 2),
        Blocks(array[:3, :4], 2),
        Dense(array),
        Dense(array.T),
        Sparse(csr(array)),
        longformer(2, [0]),
        bigbird(2, 3, 1, 1, 0),
        Causal() & Window(3),
        Window(3) & Causal(),
        Causal() | Window(3),
        ~Causal(),
    ]


def test_equal_by_class_and_arguments():
    first, second = every_mask(), every_mask()
    for n, a in enumerate(first):
        for m, b in enumerate(second):
            assert (a == b) == (n == m), (a, b)
            if n == m:
                assert hash(a) == hash(b)
    assert len(set(first + second)) == len(first)
    assert Causal() != "Causal()"


def test_predicates_are_equal_when_the_function_is_the_same_object():
    def rule(b, h, i, j):
        return i == j

    assert Predicate(rule) == Predicate(rule)
    assert Predicate(rule) != Predicate(lambda b, h, i, j: i == j)


def test_masks_cannot_be_changed():
    for mask in every_mask():
        with pytest.raises(AttributeError):
            mask.offset = 3
        with pytest.raises(AttributeError):
            mask.shape = 3


def test_a_mask_copies_what_it_was_made_from():
    array = np.ones((4, 4), bool)
    lengths, indices = np.array([2, 2]), [1, 2]
    graph = csr(array)
    masks = [Dense(array), Blocks(array, 1), Sparse(graph), Documents(lengths), GlobalTokens(indices)]
    per_batch = [Padding(lengths), Causal(lengths)]
    before = [m.to_dense(4, 4) for m in masks] + [m.to_dense(4, 4, 2) for m in per_batch]
    array[:] = False
    lengths[:] = 1
    indices.append(3)
    graph.indices[:] = 0
    after = [m.to_dense(4, 4) for m in masks] + [m.to_dense(4, 4, 2) for m in per_batch]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_masks_survive_pickling():
    for mask in every_mask():
        hash(mask)
        again = pickle.loads(pickle.dumps(mask))
        assert again == mask
        assert hash(again) == hash(mask)


def test_repr_says_how_to_make_it():
    assert repr(Causal()) == "Causal(offset=None)"
    assert repr(Window(3) & ~Prefix(2)) == "(Window(left=3, right=0, offset=None) & ~Prefix(length=2))"
    assert all(len(repr(mask)) < 120 for mask in every_mask())


# the cache


def test_equal_masks_share_a_plan_and_changed_ones_do_not():
    clear_plans()
    extent = Extent(1, 1, 6, 7)
    array = np.ones((6, 7), bool)
    one = tile_plan(Dense(array), extent, 16, 32)
    assert tile_plan(Dense(array), extent, 16, 32) is one
    array[2, 3] = False
    other = tile_plan(Dense(array), extent, 16, 32)
    assert not plan_to_dense(other)[0, 0, 2, 3]
    assert tile_plan(Dense(array), extent, 8, 32) is not other


def test_a_predicate_is_asked_again_unless_it_promises_to_stay_the_same():
    table = np.zeros(8, bool)

    def rule(b, h, i, j):
        return table[j]

    extent = Extent(1, 1, 8, 8)
    mask, frozen = Predicate(rule), Predicate(rule, cache=True)
    assert not plan_to_dense(tile_plan(mask & Full(), extent, 8, 32)).any()
    assert not plan_to_dense(tile_plan(frozen, extent, 8, 32)).any()
    table[:] = True
    assert plan_to_dense(tile_plan(mask & Full(), extent, 8, 32)).all()
    assert not plan_to_dense(tile_plan(frozen, extent, 8, 32)).any()


def test_cache_is_bounded():
    from npattn.plans import build

    clear_plans()
    for length in range(1, build.MAX_PLANS + 50):
        tile_plan(Causal(), Extent(1, 1, length, 7), 16, 32)
    assert len(build._cache._plans) == build.MAX_PLANS
    clear_plans()
    assert build._cache._bytes == 0


def test_cache_is_safe_between_threads():
    from concurrent.futures import ThreadPoolExecutor

    def ask(n):
        return tile_plan(Window(n % 7), Extent(1, 1, 50 + n % 300, 60), 16, 32).len_q == 50 + n % 300

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(1000)))


# what is refused


@pytest.mark.parametrize("use", [lambda m: m and m, lambda m: m or m, lambda m: not m, bool])
def test_python_operators_that_cannot_work_say_which_to_use(use):
    with pytest.raises(TypeError, match=r"& \| ~"):
        use(Causal())


def test_bool_arrays_combine_with_masks_from_either_side():
    array = np.random.default_rng(1).random((5, 5)) < 0.5
    for mask in (array & Causal(), Causal() & array):
        assert isinstance(mask, Mask)
        np.testing.assert_array_equal(mask.to_dense(5, 5)[0, 0], array & np.tri(5, dtype=bool))
    np.testing.assert_array_equal((array | Causal()).to_dense(5, 5)[0, 0], array | np.tri(5, dtype=bool))


@pytest.mark.parametrize("other", [None, 3, "Causal"])
def test_masks_combine_with_masks_only(other):
    with pytest.raises(TypeError, match="combines with another mask"):
        Causal() & other


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Window(-1), ValueError, "Window's left must be at least 0, got -1"),
        (lambda: Window(1, -2), ValueError, "Window's right"),
        (lambda: Window(1.5), TypeError, "Window's left must be an int, got float"),
        (lambda: Window(True), TypeError, "bool"),
        (lambda: Causal(1.0), TypeError, "offset must be an int"),
        (lambda: Causal([[1]]), ValueError, r"one axis, got shape \(1, 1\)"),
        (lambda: Causal(np.array([1.5])), TypeError, "ints"),
        (lambda: Causal(2**63), ValueError, "64 bits"),
        (lambda: Padding([-1]), ValueError, "key_lengths must be at least 0"),
        (lambda: Padding([1, 2], [1]), ValueError, "2 and 1"),
        (lambda: Padding("12"), TypeError, "key_lengths"),
        (lambda: Prefix(-1), ValueError, "length must be at least 0"),
        (lambda: Documents(5), TypeError, "sequence of ints"),
        (lambda: Documents([5], [1, 2]), ValueError, "1 query_lengths and 2 key_lengths"),
        (lambda: Documents([-5]), ValueError, "at least 0"),
        (lambda: Documents([5], causal=1), TypeError, "causal must be a bool"),
        (lambda: Documents([5], window=-1), ValueError, "window must be at least 0"),
        (lambda: Documents([5], window=(1, 2, 3)), ValueError, "pair"),
        (lambda: GlobalTokens([-1]), ValueError, "indices must be at least 0"),
        (lambda: GlobalTokens(3), TypeError, "sequence"),
        (lambda: GlobalTokens([0.5]), TypeError, "ints"),
        (lambda: Strided(0), ValueError, "stride must be at least 1"),
        (lambda: Dilated(-1, 2), ValueError, "radius"),
        (lambda: Dilated(1, 0), ValueError, "dilation must be at least 1"),
        (lambda: Dilated(1, 2**62), ValueError, "dilation must be at most"),
        (lambda: Blocks(np.ones((2, 2)), 4), TypeError, "layout must be bool"),
        (lambda: Blocks(np.ones(2, bool), 4), ValueError, "layout must have shape"),
        (lambda: Blocks(np.ones((2, 2), bool), 0), ValueError, "block_size"),
        (lambda: Dense(np.ones((2, 2), int)), TypeError, "astype"),
        (lambda: Dense(np.ones((2, 2))), TypeError, "bias="),
        (lambda: Dense(np.ones((1,) * 5, bool)), ValueError, "4 axes"),
        (lambda: Sparse(np.ones((2, 2), bool)), TypeError, "CSR.*Dense"),
        (lambda: Sparse(SimpleNamespace(indptr=[0, 1], indices=[0], shape=(2, 2))), ValueError, "indptr"),
        (lambda: Sparse(SimpleNamespace(indptr=[0, 1], indices=[5], shape=(1, 2))), ValueError, r"\[0, 2\)"),
        (lambda: Sparse(SimpleNamespace(indptr=[0, 3], indices=[1], shape=(1, 2))), ValueError, "ends at 3"),
        (lambda: Predicate(3), TypeError, "function"),
        (lambda: longformer(-1, [0]), ValueError, "at least 0"),
        (lambda: bigbird(0, 1, 1, 1, 0), ValueError, "block_size"),
        (lambda: bigbird(4, 1, 1, 1.5, 0), TypeError, "random_blocks"),
        (lambda: local_strided(-1, 2), ValueError, "window_size"),
    ],
)
def test_bad_arguments_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Dense(np.ones((6, 6), bool)), "its len_q axis is 6, must be 1 or 5"),
        (Dense(np.ones((3, 1, 1, 1), bool)), "its batch axis is 3, must be 1 or 2"),
        (Dense(np.ones((2, 1, 1), bool)), "its heads axis is 2, must be 1 or 4"),
        (Sparse(csr(np.ones((5, 8), bool))), r"\(5, 8\).*\(5, 7\)"),
        (Blocks(np.ones((2, 2), bool), 3), "covers 6 along len_k, which is 7"),
        (Blocks(np.ones((3, 5, 7), bool), 1), "3 along heads"),
        (Documents([5]), "key_lengths must sum to len_k"),
        (Documents([4], [7]), "query_lengths must sum to len_q: they sum to 4, len_q is 5"),
        (Causal([1, 2, 3]), "offset has 3 entries.*batch is 2"),
        (Window(1, 0, [1]), "Window's offset has 1 entries"),
        (Dilated(1, 2, [1, 2, 3]), "Dilated's offset has 3"),
        (Padding([1]), "key_lengths has 1 entries"),
        (Padding(3, [1]), "query_lengths has 1 entries"),
        (Prefix([1]), "length has 1 entries"),
        (GlobalTokens([7]), "index 7 is out of range"),
    ],
)
def test_masks_for_other_sizes_are_refused(mask, text):
    for composed in (mask, mask & Full(), Full() | mask, ~mask):
        with pytest.raises(ValueError, match=text):
            composed.to_dense(5, 7, 2, 4)
        with pytest.raises(ValueError, match=text):
            tile_plan(composed, Extent(2, 4, 5, 7), 16, 32)
        with pytest.raises(ValueError, match=text):
            composed.density(5, 7, 2, 4)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda b, h, i, j: i - j, TypeError, "must return bool, got dtype int64"),
        (lambda b, h, i, j: np.ones(3, bool), ValueError, "does not broadcast"),
        (lambda b, h, i, j: np.ones((1,) * 6, bool), ValueError, "does not broadcast"),
        (lambda b, h, i, j: None, TypeError, "must return bool"),
        (lambda b, h, i, j: 1 // 0, ZeroDivisionError, "division"),
        (lambda i, j: i == j, TypeError, "positional"),
    ],
)
def test_a_predicates_faults_reach_the_caller(function, error, text):
    with pytest.raises(error, match=text):
        tile_plan(Predicate(function), Extent(2, 2, 20, 70), 16, 32)


def test_a_predicate_may_answer_true_and_is_asked_about_existing_places_only():
    asked = []

    def rule(b, h, i, j):
        asked.append((b.max(), h.max(), i.max(), j.max(), i.min(), j.min()))
        return True

    plan = tile_plan(Predicate(rule), Extent(2, 3, 37, 41), 16, 32)
    assert plan_to_dense(plan, 2, 3).all()
    assert len(plan.bits) == 0
    assert np.max(asked, axis=0).tolist()[:4] <= [1, 2, 36, 40]
    assert np.min(asked) >= 0


def test_predicate_joined_with_a_mask_is_asked_where_that_leaves_it_open():
    count = 0

    def rule(b, h, i, j):
        nonlocal count
        count += np.broadcast(b, h, i, j).size
        return (i + j) % 2 == 0

    tile_plan(Predicate(rule) & Window(10), Extent(1, 1, 2048, 2048), 32, 32)
    assert count < 2048 * 2048 / 10


@pytest.mark.parametrize("sizes", [(-1, 2), (2, 3.0), (True, 2)])
def test_sizes_are_checked(sizes):
    with pytest.raises((ValueError, TypeError), match="len_"):
        Full().to_dense(*sizes)


def test_scipy_matrices_of_any_format_make_a_sparse_mask():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    array = np.random.default_rng(0).random((9, 12)) < 0.3
    for make in (
        scipy_sparse.csr_array,
        scipy_sparse.coo_array,
        scipy_sparse.csc_matrix,
        scipy_sparse.lil_array,
    ):
        np.testing.assert_array_equal(Sparse(make(array.astype(float))).to_dense(9, 12)[0, 0], array)
    explicit = scipy_sparse.csr_array(([0.0], ([0], [1])), shape=(1, 2))
    np.testing.assert_array_equal(Sparse(explicit).to_dense(1, 2)[0, 0], [[False, True]])


# what is drawn


def test_picture_draws_one_head_and_shrinks_long_masks():
    assert Window(1, 1).picture(3, 4) == "███·\n·███\n··██"
    assert Padding([1, 2]).picture(1, 2, batch=2, b=1) == "██"
    lines = Causal().picture(1000, 1000).splitlines()
    assert max(len(lines), *map(len, lines)) <= 64
    assert Full().picture(0, 3) == ""
    with pytest.raises(ValueError, match="b=1"):
        Full().picture(2, 2, b=1)
