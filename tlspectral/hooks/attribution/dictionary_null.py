"""Attrs of a table of feature pairs: the share of the error, and a p-value against features of other tokens.

The error is the part of the stream that a dictionary (sparse autoencoder) does not explain.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.hooks.attribution.dictionary import ERROR, Dictionary
from tlspectral.hooks.attribution.divisions import DividedScore
from tlspectral.hooks.attribution.score_terms import pair_parts

MOST_DRAWS, TURNS = 999, 20
"""Most random draws of other tokens for `max_p`, and random rotations of the decoder for `error_share_turned`."""


def dictionary_notes(
    dictionary: Dictionary, divided: list[DividedScore], weights: Float64[Tensor, "scores"]
) -> dict[str, Any]:
    """Return a dict of attrs of a score that was divided by a dictionary.

    The error is the part of the stream that the dictionary does not explain. `error_score` is the sum of all rows with
    the error, in logits, `error_share` this sum over the score, and `error_share_turned` the same share with the
    decoder rotated at random. `max_p` is the p-value of the largest row of two features against features of other
    tokens, `max_p_floor` its smallest possible value, `max_p_draws` the number of draws. `dictionary` and
    `dictionary_origin` describe the dictionary.

    `divided` are the divided scores, `weights` their weights in the mean, which sum to 1.
    """
    weighted = [*zip(weights.tolist(), divided, strict=True)]
    score = sum(weight * divided_score.row.score for weight, divided_score in weighted)
    of_error = sum(weight * _error_score(divided_score) for weight, divided_score in weighted)
    generator = torch.Generator().manual_seed(0)
    turned = 0.0
    for weight, divided_score in weighted:
        turned += weight * sum(_turned_error_score(divided_score, generator) for _ in range(TURNS)) / TURNS
    max_p, floor, draws = _max_p(dictionary, divided, weights, generator)
    return {
        "error_share": of_error / score if score else float("nan"),
        "error_share_turned": turned / score if score else float("nan"),
        "error_score": of_error,
        "max_p": max_p,
        "max_p_floor": floor,
        "max_p_draws": draws,
        **dictionary.described(),
    }


def _error_score(divided: DividedScore) -> float:
    """Return the sum of the rows of a score that have the error at the query, at the key, or at both, in logits.

    `divided` is the score, divided by a dictionary. The error is the part of the stream that the dictionary does not
    explain.
    """
    at = [names.index(ERROR) for names in divided.names]
    rows = (divided.pairs[:, 0] == at[0]) | (divided.pairs[:, 1] == at[1])
    return float(divided.total[rows].sum())


def _turned_error_score(divided: DividedScore, generator: torch.Generator) -> float:
    """Return `_error_score`, in logits, for the same activations after a random rotation of the decoder.

    `divided` is the divided score with its feature activations; it is not changed. `generator` draws the rotation. A
    rotation keeps the lengths of features and the angles between them. Only rows of active features are rotated, into a
    random frame of their span. This has the same distribution as a rotation of the whole space.
    """
    streams = divided.run.residual[:2]
    written = [terms.written[:-2] for terms in (divided.query, divided.key)]
    rows = torch.cat(written)
    basis, triangle = torch.linalg.qr(rows.T)
    frame = torch.randn(basis.shape, generator=generator, dtype=torch.float64)
    turned = triangle.T @ torch.linalg.qr(frame).Q.T
    bias = divided.query.written[-2]
    explained = [part.sum(0) + bias for part in turned.split([len(part) for part in written])]
    terms = [torch.stack([part, stream - part]) for part, stream in zip(explained, streams, strict=True)]
    total = pair_parts(divided.form, terms[0], terms[1], streams)[0].sum(0)
    return float(total[1].sum() + total[:, 1].sum() - total[1, 1])


def _max_p(
    dictionary: Dictionary, divided: list[DividedScore], weights: Tensor, generator: torch.Generator
) -> tuple[float, float, int]:
    """Return the p-value of the largest |mean| of a pair of features, the smallest possible p, and the number of draws.

    `divided` are the scores, divided by `dictionary`, and `weights` their weights in the mean. In each draw of
    `generator`, query and key get the features of two random tokens of the prompt, under the norms of these tokens' own
    streams. p is the share of draws whose largest |mean| over pairs of features is at least as large, so it is
    corrected for the number of pairs. For one score with at most 999 pairs of tokens, all pairs are taken instead of
    random ones.
    """
    # The run has the query's and the key's token first, then all tokens of the prompt: hence + 2 below.
    reads = [_token_reads(dictionary, score) for score in divided]
    lengths = [len(features) - 2 for features, _, _ in reads]
    same = [score.run.positions[0] == score.run.positions[1] for score in divided]

    def largest(places: list[tuple[int, int]]) -> float:
        """Return the largest |weighted sum over scores| of a pair of features, in logits.

        `places` has for each score the tokens whose features stand at the query and at the key.
        """
        return _largest(divided, reads, weights, places, len(dictionary.decoder))

    every = [(a, a) for a in range(lengths[0])] if same[0] else [*permutations(range(lengths[0]), 2)]
    if len(divided) == 1 and len(every) <= MOST_DRAWS:
        values = torch.tensor([largest([(a + 2, b + 2)]) for a, b in every], dtype=torch.float64)
        return *_reaching(values, largest([(0, 1)])), len(every)
    drawn = [largest([(0, 1)] * len(divided))]
    for _ in range(MOST_DRAWS):
        orders = [(torch.randperm(length, generator=generator) + 2).tolist() for length in lengths]
        places = [(order[0], order[0 if alike else 1]) for order, alike in zip(orders, same, strict=True)]
        drawn.append(largest(places))
    return *_reaching(torch.tensor(drawn, dtype=torch.float64), drawn[0]), MOST_DRAWS


def _reaching(values: Float64[Tensor, "values"], observed: float) -> tuple[float, float]:
    """Return the share of values that are at least `observed`, and the share that equal the largest of the values.

    Values that differ by rounding count as equal.
    """
    observed_share, largest_share = (
        float((values >= bound * (1 - 1e-12)).double().mean()) for bound in (observed, float(values.max()))
    )
    return observed_share, largest_share


def _token_reads(dictionary: Dictionary, divided: DividedScore) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return three lists with an entry per token: indices of the active features, their queries, and their keys.

    `divided` is a score that was divided by `dictionary`; the tokens are all tokens of its prompt. The query of a
    feature is the vector that the head's W_Q makes of the feature's write, [features, d_head]; the key likewise by W_K.
    """
    form, residual = divided.form, divided.run.residual
    features, queries, keys = [], [], []
    assert divided.activations is not None
    for stream, activations in zip(residual, divided.activations, strict=True):
        active, written = dictionary.written(activations)
        features.append(torch.tensor(active))
        queries.append(form.query.of_terms(written, stream, form.query.scale(stream)))
        keys.append(form.key.of_terms(written, stream, form.key.scale(stream)))
    return features, queries, keys


def _largest(
    divided: list[DividedScore],
    reads: list[tuple[list[Tensor], list[Tensor], list[Tensor]]],
    weights: Tensor,
    places: list[tuple[int, int]],
    n_features: int,
) -> float:
    """Return the largest |weighted sum over scores| of any pair of features, in logits.

    `divided` are the scores, `weights` their weights in the sum. `reads` are the results of `_token_reads`, one per
    score. `places` has, for each score, the token whose features stand at the query and the token whose features stand
    at the key. `n_features` is the number of features of the dictionary.
    """
    pairs, totals = [], []
    for score, (features, queries, keys), weight, (query, key) in zip(
        divided, reads, weights.tolist(), places, strict=True
    ):
        scores = score.form.scores(queries[query], keys[key]).whole()[0]
        pairs.append((features[query][:, None] * n_features + features[key]).flatten())
        totals.append(weight * scores.flatten())
    numbers, place = torch.cat(pairs).unique(return_inverse=True)
    summed = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place, torch.cat(totals))
    return float(summed.abs().max()) if len(summed) else 0.0
