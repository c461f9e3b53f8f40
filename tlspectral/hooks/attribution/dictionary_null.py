"""What a table of feature pairs does not say by itself: how much is the error's, and what other features would give."""

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
"""Draws of the tokens whose features stand at query and key; random turns of the decoder."""


def dictionary_notes(
    dictionary: Dictionary, divided: list[DividedScore], weights: Float64[Tensor, "scores"]
) -> dict[str, Any]:
    """Return what `attrs` say of a dictionary: the error's share, the same of a turned decoder, `max_p` and its floor.

    `weights` are the weights of the scores in the mean, and sum to 1.
    """
    score = sum(weight * each.row.score for weight, each in zip(weights.tolist(), divided, strict=True))
    of_error = sum(weight * _error_score(each) for weight, each in zip(weights.tolist(), divided, strict=True))
    generator = torch.Generator().manual_seed(0)
    turned = 0.0
    for weight, each in zip(weights.tolist(), divided, strict=True):
        turned += weight * sum(_turned_error_score(each, generator) for _ in range(TURNS)) / TURNS
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
    """Return the sum of all rows with the error at the query, at the key, or at both."""
    at = [names.index(ERROR) for names in divided.names]
    rows = (divided.pairs[:, 0] == at[0]) | (divided.pairs[:, 1] == at[1])
    return float(divided.total[rows].sum())


def _turned_error_score(divided: DividedScore, generator: torch.Generator) -> float:
    """Return `_error_score` with the same activations of features whose decoder is turned at random.

    A random rotation keeps lengths and angles between features. Only the active rows of the decoder are turned: into a
    random frame of their span, which has the distribution that a rotation of the whole space gives.
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
    """Return p of the largest |mean| of a pair of features, against features of other tokens, its floor, and the draws.

    In each draw query and key of a prompt have the features of two tokens of the prompt, under the norms of these
    tokens' own streams. Under the norms of the score's tokens, features of a longer stream would count for more. Every
    draw gives its largest pair, so that p is corrected for the number of pairs. For one score all pairs of tokens are
    taken, where there are not too many: the score's own is one of them. The floor is p of the largest value of all.
    """
    reads = [_token_reads(dictionary, each) for each in divided]
    lengths = [len(features) - 2 for features, _, _ in reads]
    same = [each.run.positions[0] == each.run.positions[1] for each in divided]

    def largest(places: list[tuple[int, int]]) -> float:
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
    """Return the shares of values that reach the observed one and that reach the largest one, up to rounding."""
    observed_share, largest_share = (
        float((values >= one * (1 - 1e-12)).double().mean()) for one in (observed, float(values.max()))
    )
    return observed_share, largest_share


def _token_reads(dictionary: Dictionary, divided: DividedScore) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return, of each token of a run, its features and what queries and keys at the two tokens read of them."""
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
    """Return the largest |weighted sum over scores| of a pair of features, at the query and key of `places`."""
    pairs, totals = [], []
    for each, (features, queries, keys), weight, (query, key) in zip(
        divided, reads, weights.tolist(), places, strict=True
    ):
        scores = each.form.scores(queries[query], keys[key]).whole()[0]
        pairs.append((features[query][:, None] * n_features + features[key]).flatten())
        totals.append(weight * scores.flatten())
    numbers, place = torch.cat(pairs).unique(return_inverse=True)
    summed = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place, torch.cat(totals))
    return float(summed.abs().max()) if len(summed) else 0.0
