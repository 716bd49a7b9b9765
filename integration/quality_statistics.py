"""How far two next-token distributions are apart.

Per position: the Kullback-Leibler divergence KL(float || quantized) in nats, whether the most likely token is the same,
and each one's surprise at the token that follows, in nats. Perplexity is e to the mean surprise. Logits are turned
into distributions in float64, a block of positions at a time: a whole window's would take 400 MB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .quality_model import Doubles, Floats, Llama

BLOCK = 128
"""Positions at a time."""


@dataclass(frozen=True)
class Comparison:
    """Of one window, by position: kl [T] in nats, same_top [T] bool, surprises [T - 1] in nats."""

    kl: Doubles
    same_top: np.ndarray
    float_surprise: Doubles
    surprise: Doubles


def log_softmax(logits: Floats | Doubles) -> Doubles:
    """Logarithms of the distributions that rows of logits [..., vocabulary] stand for."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(log_p: Doubles, log_q: Doubles) -> Doubles:
    """KL(p || q) in nats of each row, from logarithms [..., vocabulary] to [...]."""
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def compare(model: Llama, expected: Floats, found: Floats, tokens: list[int]) -> Comparison:
    """Compare two runs of a window, given as hidden states [T, E]; ``tokens`` are the window's T tokens."""
    following = np.array(tokens[1:])
    kl, same_top, float_surprise, surprise = [], [], [], []
    for start in range(0, len(tokens), BLOCK):
        log_p = log_softmax(model.logits(expected[start : start + BLOCK]))
        log_q = log_softmax(model.logits(found[start : start + BLOCK]))
        kl.append(kl_divergence(log_p, log_q))
        same_top.append(log_p.argmax(axis=-1) == log_q.argmax(axis=-1))
        targets = following[start : start + BLOCK]
        rows = np.arange(len(targets))
        float_surprise.append(-log_p[rows, targets])
        surprise.append(-log_q[rows, targets])
    return Comparison(
        np.concatenate(kl), np.concatenate(same_top), np.concatenate(float_surprise), np.concatenate(surprise)
    )


@dataclass(frozen=True)
class Summary:
    """Of several windows: means over all positions, and the mean of each window.

    late_kl: mean over the second half of each window, where most of what a query reads is packed.
    """

    kl: float
    kl_windows: list[float]
    late_kl: float
    top1: float
    top1_windows: list[float]
    float_perplexity: float
    perplexity: float
    perplexity_windows: list[float]


def summarize(windows: list[Comparison]) -> Summary:
    """Join the comparisons of windows of equal length."""
    kl = [float(w.kl.mean()) for w in windows]
    top1 = [float(w.same_top.mean()) for w in windows]
    surprises = [float(w.surprise.mean()) for w in windows]
    return Summary(
        kl=float(np.mean(kl)),
        kl_windows=kl,
        late_kl=float(np.mean([w.kl[len(w.kl) // 2 :].mean() for w in windows])),
        top1=float(np.mean(top1)),
        top1_windows=top1,
        float_perplexity=float(np.exp(np.mean([w.float_surprise.mean() for w in windows]))),
        perplexity=float(np.exp(np.mean(surprises))),
        perplexity_windows=[float(np.exp(s)) for s in surprises],
    )
