"""Linear attention: O(length), a recurrent network in disguise, and another function than softmax attention.

python examples/linear_attention.py
"""

import time

import numpy as np
from _device import parse, to_numpy

import npattn
from npattn.analysis import attention_cost, linear_attention_cost


def feature_map(x):
    """elu(x) + 1: positive, so that weights are."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def main():
    """Run the example and print."""
    arguments, xp = parse(__doc__, length={"type": int, "default": 2048, "help": "tokens"})
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 64, 16))

    # As weights: phi(q) · phi(k), divided by their sum. As written this is quadratic.
    weights = feature_map(q) @ feature_map(k).T
    quadratic = weights / weights.sum(axis=-1, keepdims=True) @ v

    # The same, summed in another order: one matrix for all keys, read by every query.
    state, norm = feature_map(k).T @ v, feature_map(k).sum(axis=0)
    linear = feature_map(q) @ state / (feature_map(q) @ norm)[:, None]
    assert np.allclose(quadratic, linear)
    assert np.allclose(npattn.linear_attention(q, k, v, eps=0.0), linear)

    # Causal: the state grows token by token. This is a recurrent network.
    state, norm, steps = np.zeros((16, 16)), np.zeros(16), []
    for query, key, value in zip(feature_map(q), feature_map(k), v, strict=True):
        state += np.outer(key, value)
        norm += key
        steps.append(query @ state / (query @ norm))
    assert np.allclose(npattn.linear_attention(q, k, v, causal=True, eps=0.0), steps)
    print("matrix, reordered sums and recurrence agree with npattn.linear_attention")

    # It is not an approximation of softmax attention; a model is trained with one or the other.
    softmax = npattn.attention(q, k, v)
    distance, size = abs(linear - softmax).mean(), abs(softmax).mean()
    print(f"from softmax attention it is {distance:.2f} away on the mean, of a size of {size:.2f}")

    print(
        f"\n{'tokens':>8} {'softmax':>10} {'linear':>10} ms    {'softmax':>10} {'linear':>10} GFLOP, 4 x 64"
    )
    for length in (arguments.length // 4, arguments.length // 2, arguments.length):
        arrays = [xp.asarray(rng.standard_normal((4, length, 64), dtype=np.float32)) for _ in range(3)]
        times = [measure(function, arrays) for function in (npattn.attention, npattn.linear_attention)]
        costs = [cost(length, heads=4).flops / 1e9 for cost in (attention_cost, linear_attention_cost)]
        print(f"{length:>8} {times[0]:>10.2f} {times[1]:>10.2f}       {costs[0]:>10.2f} {costs[1]:>10.2f}")


def measure(function, arrays):
    """Milliseconds of one call, the best of three after one to warm up."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        to_numpy(function(*arrays))
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times[1:])


if __name__ == "__main__":
    main()
