"""`head_directions`: the singular directions of a head's operator, read as the tokens that load on them.

A loading is the cosine of a direction with a token's vector (Millidge and Black 2022, "The singular value
decompositions of transformer weight matrices are highly interpretable"). Random directions have such lists, too, so
words are given only where tokens load more than on random directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from scipy.stats import false_discovery_control
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.algebra.rotary import in_float64, with_gain_and_phase
from tlspectral.algebra.spectra import rank_tolerance, thin_svd
from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.heads.copying import folded_unembedding
from tlspectral.heads.operators.factored import output_products
from tlspectral.models.attention.modes import query_key_modes
from tlspectral.models.attention.run_scores import visible_keys
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView, vocabulary_chunks
from tlspectral.models.running.batches import attention_positions, rows_of_scores
from tlspectral.models.running.passes import capture_until
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text
from tlspectral.selection.heads_as_written import Head
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema, columns
from tlspectral.tasks.control_tests import draws_floor

LEVEL = 0.05
NO_READING = "no reading"
BATCH = 16
SIDES = {"qk": ("query", "key"), "ov": ("read", "written")}

HEAD_DIRECTIONS = Schema(
    "head_directions",
    (
        *HEAD,
        *columns("""
            kind            | label    | qk is M, ov is W_V W_O, qk contrast that of a task's pairs of query and key.
            direction       | index    | Number of the singular direction, largest singular value first, from 1.
            share           | share    | Squared singular value over the sum of all squares.
            side            | label    | query or key of qk, read or written of ov.
            strength        | cosine   | Mean absolute loading of the side's n_words strongest tokens.
            random_strength | cosine   | Mean of strength over random directions.
            pvalue          | p        | (1 + random directions whose strength is at least this) / (1 + draws).
            qvalue          | q        | pvalue by Benjamini-Hochberg over the directions and sides of the table.
            rank            | index    | Rank of the token by absolute loading, from 1; missing without a reading.
            token           | token id | Id of the token; missing without a reading.
            word            | text     | The token as text, its id without a tokenizer; or "no reading".
            loading         | cosine   | Signed cosine of the token's vector with the direction.
            random_loading  | cosine   | Mean absolute loading of that rank on random directions.
        """),
    ),
    "`tls.head_directions`",
)


@dataclass(frozen=True)
class SideDirections:
    """The directions of one side of an operator, and random directions of the same space, as unit vectors.

    Attributes:
        name: "query", "key", "read" or "written".
        directions, random: vectors as columns.
        centred: whether a LayerNorm between embedding and side removes the mean of a vector.
    """

    name: str
    directions: Float64[Tensor, "d_model n"]
    random: Float64[Tensor, "d_model draws"]
    centred: bool


@checked_settings
def head_directions(
    model: Any,
    head: Head,
    kind: str = "qk",
    *,
    task: Any = None,
    n_directions: int = 10,
    n_words: int = 10,
    draws: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Read the largest singular directions of a head's operator as words, and compare them with random directions.

    Use it to see which tokens a head matches (`"qk"`), or reads and writes (`"ov"`).

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> words = tls.head_directions(model, "L1H0", "qk", n_directions=1, n_words=2, draws=99)
    >>> words.loc[words["qvalue"] < 0.05, ["direction", "side", "token"]].values.tolist()
    [[1, 'query', 20], [1, 'query', 7]]

    Args:
        model: a TransformerBridge or HookedTransformer.
        head: "L5H1", (5, 1) or a table row.
        kind: "qk" (M = W_Q W_K^T, sides `query` and `key`) or "ov" (W_V W_O, sides `read` and `written`).
        task: a `tls.Task(..., attention=(query, key))`, for "qk" only: in place of M, the operator is then the mean of
            q k^T at the attended key less its mean at the other keys.
        n_directions, n_words: number of directions, and of words for each.
        draws: random directions; the smallest possible p is 1 / (1 + draws).
        seed: seed of the random directions.

    Returns:
        DataFrame with a row per direction, side and word; empty for an operator of 0. Columns: `layer, head, name,
        kind, direction, share, side, strength, random_strength, pvalue, qvalue, rank, token, word, loading,
        random_loading`. `loading` is the signed cosine of the direction with the token's embedding (`written`:
        unembedding). A query token and a key token that load with equal sign raise the score. `share` is the
        direction's part of the squared norm of the operator; `strength` the mean absolute loading of its words;
        `pvalue` is (1 + random directions of at least this strength) / (1 + draws); `qvalue` its Benjamini-Hochberg
        value over all directions and sides. Where `qvalue` is not below .05, one row has the word "no reading".

    Raises:
        BadHead: the head does not exist.
        ValueError, TypeError: an unknown kind, a count below 1; a task that is not a `Task` with `attention=`; a task
            with "ov"; or a query that sees no other key.
        UnsupportedArchitecture, BadWeights: the layer or the embedding cannot be read.

    Not established: what the head does, or that the words share a meaning. More: docs/preferences.md.
    """
    if kind not in SIDES:
        raise ValueError(f"kind must be 'qk' or 'ov', not {shown(kind)}")
    if min(n_directions, n_words, draws) < 1:
        raise ValueError(
            f"n_directions={shown(n_directions, 40)}, n_words={shown(n_words, 40)}, draws={shown(draws, 40)}: give "
            "numbers of 1 or more"
        )
    if task is not None and kind == "ov":
        raise ValueError('task= needs kind="qk", because it contrasts keys: give kind="qk", or leave out task=')
    with measured(model, report_hooks=task is not None) as view:
        index, number = one_head(view, head)
        settings: dict[str, Any] = {"n_words": n_words, "draws": draws, "seed": seed}
        with one_thread():
            rng = torch.Generator().manual_seed(seed)
            if task is None:
                shares, sides = _operator_sides(view, index, number, kind, n_directions, draws, rng)
            else:
                kind = "qk contrast"
                shares, sides, settings["n_prompts"] = _contrast_sides(
                    view, index, number, task, n_directions, draws, rng
                )
            rows = _rows(view, shares, sides, n_words)
        table = pd.DataFrame(rows, columns=[column.name for column in HEAD_DIRECTIONS.columns if column.name != "name"])
        table = table.assign(layer=index, head=number, kind=kind)
        table = table.astype({"rank": "Int64", "token": "Int64", "random_loading": float})
        made = Measurement(HEAD_DIRECTIONS, settings, view.origin([index]))
        return made.table(table, pvalue_floor=draws_floor(draws))


