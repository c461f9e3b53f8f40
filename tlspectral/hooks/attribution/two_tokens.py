"""The residual stream at two tokens of a run as a sum of what was written there, and the scores of a query."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import ScoreMismatch
from tlspectral.hooks.attribution.score_form import HeadForm
from tlspectral.models.attention.head_scores import Tables
from tlspectral.models.attention.run_scores import require_own_pattern, row_scores
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, noise_of, require_close
from tlspectral.models.hooking.hooks_on_model import holding
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.writes import WRITE_POINTS, checked_writes, mixed, require_equal_streams, z_of
from tlspectral.selection import head_name

_UNDIVIDED = "a score cannot be divided among sources"


@dataclass(frozen=True)
class TwoTokens:
    """What a run of one prompt says about one head at a query and a key.

    `written` is what each of the `sources` wrote before the head's layer, and `residual` what enters it. `captured` are
    whole activations of the head's layer, by hook point, and `pattern` is the query's attention.
    """

    sources: list[str]
    written: Float64[Tensor, "two sources d_model"]
    residual: Float64[Tensor, "two d_model"]
    captured: dict[str, Tensor]
    pattern: Float64[Tensor, "pos"]


@torch.no_grad()
def trace(
    view: AttentionView, tokens: Int[Tensor, "one pos"], layer: int, head: int, query: int, key: int
) -> TwoTokens:
    """Run one prompt and return what was written at two of its tokens before `layer`, in float64 on the CPU.

    Activations of earlier layers are kept at the two tokens alone. Raises as `qk_attribution`.
    """
    token_pair, kept, names = [query, key], {}, view.hook_names(layer)
    hooks: list[tuple[str, Callable[..., None]]] = []
    for earlier in range(layer):
        wanted = [name for point, name in view.hook_names(earlier).items() if point in WRITE_POINTS]
        hooks += [(name, partial(_keep, kept, name, token_pair)) for name in wanted if name in view.hook_points]
    hooks.append((names["residual"], partial(_keep, kept, names["residual"], token_pair)))
    whole = [names[point] for point in ("query", "key", "cos", "sin", "scores", "pattern") if point in names]
    hooks += holding(kept, whole)
    view.run(tokens, hooks, last=names["pattern"])
    residual = in_float64(kept[names["residual"]])[0].cpu()
    sources, written = _sources(view, tokens, layer, token_pair, kept)
    problem = f"layer {layer}: what enters it is not the sum of what earlier layers wrote"
    require_equal_streams(written.sum(1), residual, kept[names["residual"]].dtype, problem, _UNDIVIDED)
    captured = {name: kept[name] for name in whole if name in kept}
    pattern = captured[names["pattern"]][0, head, query].cpu().double()
    return TwoTokens(sources, written, residual, captured, pattern)


def _keep(kept: dict[str, Any], name: str, positions: list[int], activation: Tensor, hook: Any) -> None:
    kept[name] = activation[:, positions].detach()


def _sources(
    view: AttentionView, tokens: Tensor, layer: int, token_pair: list[int], kept: dict[str, Tensor]
) -> tuple[list[str], Float64[Tensor, "two sources d_model"]]:
    first = kept[view.hook_names(0)["residual"]]
    entered = in_float64(first)[0].cpu()
    names, written = ["embedding"], [entered]
    positions = view.position_embedding()
    if positions is not None:
        positions = in_float64(positions[token_pair].detach()).cpu()
        embedded = in_float64(view.embedding()[tokens[0, token_pair].to(view.device)].detach()).cpu()
        problem = "layer 0: what enters it is not the sum of the embedding and the learned positions"
        require_equal_streams(embedded + positions, entered, first.dtype, problem, _UNDIVIDED)
        names, written = ["embedding", "positions"], [entered - positions, positions]
    biases = torch.zeros_like(entered)
    for earlier in range(layer):
        points, writes = view.hook_names(earlier), checked_writes(view, earlier, kept, in_float64)
        if writes is not None:
            z = z_of(in_float64(kept[points["z"]]), writes.w_o)
            scale = writes.token_scale(z)
            heads = writes.of(z, scale)[:, 0].detach().cpu()
            names += [head_name(earlier, head) for head in range(len(heads))]
            written += list(heads)
            biases = biases + writes.of_biases(scale)[0].detach().cpu()
        if view.writes_more(earlier):
            names, written = [*names, f"L{earlier}MIX"], [*written, mixed(view, earlier, kept, in_float64)[0].cpu()]
        if points["mlp_out"] in kept:  # an attention-only layer has none
            names, written = [*names, f"L{earlier}MLP"], [*written, in_float64(kept[points["mlp_out"]])[0].cpu()]
    if bool(biases.any()):
        names, written = [*names, "attention biases"], [*written, biases]
    return names, torch.stack(written, dim=1)


@dataclass(frozen=True)
class QueryRow:
    """The scores of a query as the softmax reads them, and that of one key.

    `score` is that of the key before a softcap, `alibi` the bias in it, None without ALiBi. `stored` is the type of the
    layer's weights, and `largest` the largest |score| of the layer.
    """

    form: HeadForm
    layer: int
    key: int
    scores: Float64[Tensor, "pos"]
    unmasked: Bool[Tensor, "pos"]
    score: float
    alibi: float | None
    stored: torch.dtype
    largest: float

    @property
    def tolerance(self) -> float:
        """Largest difference allowed between the sum of the terms and the score."""
        absolute, relative = noise_of("term sum", self.stored)
        return absolute + relative * self._size

    @property
    def _size(self) -> float:
        return abs(self.score) if self.stored.itemsize >= 4 else self.largest

    def require_sum(self, total: float) -> None:
        """Refuse terms that do not sum to the score, or under a softcap to the capped one. Raises ScoreMismatch."""
        capped = float(self.form.capped(torch.tensor(total, dtype=torch.float64)))
        for found, own, what in ((total, self.score, ""), (capped, float(self.scores[self.key]), " capped")):
            require_close(
                torch.tensor(abs(found - own), dtype=torch.float64),
                torch.tensor(self._size, dtype=torch.float64),
                self.stored,
                "term sum",
                f"layer {self.layer}: the terms sum{what} to {found:.6g}, which differs from the model's own score",
                LOOK_FOR_HOOKS,
                ScoreMismatch,
            )

    def attention_without(self, change: Float64[Tensor, "rows"]) -> Float64[Tensor, "rows"]:
        """Return the attention to the key if its score, before a softcap, lost each of these amounts."""
        others = self.scores.masked_fill(~self.unmasked, -torch.inf)
        others = others[torch.arange(len(others)) != self.key].logsumexp(0)
        return torch.sigmoid(self.form.capped(self.score - change) - others)


def query_row(
    view: AttentionView, layer: int, traced: TwoTokens, form: HeadForm, tables: Tables | None, query: int, key: int
) -> QueryRow:
    """Return a query's own scores of a run: those that the model exposes, else those of its own queries and keys.

    Under ALiBi the bias of a key is `slope * position` and a constant of the row, which the softmax does not see: the
    constant is the mean difference, over the row, between the model's scores and the others. Raises ValueError for a
    masked key, and ScoreMismatch where the softmax of the scores is not the model's attention.
    """
    names, raw = view.hook_names(layer), view.raw(layer)
    q, k = (in_float64(traced.captured[names[point]]).cpu() for point in ("query", "key"))
    of_run = row_scores(raw, form.head, q, k, tables, torch.tensor([[query]])).whole()[0, 0, 0]
    if form.slope is not None:
        of_run = of_run + form.slope * torch.arange(len(of_run), dtype=of_run.dtype)
    if "scores" in names:
        exposed = traced.captured[names["scores"]]
        visible = view.unmasked(layer, exposed)
        largest = float(exposed.where(visible, 0.0).abs().max())
        scores = exposed[0, form.head, query].cpu().double()
        unmasked = visible[0, form.head, query].cpu() & (torch.arange(len(scores)) <= query)
    else:
        scores, unmasked = form.capped(of_run), view.seen_keys(layer, len(of_run))[query].cpu()
        largest = float(scores[unmasked].abs().max())
    if not bool(unmasked[key]):
        first = int(unmasked.nonzero()[0])
        raise ValueError(
            f"layer {layer} masks key {key} for query {query}: the query sees keys {first} to {query} (a window), so "
            "there is no score"
        )
    row = scores.masked_fill(~unmasked, -torch.inf)
    require_own_pattern(row, traced.pattern, raw.w_q.dtype, f"layer {layer}", largest=largest)
    score, alibi = float(scores[key] if form.layer.softcap is None else of_run[key]), None
    if form.slope is not None:
        alibi = float(form.slope * key + (scores - of_run)[unmasked].mean())
    return QueryRow(form, layer, key, scores, unmasked, score, alibi, raw.w_q.dtype, largest)
