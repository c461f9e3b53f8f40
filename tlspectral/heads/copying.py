"""How far a head raises the logits of tokens it attends to (`copying_scores`), and how far equal tokens match
(`self_match`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Complex128, Float64
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.algebra.spectra import NILPOTENT_SHARE, rank_tolerance
from tlspectral.models.reading import measured
from tlspectral.models.reading.layer import OutputFactors
from tlspectral.models.reading.view import AttentionView, vocabulary_chunks
from tlspectral.tables.head_columns import COLUMNS, HEAD
from tlspectral.tables.measurement import stacked
from tlspectral.tables.schema import Schema

COPYING_SCORES = Schema(
    "copying_scores", (*HEAD, COLUMNS["copying"], COLUMNS["positivity"]), "`tls.heads.copying_scores`"
)


def copying_scores(model: Any) -> pd.DataFrame:
    """Score how far each head copies the tokens it attends to, by the eigenvalues of W_O W_U W_E W_V (Elhage et al.
    2021).

    Use it to find heads that raise the logit of a token by attending to it. Nothing is run.

    >>> import tlspectral as tls
    >>> scores = tls.heads.copying_scores(tls.load_model("tiny-rope"))
    >>> scores.loc[scores["copying"] > 0.9, "name"].tolist()
    ['L1H0', 'L1H1', 'L1H2', 'L1H3']

    Args:
        model: a TransformerBridge or HookedTransformer.

    Returns:
        DataFrame with a row per head, sorted by layer and head. Columns: `layer, head, name, copying, positivity`.
        `copying` (0 to 1) is the share of eigenvalues with a positive real part; `positivity` (-1 to 1) is the sum of
        real parts over the sum of absolute values. Near 1: the head raises the tokens it attends to. `attrs` hold where
        the model came from, with hashes of its weights. Both scores are NaN for a head that writes nothing or whose
        product is nilpotent, for an encoder, and where input and output vocabularies differ.

    Raises:
        UnsupportedArchitecture, BadWeights: a layer cannot be read.

    Not established: that the model copies. MLPs and later heads can change what the head writes. More: docs/table.md.
    """
    with measured(model, report_hooks=False) as view:
        circuit = unembedding_times_embedding(view)
        tables = []
        for layer in view.layers:
            scores = copying_of_layer(view.output(layer), circuit)
            tables.append(pd.DataFrame({"layer": layer, "head": np.arange(len(scores["copying"])), **scores}))
        return COPYING_SCORES.frame(stacked(tables), view.origin())


def copying_of_layer(
    output: OutputFactors, circuit: Float64[Tensor, "d_model d_model"] | None
) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Return `{"copying": [heads], "positivity": [heads]}` of a layer, from the eigenvalues of W_O C W_V with C =
    `circuit`.

    `circuit` is W_U W_E [d_model, d_model]; None gives NaN. `copying` is the share of eigenvalues with a positive real
    part, `positivity` the sum of real parts over the sum of absolute values. `output` has the factors W_V and W_O.
    """
    if circuit is None:
        undefined = np.full(len(output.w_o), np.nan)
        return {"copying": undefined, "positivity": undefined.copy()}
    groups = len(output.w_o) // len(output.w_v)
    products = output.w_o @ circuit @ output.w_v.repeat_interleave(groups, dim=0)
    eigenvalues = torch.linalg.eigvals(products)
    total = eigenvalues.abs().sum(1)
    counted = _above_rounding(eigenvalues, output, products)
    undefined = total <= NILPOTENT_SHARE * torch.linalg.matrix_norm(products)
    copying = ((eigenvalues.real > 0) & counted).sum(1).double() / counted.sum(1)
    positivity = eigenvalues.real.sum(1) / total
    scores = {"copying": copying, "positivity": positivity}
    return {name: values.masked_fill(undefined, torch.nan).numpy() for name, values in scores.items()}


