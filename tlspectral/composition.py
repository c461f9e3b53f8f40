"""How heads compose with each other and with the embedding: K-, Q- and V-composition, OV copying, self-match."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.errors import BadHead
from tlspectral.models.attention import (
    AttentionView,
    OutputFactors,
    RawAttention,
    attention_view,
    fold_attention,
    fold_output,
    key_value_groups,
    vocabulary_chunks,
)
from tlspectral.models.opening import open_layers
from tlspectral.nulls import one_thread
from tlspectral.selection import head_pair
from tlspectral.spectra import ThinProduct
from tlspectral.tables import COLUMNS, Column, Table, named

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers, Side

CompositionKind = Literal["q", "k", "v"]

_PATH = "That the path is used: it reads weights, not what is on the residual stream."
COMPOSITION = (
    Column("score",
        "||M OV^T|| / (||M|| ||OV||), M of the target and OV of this earlier head, for the target's keys; with M^T "
        "for its queries, with the target's OV for its values. Frobenius norms.", "ratio", range="0 .. 1",
        source="Elhage et al. 2021; FP 4", also_known_as="K-, Q- or V-composition", does_not_establish=_PATH),
    Column("chance", "1 / sqrt(d_model): the score of operators with random frames.", "ratio", range="0 .. 1",
        source="Elhage et al. 2021", also_known_as="baseline of composition",
        does_not_establish="A threshold: it is a typical value of random operators, without their spread."),
    Column("rank", "Rank of the score among all heads of all earlier layers; 1 is the strongest.", "index",
        range="1 .. heads of earlier layers", source="FP 4",
        does_not_establish="That ranks of two targets compare: the number of heads to be ranked among grows with "
        "the layer."),
)  # fmt: skip
"""`score, chance, rank` of `k_composition`."""

_HEAD = (COLUMNS["layer"], COLUMNS["head"])
K_COMPOSITION = Table(
    "k_composition", "`tls.k_composition`; layer and head are those of the earlier head", (*_HEAD, *COMPOSITION)
)
COPYING_SCORES = Table("copying_scores", "`tls.copying_scores`", (*_HEAD, COLUMNS["copying"], COLUMNS["positivity"]))
TABLES = (K_COMPOSITION, COPYING_SCORES)


def k_composition(
    model: Any, target: tuple[int, int], *, kind: CompositionKind = "k", revision: str | None = None
) -> pd.DataFrame:
    """Score how strongly each head of an earlier layer can feed the target head (Elhage et al. 2021; FP section 4).

    `score = ||M OV^T|| / (||M|| ||OV||)` for the keys of the target, with M^T in place of M for its queries (`"q"`) and
    `||OV_earlier OV_target||` for its values (`"v"`); Frobenius norms, from thin factors alone. M is norm-folded, and
    OV, like M, is centred under LayerNorm.

    Args:
        model: a TransformerBridge or HookedTransformer, or a name or path. A folder of safetensors or a hub model is
            read from its files, one layer's values and output at a time, without loading it (architectures:
            `tlspectral.models.checkpoints.STREAMED_MODEL_TYPES`); other names are loaded.
        target: (layer, head) that reads.
        kind: which input of the target is meant.
        revision: branch, tag or commit of a hub model that is given by name.

    Returns:
        DataFrame `layer, head, score, chance, rank`, best first; `chance` = 1/sqrt(d_model), the score of operators
        with random frames; `rank` from 1 over all heads of all earlier layers. Empty for a target in layer 0. `attrs`
        say where the model came from.

    Raises:
        BadHead: no such head, or no (layer, head) pair.
        BadWeights, UnsupportedArchitecture: a layer cannot be read.
        ValueError: an unknown kind, or a revision of what has none.

    What it does not establish: that the path is used. The score sees weights, not what is on the residual stream, and
    the number of heads to be ranked among grows with the layer. The gain of a norm behind the attention (Gemma 2 and 3,
    OLMo 2), which weighs what a head writes, is left out.
    """
    if kind not in ("q", "k", "v"):
        raise ValueError(f"kind must be 'q', 'k' or 'v', not {kind!r}")
    source = open_layers(model, revision=revision)
    layer, head = head_pair(target, source.n_layers)
    if not 0 <= layer < source.n_layers:
        raise BadHead(f"L{layer}H{head} does not exist: the model has layers 0 to {source.n_layers - 1}")
    side: Side = "output" if kind == "v" else "query-key"
    if not isinstance(source, AttentionView):
        source.prepare([layer], side)
        source.prepare(range(layer), "output")
    rows = []
    with one_thread():
        with _layer(source, layer, side) as raw:
            if not 0 <= head < len(raw.w_q):
                raise BadHead(
                    f"L{layer}H{head} does not exist: the model has layers 0 to {source.n_layers - 1} and layer "
                    f"{layer} has heads 0 to {len(raw.w_q) - 1}"
                )
            reading, other = _target_factors(raw, layer, head, kind)
        triangle = torch.linalg.qr(other, mode="r").R
        target_norm = ThinProduct(reading, other).norm()
        for earlier in range(layer):
            with _layer(source, earlier, "output") as raw:
                scores = _scores_of_layer(raw, earlier, reading, triangle) / target_norm
            rows += [{"layer": earlier, "head": i, "score": score} for i, score in enumerate(scores.tolist())]
    table = pd.DataFrame(rows, columns=["layer", "head", "score"])
    table["chance"] = source.d_model**-0.5
    table = table.sort_values(["score", "layer", "head"], ascending=[False, True, True], ignore_index=True)
    table["rank"] = np.arange(1, len(table) + 1)
    table.attrs = {**source.source}
    return named(table, K_COMPOSITION)


@contextmanager
def _layer(source: "AttentionView | CheckpointLayers", index: int, side: "Side") -> Iterator[RawAttention]:
    if isinstance(source, AttentionView):
        yield source.raw(index)
    else:
        from tlspectral.models.checkpoints import layer_named

        with source.layer(index, side) as view, layer_named(index):
            yield view.raw(0)


def _target_factors(
    raw: RawAttention, layer: int, head: int, kind: CompositionKind
) -> tuple[Float64[Tensor, "d_model d_head"], Float64[Tensor, "d_model d_head"]]:
    """Return the factor of the target's operator that reads the earlier head's output, and the other one."""
    heads, group = next((heads, group) for heads, group in key_value_groups(raw) if head < heads.stop)
    index = head - heads.start
    if kind == "v":
        output = _centred_output(group, layer)
        return output.w_v[0], output.w_o[index].T
    w_q, w_k = fold_attention(group, layer).operator_factors()
    return (w_k[index], w_q[index]) if kind == "k" else (w_q[index], w_k[index])


def _scores_of_layer(
    raw: RawAttention, layer: int, reading: Float64[Tensor, "d_model d_head"], triangle: Float64[Tensor, "m d_head"]
) -> Float64[Tensor, "heads"]:
    """Return `||M OV^T|| / ||OV||` of every head of a layer, computed one key/value group at a time."""
    scores = []
    for _, group in key_value_groups(raw):
        output = _centred_output(group, layer)
        read = torch.linalg.qr(output.w_v[0], mode="r").R
        through = torch.linalg.matrix_norm(read @ (output.w_o @ reading) @ triangle.T)
        sizes = torch.linalg.matrix_norm(read @ torch.linalg.qr(output.w_o.mT, mode="r").R.mT)
        scores.append(through / sizes)
    return torch.cat(scores)


def _centred_output(raw: RawAttention, layer: int) -> OutputFactors:
    """Return value and output factors; under LayerNorm without the mean of what is written, which norms remove."""
    output = fold_output(raw, layer)
    return replace(output, w_o=output.w_o - output.w_o.mean(2, keepdim=True)) if raw.norm.kind == "LN" else output


def copying_scores(model: Any) -> pd.DataFrame:
    """Measure how far heads copy the tokens they attend to, by eigenvalues of `W_O W_U W_E W_V` (Elhage et al. 2021).

    The product is d_head x d_head. W_V carries the gain of the input norm and W_U that of the final norm (under
    LayerNorm both are centred); W_E is raw.

    Returns:
        DataFrame `layer, head, copying, positivity`: the share of the d_head eigenvalues with positive real part (a
        count, in steps of 1/d_head), and `sum Re l / sum |l|` of the same. NaN for a head that writes nothing.

    Raises:
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    What it does not establish: copying in the model, where MLPs and later heads stand between. `W_U` is taken as the
    model holds it: TransformerLens's `center_unembed` subtracts a mean over the vocabulary, which changes these two
    columns although it changes no probability (in SmolLM2-135M `copying` by up to .08, `positivity` by up to 1.06).
    Compare models that were loaded alike. They are NaN where input and output vocabularies differ.
    """
    view = attention_view(model)
    circuit = unembedding_times_embedding(view)
    tables = []
    for layer in range(view.n_layers):
        scores = copying_of_layer(view.output(layer), circuit)
        tables.append(pd.DataFrame({"layer": layer, "head": np.arange(len(scores["copying"])), **scores}))
    return named(pd.concat(tables, ignore_index=True), COPYING_SCORES)


def copying_of_layer(
    output: OutputFactors, circuit: Float64[Tensor, "d_model d_model"] | None
) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Return `copying` and `positivity` of a layer's heads; `circuit` is `unembedding_times_embedding`."""
    if circuit is None:
        undefined = np.full(len(output.w_o), np.nan)
        return {"copying": undefined, "positivity": undefined.copy()}
    groups = len(output.w_o) // len(output.w_v)
    eigenvalues = torch.linalg.eigvals(output.w_o @ circuit @ output.w_v.repeat_interleave(groups, dim=0))
    total = eigenvalues.abs().sum(1)
    copying = (eigenvalues.real > 0).double().mean(1).masked_fill(total == 0, torch.nan)
    return {"copying": copying.numpy(), "positivity": (eigenvalues.real.sum(1) / total).numpy()}


