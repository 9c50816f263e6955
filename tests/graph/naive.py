"""Graph attention edge by edge in plain Python and float64, importing nothing under test."""

import math

import numpy as np


def softmax_over_in_edges(logits, target):
    """(num_edges, heads) -> the same shape."""
    weights = np.zeros(logits.shape)
    for head in range(logits.shape[1]):
        for node in set(target.tolist()):
            edges = [e for e in range(len(target)) if target[e] == node]
            top = max(logits[e, head] for e in edges)
            if top == -math.inf:
                continue
            values = {e: math.exp(logits[e, head] - top) for e in edges}
            for e in edges:
                weights[e, head] = values[e] / sum(values.values())
    return weights


def graph_attention(q, k, v, source, target, bias=None, scale=None, softcap=0.0, keep=None):
    """(out, weights); keep (num_edges, heads) multiplies the weights after the softmax."""
    heads = q.shape[1]
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    logits = np.zeros((len(source), heads))
    for e, (u, w) in enumerate(zip(source, target, strict=True)):
        for head in range(heads):
            masked = bias is not None and bias[e, head % bias.shape[1]] == -math.inf
            if masked:
                logits[e, head] = -math.inf
                continue
            x = scale * math.fsum(q[w, head] * k[u, head])
            x = softcap * math.tanh(x / softcap) if softcap else x
            logits[e, head] = x + (0.0 if bias is None else bias[e, head % bias.shape[1]])
    weights = softmax_over_in_edges(logits, target)
    out = np.zeros((len(q), heads, v.shape[2]))
    for e, (u, w) in enumerate(zip(source, target, strict=True)):
        for head in range(heads):
            if logits[e, head] != -math.inf:
                factor = 1.0 if keep is None else keep[e, head]
                out[w, head] += weights[e, head] * factor * v[u, head]
    return out, weights
