"""A real text with nothing to download, and word vectors made from it.

The text is the Python language reference that ships with CPython (``pydoc_data.topics``). Words that occur in
the same places get similar vectors (Levy & Goldberg 2014: a truncated factorisation of the positive pointwise
mutual information), so that attention between them means something before anything has been trained.
"""

import re

import numpy as np

from npattn._typing import Array

CONTEXT = 4  # words on each side that count as neighbours


def language_reference() -> str:
    """The text of the Python language reference, topics in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def words(text: str) -> list[str]:
    """Words and single punctuation marks, in order, lower case."""
    return re.findall(r"[a-z_]+|\d+|[^\w\s]", text.lower())


def number(tokens: list[str]) -> tuple[Array, list[str]]:
    """Token ids (len(tokens),) int64, most frequent word first, and the vocabulary they index."""
    vocabulary, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    by_count = np.argsort(-counts, kind="stable")
    rank = np.empty_like(by_count)
    rank[by_count] = np.arange(len(by_count))
    return rank[inverse], [str(word) for word in vocabulary[by_count]]


def word_vectors(ids: Array, vocabulary_size: int, dim: int) -> Array:
    """Unit vectors (vocabulary_size, dim) float32: words used alike point alike.

    Cost: one pass over the text and a truncated sparse SVD.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import svds

    pairs = [(ids[:-gap], ids[gap:]) for gap in range(1, CONTEXT + 1)]
    left = np.concatenate([a for a, _ in pairs] + [b for _, b in pairs])
    right = np.concatenate([b for _, b in pairs] + [a for a, _ in pairs])
    shape = (vocabulary_size, vocabulary_size)
    counts = coo_array((np.ones(len(left)), (left, right)), shape=shape).tocsr()
    counts.sum_duplicates()
    total = counts.sum()
    # smoothed as in word2vec: counts of contexts to the power 0.75
    context = counts.sum(axis=0) ** 0.75
    context = context / context.sum()
    word = counts.sum(axis=1) / total
    rows = np.repeat(np.arange(vocabulary_size), np.diff(counts.indptr))
    pmi = np.log(counts.data / total / (word[rows] * context[counts.indices]))
    counts.data = np.maximum(pmi, 0.0)
    start = np.full(vocabulary_size, 1.0 / np.sqrt(vocabulary_size))
    u, s, _ = svds(counts, k=dim, v0=start)
    vectors = u * np.sqrt(s)
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), np.float32)
