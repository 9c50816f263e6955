"""Which tokens does an attention head live on? Statistics of a long text, without the matrix.

python examples/find_key_tokens.py --length 32768

The text is the Python language reference, the vectors are those of `npattn demo`: words used alike point
alike. One head attends from each word to everything before it that is related. At 32,768 words its weights
would be a matrix of 4 GiB; `attention_stats` reads off what one wants to know of it in a few megabytes.
"""

import time

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn._cli.corpus import language_reference, number, word_vectors, words
from npattn.masks import Causal

length = {"type": int, "default": 4096, "help": "words"}
arguments, xp = parse(__doc__, length=length)

ids, vocabulary = number(words(language_reference()))
vectors = word_vectors(ids, len(vocabulary), 64)
ids = ids[: arguments.length]
tokens = [vocabulary[n] for n in ids]

# Frequent words say little: shorten their vectors as keys, so that the head looks for content.
share = np.bincount(ids, minlength=len(vocabulary)) / len(ids)
informative = (1 / (1 + 1000 * share)).astype(np.float32)
query = xp.asarray(vectors[ids])
key = xp.asarray(vectors[ids] * informative[ids, None])

# A word must not find itself, or every word would.
mask = Causal(offset=-1)
start = time.perf_counter()
stats = npattn.AttentionStats(
    *(to_numpy(part) for part in npattn.attention_stats(query, key, mask=mask, scale=12.0, top_k=3))
)
seconds = time.perf_counter() - start

dense = 4 * len(ids) ** 2
kept = sum(part.nbytes for part in stats)
print(
    f"{len(ids):,} words in {seconds:.2f} s; the matrix would take {dense / 2**20:,.0f} MiB, "
    f"the statistics take {kept / 2**20:.1f}"
)

# How focused is the head? exp(entropy) is the number of keys a query attends to, in effect.
effective = np.exp(stats.entropy[1:])
seen = np.arange(1, len(ids))
print(f"a word sees {seen.mean():,.0f} others on average and attends to {np.median(effective):,.0f} (median)")

# The keys the head lives on: what all queries together give to each token, against an even spread.
even = np.zeros(len(ids))
even[:-1] = np.cumsum((1 / seen)[::-1])[::-1]  # token j would get Σ 1/i from the queries i > j
gain = stats.received / np.maximum(even, 1e-3)
late = slice(len(ids) // 20, -len(ids) // 20)  # the first tokens are seen by all, the last by few
order = np.argsort(-gain[late]) + late.start
print("\nmost attended to, against an even spread:")
shown = []
for j in order:
    if tokens[j] not in shown:
        shown.append(tokens[j])
        print(
            f"  {gain[j]:6.1f} ×  word {j:6,}: … {' '.join(tokens[max(0, j - 3) : j])} "
            f"[{tokens[j]}] {' '.join(tokens[j + 1 : j + 4])} …"
        )
    if len(shown) == 8:
        break

# And the other way round: where single words look.
print("\nwhere the most focused words look:")
focused = np.argsort(stats.entropy[len(ids) // 2 :])[:400] + len(ids) // 2
shown = []
for i in focused:
    if tokens[i] in shown:
        continue
    shown.append(tokens[i])
    found = ", ".join(
        f"{tokens[j]} ({weight:.0%}, {i - j:,} words back)"
        for j, weight in zip(stats.top_keys[i], stats.top_weights[i], strict=True)
    )
    print(f"  {tokens[i]} → {found}")
    if len(shown) == 6:
        break
