"""Retrieval: heads that find one of several facts far back in a text, and write what it says."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import folded_weight
from tlspectral.models.text import packaged_words

FACTS = 8
PROMPTS = 24
FAR, LEAST_FAR = 96, 24
BATCH = 8


@dataclass(frozen=True)
class PlantedFacts:
    """Prompts that state some facts, go on with other text, and begin to state one of them again.

    Attributes:
        tokens: the prompts; the answer is what follows the last token.
        at: position of what each fact says.
        says: its token.
        asked: which of the facts is asked for, drawn at random.
        words: whether they are English; else they are random ids.
    """

    tokens: Int[Tensor, "prompts pos"]
    at: Int[Tensor, "prompts facts"]
    says: Int[Tensor, "prompts facts"]
    asked: Int[Tensor, "prompts"]
    words: bool

    @property
    def answer(self) -> Int[Tensor, "prompts"]:
        """Token that answers each prompt."""
        return self.says.gather(1, self.asked[:, None])[:, 0]


def planted_facts(view: AttentionView, text: str | None, n_prompts: int, *, seed: int) -> PlantedFacts | None:
    """Return prompts " Mary likes blue. (text) John likes red. (text) ... (96 tokens of text) Mary likes".

    All facts share the verb, so that what follows its last occurrence is no answer. Names, colours and the fact that is
    asked for are drawn anew for each prompt; pieces of text are drawn from `text`. Without a text, or where fewer than
    `FACTS` names or colours are single tokens, name, verb and colour are random ids, and without a text so are the
    pieces.

    Returns None where the context has no room, or the vocabulary not enough ids.
    """
    rng = np.random.default_rng(seed)
    room = view.n_ctx - 3 - 4 * FACTS
    gap = 8 if room - 8 * FACTS >= FAR else 2
    far = min(FAR, room - gap * FACTS)
    if far < LEAST_FAR or view.d_vocab < 3 * FACTS:
        return None
    filling, names, colours, verb, stop = None, [], [], [], []
    if text is not None:
        tokenizer: Any = view.model.tokenizer
        filling = np.array(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        names, colours = _single(tokenizer, packaged_words("names")), _single(tokenizer, packaged_words("colours"))
        verb, stop = _single(tokenizer, ["likes"]), _single(tokenizer, ["."])
    words = min(len(names), len(colours)) >= FACTS and len(verb) == len(stop) == 1
    rows, at, says, asked = [], [], [], []
    for _ in range(n_prompts):
        if words:
            name, colour = rng.permutation(names)[:FACTS], rng.permutation(colours)[:FACTS]
            likes, end, others = verb[0], stop[0], None
        else:
            drawn = rng.permutation(np.setdiff1d(np.arange(view.d_vocab), [view.start_token, *view.special_tokens]))
            name, colour = drawn[:FACTS], drawn[FACTS : 2 * FACTS]
            likes, end, others = drawn[2 * FACTS], drawn[2 * FACTS + 1], drawn[2 * FACTS + 2 :]
        row, places = [view.start_token], []
        for fact in range(FACTS):
            row += [name[fact], likes, colour[fact], end]
            places.append(len(row) - 2)
            row += _piece(rng, filling, others, gap)
        question = int(rng.integers(FACTS))
        row += [*_piece(rng, filling, others, far), name[question], likes]
        rows.append([int(token) for token in row])
        at.append(places)
        says.append(colour.tolist())
        asked.append(question)
    return PlantedFacts(torch.tensor(rows), torch.tensor(at), torch.tensor(says), torch.tensor(asked), words)


def _single(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """Return the ids of words, with a space before them, that are one token."""
    forms = [tokenizer(word if word == "." else f" {word}", add_special_tokens=False).input_ids for word in words]
    return list(dict.fromkeys(int(ids[0]) for ids in forms if len(ids) == 1))


def _piece(rng: np.random.Generator, filling: Any, others: Any, length: int) -> list[int]:
    if filling is None:
        return rng.choice(others, length).tolist()
    start = int(rng.integers(max(1, len(filling) - length)))
    return np.resize(filling[start : start + length], length).tolist()


@torch.no_grad()
def retrieved(view: AttentionView, facts: PlantedFacts) -> Float64[np.ndarray, "prompts facts heads"]:
    """Return attention of the last token to what each fact says, 0 but for the fact that the head writes.

    A head writes a fact if, of all that the facts say, what it adds directly to the residual stream at the last token
    raises that token's logit most. Biases of values and norms behind the attention are left out.
    """
    w_u, norm = view.unembedding()
    names = [view.hook_names(layer) for layer in range(view.n_layers)]
    batches = []
    for start in range(0, len(facts.tokens), BATCH):
        rows = slice(start, start + BATCH)
        held: dict[str, Tensor] = {}
        by_layer: dict[int, Tensor] = {}
        says = w_u.detach()[:, facts.says[rows].to(w_u.device)].cpu().double()  # [d_model, rows, facts]
        toward = folded_weight(says.transpose(0, 1), norm)
        score = partial(_written, view, held, by_layer, facts.at[rows], toward)
        hooks = []
        for index, name in enumerate(names):
            hooks += [(name["residual"], partial(_hold, held)), (name["pattern"], partial(score, index))]
        view.run(facts.tokens[rows], hooks, last=names[-1]["pattern"])
        batches.append(torch.cat([by_layer[layer] for layer in range(view.n_layers)], dim=2))
    return torch.cat(batches).numpy()


def _hold(held: dict[str, Tensor], residual: Tensor, hook: Any) -> None:
    held["residual"] = residual.detach()


def _written(
    view: AttentionView,
    held: dict[str, Tensor],
    by_layer: dict[int, Tensor],
    at: Int[Tensor, "rows facts"],
    toward: Float64[Tensor, "rows d_model facts"],
    index: int,
    pattern: Tensor,
    hook: Any,
) -> None:
    output, raw = view.output(index), view.raw(index)
    n = raw.norm.normalized(held["residual"].cpu().double())
    attention = pattern[:, :, -1].detach().cpu().double()  # [rows, heads, key]
    values = output.w_v.repeat_interleave(len(output.w_o) // len(output.w_v), dim=0)
    z = torch.einsum("bhd,hdk->bhk", attention @ n, values)
    logits = torch.einsum("bhk,hkd,bdf->bfh", z, output.w_o, toward)
    written = torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).transpose(1, 2)  # [rows, facts, heads]
    to_facts = attention.gather(2, at[:, None].expand(-1, attention.shape[1], -1)).transpose(1, 2)
    by_layer[index] = to_facts * written


def permuted_targets(
    scores: Float64[np.ndarray, "prompts facts heads"], *, draws: int, seed: int
) -> Float64[np.ndarray, "draws heads"]:
    """Return means over prompts with a fact of each prompt drawn in place of the one that is asked for."""
    rng = np.random.default_rng(seed)
    n_prompts, n_facts, _ = scores.shape
    rows = np.arange(n_prompts)
    return np.stack([scores[rows, rng.integers(n_facts, size=n_prompts)].mean(0) for _ in range(draws)])