def _operator_sides(
    view: AttentionView, index: int, head: int, kind: str, n_directions: int, draws: int, rng: torch.Generator
) -> tuple[list[float], list[SideDirections]]:
    """Return the singular directions of an operator of head `head` in layer `index`: a list of shares, and two
    `SideDirections`.

    `view` is the open model. `kind`: "qk" for M with the sides query and key, "ov" for W_V W_O with the sides read and
    written. A share is the squared singular value over the squared norm, for the `n_directions` largest. Each side also
    has `draws` random directions from `rng`.
    """
    layer = view.layer(index)
    if kind == "qk":
        (modes,) = query_key_modes(layer, [head])
        left, right = modes.query, modes.key
        shares, kept = _shares(modes.values, modes.square, n_directions)
    else:
        left, values, right = thin_svd(output_products(view, index)[head])
        shares, kept = _largest(values, n_directions, rank_tolerance(layer.storage_dtype, layer.d_model, layer.d_head))
    random = torch.randn(layer.d_model, draws, generator=rng, dtype=torch.float64)
    centred = layer.norm.kind == "LN"
    random = _unit(random - random.mean(0) if centred else random)
    first, second = SIDES[kind]
    return shares, [
        SideDirections(first, left[:, kept], random, centred),
        SideDirections(second, right[:, kept], random, centred),
    ]


def _contrast_sides(
    view: AttentionView, index: int, head: int, task: Any, n_directions: int, draws: int, rng: torch.Generator
) -> tuple[list[float], list[SideDirections], int]:
    """Run a task and return the singular directions of its query-key contrast: a list of shares, the `SideDirections`
    query and key, and the number of prompts.

    The contrast is the mean of q k^T at the task's key less its mean at the other keys, for head `head` of layer
    `index` of the model in `view`. `task` is a `Task` with `attention=`. A share is the squared singular value over the
    squared norm, for the `n_directions` largest. Each side also has `draws` random directions from `rng`.
    """
    layer = view.layer(index)
    contrast, n_prompts = _key_contrast(view, layer, head, task)
    u, values, v = torch.linalg.svd(contrast)
    shares, kept = _largest(values, n_directions, rank_tolerance(torch.float32, *contrast.shape))
    sides = []
    for name, factors, inner in zip(SIDES["qk"], layer.operator_factors(), (u, v.T), strict=True):
        drawn = torch.randn(layer.d_head, draws, generator=rng, dtype=torch.float64)
        directions, random = (_unit(factors[head] @ inward) for inward in (inner[:, kept], drawn))
        sides.append(SideDirections(name, directions, random, layer.norm.kind == "LN"))
    return shares, sides, n_prompts


