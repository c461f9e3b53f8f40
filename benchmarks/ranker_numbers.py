"""The numbers of a head that `benchmarks/head_rankers.py` ranks by: the larger the number, the earlier the head.

From weights: D_head and dir_frac (abs(z) against the null) and `k_composition`, the largest score with any later
head's keys, or as keys' reader. From weights and text: D_head and dir_frac weighted by data (M between S = Cov^1/2 of
the layer's normed inputs), participation ratio of what the head writes (2605.24059), matrix entropy of rotated
queries plus that of rotated keys (DoPE, 2511.09146), concentration (TriAttention: lengths of mean query and key, over
mean lengths), and attention mass beyond the first token. From random repeats: `prev`, `ind`, and how often the
largest weight is on the token that comes next (retrieval score). From the task: the gradient estimate of zeroing the
head. From needle prompts: what a head writes from the needle toward the answer, less what it writes from all other
tokens (LOCOS, 2607.01002), and its score of the needle less the mean score of all keys (QR, after 2506.09944).
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import tlspectral as tls
from tlspectral.algebra.nulls import one_thread
from tlspectral.algebra.rotary import rotate
from tlspectral.hooks.sweeps.screen import gradient_screen
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.text import text_tokens
from tlspectral.tasks.repeated import repeated_sequences
from tlspectral.tasks.task_sequences import task_sequences

TEXT_ROWS, TEXT_LENGTH, SKIPPED = 16, 128, 8  # the skipped rows hold the text that the truth is measured on
REPEATS, SEGMENT, DRAWS, BATCH = 16, 32, 20, 4
NEEDLES, LISTED = 12, 9  # needle prompts, and blocks in each
OF_NEEDLES = ["LOCOS", "QR"]
HEAD = ["layer", "head"]


def numbers_of_heads(view: AttentionView, spectra: pd.DataFrame) -> pd.DataFrame:
    """Return every number that needs no task; `spectra` is a head table of the model with its null and detectors."""
    own = spectra[[*HEAD, "name"]].assign(
        **{
            "D_head": spectra["D_head_z"].abs(),
            "dir_frac": spectra["dir_frac_z"].abs(),
            "previous token": spectra["prev"],
            "induction": spectra["ind"],
            "random": np.random.default_rng(0).random(len(spectra)),
        }
    )
    repeats = repeated_sequences(view, n_sequences=REPEATS, segment_length=SEGMENT)
    text = repeats
    if view.model.tokenizer is not None:
        text = text_tokens(view, None, n_sequences=TEXT_ROWS + SKIPPED, sequence_length=TEXT_LENGTH)[SKIPPED:]
    seen = _captured(view, text, ("residual", "query", "key", "z", "pattern"))
    copies = _captured(view, repeats, ("pattern",))
    with torch.no_grad():
        rows = [_of_layer(view, layer, seen[layer], copies[layer]["pattern"]) for layer in view.layers]
    table = own.merge(pd.concat(rows, ignore_index=True), on=HEAD)
    return table.merge(_composition(view), on=HEAD)


def gradient_estimates(view: AttentionView, task: tls.Task) -> pd.DataFrame:
    """Return the size of the first-order estimate of zeroing each head."""
    sequences = task_sequences(view, task)
    part = tls.parts.Output("zero").fixed(view, sequences)
    table = gradient_screen(view, sequences, {layer: list(range(view.n_heads(layer))) for layer in view.layers}, part)
    return table[HEAD].assign(estimate=table["estimate"].abs())


def needle_numbers(view: AttentionView) -> pd.DataFrame:
    """Return LOCOS and QR of each head, means over needle prompts; the other answer is that of the next prompt.

    A score has a free constant in each row, which no softmax sees: QR is the distance from the row's mean.
    """
    draws = [tls.positional.NeedleTask(LISTED).draw(seed=seed) for seed in range(NEEDLES)]
    words = [draw.questions[0].answer for draw in draws]
    tables = []
    for draw, word, other in zip(draws, words, words[1:] + words[:1], strict=True):
        tokens = view.model.to_tokens(draw.prefix + "".join(draw.blocks) + draw.questions[0].suffix)
        needle = tokens[0] == view.model.to_tokens(word, prepend_bos=False)[0, 0]
        written = tls.ov_attribution(view.model, tokens, None, -1, direction=(word, other))
        signed = np.where(needle.numpy()[written["position"]], 1.0, -1.0) * written["contribution"]
        table = signed.groupby([written["layer"], written["head"]]).sum().rename("LOCOS").reset_index()
        seen = _captured(view, tokens, ("scores",))
        rows = torch.stack([seen[layer]["scores"][0, :, -1].double() for layer in view.layers])
        tables.append(table.assign(QR=(rows[..., needle].mean(-1) - rows.mean(-1)).flatten().numpy()))
    return pd.concat(tables).groupby(HEAD, as_index=False)[OF_NEEDLES].mean()


def _captured(view: AttentionView, tokens: Tensor, points: tuple[str, ...]) -> dict[int, dict[str, Tensor]]:
    """Return what passes some hook points of each layer, of all sequences."""
    kept: dict[tuple[int, str], list[Tensor]] = {(layer, point): [] for layer in view.layers for point in points}

    def hold(at: tuple[int, str]) -> Callable[..., None]:
        return lambda activation, hook: kept[at].append(activation.detach())

    hooks = [(view.hook_names(layer)[point], hold((layer, point))) for layer, point in kept]
    with torch.no_grad():
        for batch in tokens.split(BATCH):
            view.model.run_with_hooks(batch, fwd_hooks=hooks)
    return {layer: {point: torch.cat(kept[layer, point]) for point in points} for layer in view.layers}


def _of_layer(view: AttentionView, index: int, seen: dict[str, Tensor], copies: Tensor) -> pd.DataFrame:
    """Return the numbers of one layer's heads that its activations give."""
    layer, raw = view.layer(index), view.raw(index)
    groups = layer.n_heads // layer.n_kv_heads
    query, key = (layer.normed(what, seen[what]).transpose(1, 2).double() for what in ("query", "key"))
    if key.shape[1] != layer.n_heads:
        key = key.repeat_interleave(groups, dim=1)
    weighted = _weighted_spectra(layer, raw.norm.normalized(seen["residual"].double())[:, 1:].flatten(0, 1), index)
    length = (copies.shape[-1] - 1) // 2
    queries = torch.arange(length + 1, 2 * length)  # of the copy; their next token has been seen
    right = copies[:, :, queries].argmax(-1) == queries - length + 1
    return pd.DataFrame(
        {
            "layer": index,
            "head": range(layer.n_heads),
            **weighted,
            "participation ratio": _participation(seen["z"], raw.w_o),
            "matrix entropy": _entropy(layer, query) + _entropy(layer, key),
            "concentration": _concentration(layer, query, key),
            "attention mass": 1 - seen["pattern"][:, :, 1:, 0].double().mean((0, 2)),
            "retrieval score": right.double().mean((0, 2)),
        }
    )