def unembedding_times_embedding(view: AttentionView) -> Float64[Tensor, "d_model d_model"] | None:
    """Return W_U W_E with the final norm folded into W_U, summed over chunks of the vocabulary.

    None where input and output vocabularies differ, so that no token can be copied.
    """
    w_u, norm = view.unembedding()
    if w_u.shape[1] != len(view.embedding()):
        return None
    gain = None if norm.gain is None else norm.gain.detach().cpu().double()
    circuit = torch.zeros(view.d_model, view.d_model, dtype=torch.float64)
    chunks = zip(vocabulary_chunks(w_u, axis=1), vocabulary_chunks(view.embedding(), axis=0), strict=True)
    for unembedding, embedding in chunks:
        folded = unembedding if gain is None else gain[:, None] * unembedding
        circuit += (folded - folded.mean(0) if norm.kind == "LN" else folded) @ embedding
    return circuit


class EmbeddingMoments:
    """The Gram matrix and the sum of the token embedding, from one pass over the vocabulary.

    With them `self_match` of a head costs products of d_model x d_head matrices, whatever the size of the vocabulary.
    """

    def __init__(self, view: AttentionView):
        self.gram = torch.zeros(view.d_model, view.d_model, dtype=torch.float64)
        self.total = torch.zeros(view.d_model, dtype=torch.float64)
        self.count = view.d_vocab
        for chunk in vocabulary_chunks(view.embedding(), axis=0):
            self.gram += chunk.T @ chunk
            self.total += chunk.sum(0)

    def self_match(
        self, w_q: Float64[Tensor, "heads d_model d_head"], w_k: Float64[Tensor, "heads d_model d_head"]
    ) -> Float64[np.ndarray, "heads"]:
        """Return `(mean diagonal - mean off-diagonal) / rms` of `W_E M W_E^T`: self-match (FP section 3).

        W_E is raw, without positions and without the first block's MLP, so this reads layer 0 best. NaN for M = 0.
        """
        size = float(self.count)
        queries, keys = self.gram @ w_q, self.gram @ w_k
        diagonal = (w_q * keys).sum((1, 2))
        everything = ((self.total @ w_q) * (self.total @ w_k)).sum(-1)
        square = ((w_q.mT @ queries) * (w_k.mT @ keys)).sum((1, 2))
        off_diagonal = (everything - diagonal) / (size * size - size)
        return ((diagonal / size - off_diagonal) / (square / size**2).sqrt()).numpy()