def _key_contrast(
    view: AttentionView, layer: AttentionLayer, head: int, task: Any
) -> tuple[Float64[Tensor, "d_head d_head"], int]:
    """Run the prompts of a `Task` and return E[q k^T | +] - E[q k^T | -] of head `head`, [d_head, d_head], and the
    number of prompts.

    `view` is the open model, `layer` the folded layer. q is the query at the task's query position. + takes the key at
    the task's key position, - the mean of all other keys that the query sees. Queries and keys are taken before
    rotation; queries carry the gain and phase of a spectral layer. Raises TypeError for an object that is not a `Task`,
    ValueError for a task without `attention=`, or a query that does not see its key or sees no other key.
    """
    if not hasattr(task, "prompts") or not hasattr(task, "attention"):
        raise TypeError(
            f"task= needs a tls.Task with attention=(query, key) positions; found {type(task).__name__}: give "
            "tls.Task(prompts, metric, attention=(-1, 2))"
        )
    prompts = packed_prompts(view, task.prompts)
    pairs = attention_positions(prompts.lengths, task.attention)
    if pairs is None:
        raise ValueError(
            "the task has no attention=: give the query and key position of each prompt, Task(..., attention=(-1, 2))"
        )
    names = view.hook_names(layer.layer)
    total = torch.zeros(layer.d_head, layer.d_head, dtype=torch.float64)
    points = [names[point] for point in ("query", "key", "scores") if point in names]
    at_once = max(1, min(BATCH, rows_of_scores(view, prompts.tokens.shape[1])))
    for start in range(0, len(prompts.tokens), at_once):
        rows = slice(start, start + at_once)
        captured = capture_until(view, prompts.tokens[rows], points, last=names["pattern"])
        q, k = (
            in_float64(normed[:, :, head * normed.shape[2] // layer.n_heads]).cpu()  # of the key that the head reads
            for normed in (layer.normed(point, captured[names[point]]) for point in ("query", "key"))
        )
        if layer.rotary is not None:
            q = with_gain_and_phase(q[:, None], layer.rotary.of_heads([head]))[:, 0]
        visible = visible_keys(view, layer.layer, k.shape[1], captured).expand(len(k), layer.n_heads, -1, -1)
        for row, (query, key) in enumerate(pairs[rows].tolist()):
            seen = visible[row, head, query].cpu()
            rest = seen.clone()
            rest[key] = False
            if not bool(seen[key]) or not bool(rest.any()):
                if not bool(seen[key]):
                    problem = f"does not see its key at {key}: give attention=(query, key) with a key that it sees"
                else:
                    problem = "sees no other key to compare with: give attention=(query, key) with a later query"
                raise ValueError(
                    f"attention of sequence {start + row}: in layer {layer.layer} the query at {query} {problem}"
                )
            total += torch.outer(q[row, query], k[row, key] - k[row, rest].mean(0))
    return total / len(prompts.tokens), len(prompts.tokens)


def _largest(values: Float64[Tensor, " r"], count: int, tolerance: float) -> tuple[list[float], slice]:
    """Return two things: a list with the shares of the largest singular values in the squared norm, at most `count`,
    and the slice of these values.

    `values` are all singular values, falling; those below `tolerance` times the largest are left out.
    """
    return _shares(values[values > tolerance * values[0]], float(values.square().sum()), count)


def _shares(values: Float64[Tensor, " r"], square: float, count: int) -> tuple[list[float], slice]:
    """Return two things: a list with the shares of the first `count` singular values in the squared norm, and the slice
    of these values.

    A share is value^2 / `square`, with `values` falling; `square` is the squared norm of the operator.
    """
    shares = [float(value) ** 2 / square for value in values[:count]]
    return shares, slice(0, len(shares))


def _unit(vectors: Float64[Tensor, "d_model n"]) -> Float64[Tensor, "d_model n"]:
    """Return the vectors (columns) scaled to norm 1; a zero vector stays 0."""
    return vectors / vectors.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)


class Loadings(NamedTuple):
    """The largest loadings on each direction; a loading is the cosine of a direction with the vector of a token.

    Attributes:
        ids: ids of the tokens with the largest absolute loading, largest first.
        signed: their cosines with the direction.
        random: the largest absolute cosines on each random direction.
    """

    ids: Int[np.ndarray, "words n"]
    signed: Float64[np.ndarray, "words n"]
    random: Float64[np.ndarray, "words draws"]


def _rows(view: AttentionView, shares: list[float], sides: list[SideDirections], n_words: int) -> list[dict[str, Any]]:
    """Return the rows of `head_directions` as dicts, for all directions, two sides and `n_words` words.

    `view` has the vocabulary, `shares` the share of each direction, `sides` the two sides. Keys of a dict: direction,
    share, side, strength, random_strength, pvalue, qvalue, rank, token, word, loading, random_loading. A direction
    without a reading has one row, with the word "no reading".
    """
    if not shares:
        return []
    read = [_loadings(view, sides[0], n_words)]
    alike = sides[1].random is sides[0].random and sides[1].name != "written"
    read.append(_loadings(view, sides[1], n_words, random=read[0].random if alike else None))
    signs = np.sign(read[0].signed[0])
    strength = np.stack([np.abs(loadings.signed).mean(0) for loadings in read])  # [sides, directions]
    random = [loadings.random.mean(0) for loadings in read]
    pvalues = np.stack(
        [
            (1 + (drawn[:, None] >= observed).sum(0)) / (1 + len(drawn))
            for drawn, observed in zip(random, strength, strict=True)
        ]
    )
    qvalues = false_discovery_control(pvalues.ravel()).reshape(pvalues.shape)
    rows = []
    for direction, share in enumerate(shares):
        for number, (side, loadings) in enumerate(zip(sides, read, strict=True)):
            row = {
                "direction": direction + 1,
                "share": share,
                "side": side.name,
                "strength": strength[number, direction],
                "random_strength": float(random[number].mean()),
                "pvalue": pvalues[number, direction],
                "qvalue": qvalues[number, direction],
            }
            if not qvalues[number, direction] < LEVEL:
                rows.append({**row, "rank": None, "token": None, "word": NO_READING, "loading": np.nan})
                continue
            for rank in range(len(loadings.ids)):
                token = int(loadings.ids[rank, direction])
                words = {"rank": rank + 1, "token": token, "word": token_text(view, token)}
                loading = float(signs[direction] * loadings.signed[rank, direction])
                rows.append({**row, **words, "loading": loading, "random_loading": float(loadings.random[rank].mean())})
    return rows


def _loadings(view: AttentionView, side: SideDirections, n_words: int, random: np.ndarray | None = None) -> Loadings:
    """Return the `n_words` largest loadings (cosines with the vectors of tokens) on each direction of one side, as
    `Loadings`.

    The vocabulary is read in chunks. `random` [words, draws] are the loadings of the random directions, if they are
    known already; None computes them.
    """
    n = side.directions.shape[1]
    columns = side.directions if random is not None else torch.cat([side.directions, side.random], dim=1)
    best, ids = columns[:0], torch.empty(0, columns.shape[1], dtype=torch.long)
    start = 0
    for tokens in _tokens(view, side):
        new_ids = torch.arange(start, start + len(tokens))[:, None].expand(-1, columns.shape[1])
        best, ids = torch.cat([best, (tokens @ columns.to(tokens.device)).cpu()]), torch.cat([ids, new_ids])
        chosen = best.abs().topk(min(n_words, len(best)), dim=0).indices
        best, ids = best.gather(0, chosen), ids.gather(0, chosen)
        start += len(tokens)
    return Loadings(ids[:, :n].numpy(), best[:, :n].numpy(), best[:, n:].abs().numpy() if random is None else random)


def _tokens(view: AttentionView, side: SideDirections) -> Iterator[Float64[Tensor, "chunk d_model"]]:
    """Yield the vectors of the vocabulary of the model in `view` in chunks, scaled to norm 1: unembedding if `side` is
    "written", else embedding.

    A zero vector stays 0. The chunks come in the order of the token ids.
    """
    if side.name != "written":
        for chunk in vocabulary_chunks(view.embedding(), axis=0):
            yield _unit((chunk - chunk.mean(1, keepdim=True) if side.centred else chunk).T).T
        return
    for chunk in folded_unembedding(view):
        yield _unit(chunk).T