def _weighted_spectra(layer: AttentionLayer, inputs: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the distance of the data-weighted D_head and dir_frac from their null, in its standard deviations.

    The operator is S M S with S = Cov^1/2 of the normed inputs; its non-zero eigenvalues are those of W_K^T Cov W_Q.
    In a draw the left singular vectors of W_Q are a Haar frame, and Cov stays.
    """
    covariance = torch.cov(inputs.mT)
    w_q, w_k = layer.operator_factors()
    left, values, right = torch.linalg.svd(w_q, full_matrices=False)
    spread = torch.randn(DRAWS, *left.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if layer.norm.kind == "LN":
        spread = spread - spread.mean(1, keepdim=True)
    frames, triangle = torch.linalg.qr(spread)
    frames = frames * triangle.diagonal(dim1=1, dim2=2).sign()[:, None]
    inner = frames.mT @ covariance @ frames
    found: dict[str, list[float]] = {"weighted D_head": [], "weighted dir_frac": []}
    with one_thread():
        for head in range(layer.n_heads):
            scaled = values[head][:, None] * right[head]
            read = w_k[head].mT @ covariance
            key_square = read @ w_k[head]
            own = _spectrum(read @ w_q[head], w_q[head].mT @ covariance @ w_q[head], key_square)
            draws = [
                _spectrum(read @ frame @ scaled, scaled.mT @ square @ scaled, key_square)
                for frame, square in zip(frames, inner, strict=True)
            ]
            for name, value, null in zip(found, own, np.array(draws).T, strict=True):
                found[name].append(float(abs(value - null.mean()) / null.std(ddof=1)))
    return {name: torch.tensor(values) for name, values in found.items()}


def _spectrum(core: Tensor, query_square: Tensor, key_square: Tensor) -> tuple[float, float]:
    """Return D_head and dir_frac of A B^T, given B^T A, A^T A and B^T B."""
    eigenvalues = torch.linalg.eigvals(core)
    aligned = (core * core.mT).sum() / (query_square * key_square.mT).sum()
    return float(eigenvalues.imag.abs().sum() / eigenvalues.abs().sum()), float(((1 - aligned) / 2).clamp(min=0).sqrt())


def _participation(z: Tensor, w_o: Tensor) -> Tensor:
    """Return (sum l)^2 / sum l^2 over the eigenvalues of the covariance of what each head writes."""
    ratios = []
    for head, weight in enumerate(w_o.double()):
        triangle = torch.linalg.qr(weight.mT, mode="r").R
        covariance = triangle @ torch.cov(z[:, 1:, head].double().flatten(0, 1).mT) @ triangle.mT
        ratios.append(covariance.trace() ** 2 / covariance.square().sum())
    return torch.stack(ratios)


def _entropy(layer: AttentionLayer, side: Tensor) -> Tensor:
    """Return the entropy of the spectrum of rotated queries or keys, [batch, heads, pos, d_head], by head."""
    if layer.rotary is not None:
        cos, sin = layer.rotary.position_tables(side.shape[2])
        side = rotate(side, cos, sin, layer.rotary)
    rows = side[:, :, 1:].transpose(0, 1).flatten(1, 2)
    shares = torch.linalg.eigvalsh(rows.mT @ rows).clamp(min=1e-300)
    shares = shares / shares.sum(-1, keepdim=True)
    return -(shares * shares.log()).sum(-1)


def _concentration(layer: AttentionLayer, query: Tensor, key: Tensor) -> Tensor:
    """Return the product of the lengths of mean query and mean key over the mean lengths, summed over pairs."""
    half = query.shape[-1] // 2
    real, imag = torch.arange(half), torch.arange(half, 2 * half)
    if layer.rotary is not None:
        real, imag = layer.rotary.real_index, layer.rotary.imag_index
    sides = [torch.complex(side[:, :, 1:, real], side[:, :, 1:, imag]) for side in (query, key)]
    of_means = [side.mean((0, 2)).abs() for side in sides]
    means = [side.abs().mean((0, 2)) for side in sides]
    return (of_means[0] * of_means[1]).sum(-1) / (means[0] * means[1]).sum(-1)


def _composition(view: AttentionView) -> pd.DataFrame:
    """Return each head's largest K-composition, with what it feeds or what feeds it."""
    pairs = tls.k_composition(view.model)
    receiving = pairs[["receiver_layer", "receiver_head", "score"]].set_axis([*HEAD, "score"], axis=1)
    largest = pd.concat([pairs[[*HEAD, "score"]], receiving]).groupby(HEAD, as_index=False)["score"].max()
    return largest.rename(columns={"score": "k_composition"})