def _above_rounding(
    eigenvalues: Complex128[Tensor, "heads d_head"],
    output: OutputFactors,
    products: Float64[Tensor, "heads d_head d_head"],
) -> Bool[Tensor, "heads d_head"]:
    """Return a mask [heads, d_head]: True for eigenvalues of W_O W_U W_E W_V (`products`) that are larger than
    rounding.

    An eigenvalue counts if it is among the r largest, r the smaller numerical rank of W_V and W_O, and exceeds the
    float64 rounding of the product's norm. `output` has the factors W_V and W_O.
    """
    d_head, d_model = output.w_o.shape[1:]
    tolerance = rank_tolerance(output.storage_dtype, d_model, d_head)
    spectra = [torch.linalg.svdvals(factor) for factor in (output.w_v, output.w_o)]
    of_values, of_outputs = ((values > tolerance * values[:, :1]).sum(1) for values in spectra)
    rank = torch.minimum(of_values.repeat_interleave(len(of_outputs) // len(of_values)), of_outputs)
    size = eigenvalues.abs()
    largest = torch.linalg.matrix_norm(products, ord=2)
    place = size.argsort(dim=1, descending=True).argsort(dim=1)
    return (place < rank[:, None]) & (size > rank_tolerance(torch.float64, d_model, d_head) * largest[:, None])


def unembedding_times_embedding(view: AttentionView) -> Float64[Tensor, "d_model d_model"] | None:
    """Return W_U W_E [d_model, d_model] of the model in `view`, in float64 and as a new tensor.

    The final norm's gain is folded into W_U, and the mean of W_U over the vocabulary is removed. None for an encoder,
    and where input and output vocabularies differ: no token can be copied there.
    """
    if not view.causal or view.unembedding()[0].shape[1] != len(view.embedding()):
        return None
    pieces = zip(folded_unembedding(view), vocabulary_chunks(view.embedding(), axis=0), strict=True)
    products = (unembedding @ embedding.to(unembedding.device) for unembedding, embedding in pieces)
    return sum(products, torch.zeros((), dtype=torch.float64)).cpu()


def folded_unembedding(view: AttentionView) -> Iterator[Float64[Tensor, "d_model chunk"]]:
    """Yield W_U of the model in `view`, [d_model, chunk] in chunks of the vocabulary, with the final norm's gain folded
    in and the mean over the vocabulary removed.

    That mean adds the same number to all logits, so it changes no probability unless the logits have a softcap. Under
    LayerNorm each token's vector is also centred. The chunks are new tensors in float64.
    """
    w_u, norm = view.unembedding()
    total = torch.zeros((), dtype=torch.float64)
    mean = sum((chunk.sum(1, keepdim=True) for chunk in vocabulary_chunks(w_u, axis=1)), total) / w_u.shape[1]
    gain = torch.ones_like(mean) if norm.gain is None else in_float64(norm.gain.detach())[:, None].to(mean.device)
    for chunk in vocabulary_chunks(w_u, axis=1):
        folded = gain * (chunk - mean)
        yield folded - folded.mean(0) if norm.kind == "LN" else folded


class EmbeddingMoments:
    """The Gram matrix W_E^T W_E and the sum over tokens of the token embedding W_E of the model in `view`, from one
    pass over the vocabulary.

    With them the cost of `self_match` does not grow with the vocabulary.
    """

    def __init__(self, view: AttentionView):
        gram = total = torch.zeros((), dtype=torch.float64)
        for chunk in vocabulary_chunks(view.embedding(), axis=0):
            gram, total = gram + chunk.T @ chunk, total + chunk.sum(0)
        self.gram, self.total, self.count = gram.cpu(), total.cpu(), view.d_vocab

    def self_match(
        self, w_q: Float64[Tensor, "heads d_model d_head"], w_k: Float64[Tensor, "kv_heads d_model d_head"]
    ) -> Float64[np.ndarray, "heads"]:
        """Return the self-match of each head, an array [heads]: how much higher equal tokens score than different
        tokens.

        With the scores W_E M W_E^T of all pairs of tokens, M = W_Q W_K^T, it is (mean diagonal - mean off-diagonal) /
        rms. `w_q` and `w_k` have the norms folded in; `w_k` has each shared key once. W_E is the raw embedding, without
        positions or MLPs, so layer 0 is read best. NaN for M = 0. Source: "Fingerprint, Not Blueprint" (FP), section 3.
        """
        size = float(self.count)
        repeats = len(w_q) // len(w_k)
        queries, keys = self.gram @ w_q, (self.gram @ w_k).repeat_interleave(repeats, dim=0)
        w_k = w_k.repeat_interleave(repeats, dim=0)
        diagonal = (w_q * keys).sum((1, 2))
        everything = ((self.total @ w_q) * (self.total @ w_k)).sum(-1)
        square = ((w_q.mT @ queries) * (w_k.mT @ keys)).sum((1, 2))
        off_diagonal = (everything - diagonal) / (size * size - size)
        return ((diagonal / size - off_diagonal) / (square / size**2).sqrt()).numpy()
