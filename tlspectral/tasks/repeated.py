"""Random repeated sequences `[BOS, r, r]`, which are also prompts of a ready task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.errors import earlier_calls
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.prompts import packed_rows, refuse_padding
from tlspectral.selection import counted
from tlspectral.tables.detector_columns import DETECTORS

SMALL_VOCABULARY = 64


@earlier_calls("n_sequences", "segment_length")
def repeated_sequences(
    view: AttentionView, *, n_sequences: int = 200, segment_length: int = 64, seed: int = 0
) -> Int[Tensor, "sequences pos"]:
    """Return sequences `[BOS, r, r]` of random ids, [n_sequences, 1 + 2 L].

    BOS is the tokenizer's BOS, else its EOS, else 0. Under a vocabulary of 64 a segment is a permutation of ids other
    than BOS instead of a draw: a token that occurred twice in a segment would have two induction targets. Raises
    ValueError for fewer than two sequences, or no room for a segment of two tokens.
    """
    bos = view.start_token
    n_sequences = counted(n_sequences, 2, "n_sequences is how many repeated sequences are drawn")
    segment_length = counted(segment_length, 2, "segment_length is how many tokens are repeated")
    length = min(segment_length, (view.n_ctx - 1) // 2)
    allowed = torch.arange(view.d_vocab)
    generator = torch.Generator().manual_seed(seed)
    if view.d_vocab < SMALL_VOCABULARY:
        allowed = allowed[allowed != bos]
        length = min(length, len(allowed))
    if length < 2:
        raise ValueError(
            f"repeated sequences need segments of two tokens, and the model (context {view.n_ctx}, {len(allowed)} "
            f"usable ids) has room for {length}"
        )
    if view.d_vocab < SMALL_VOCABULARY:
        drawn = [torch.randperm(len(allowed), generator=generator)[:length] for _ in range(n_sequences)]
        segment = allowed[torch.stack(drawn)]
    else:
        segment = allowed[torch.randint(0, len(allowed), (n_sequences, length), generator=generator)]
    return torch.cat([torch.full((n_sequences, 1), bos), segment, segment], dim=1)


def given_sequences(view: AttentionView, tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    """Return sequences `[BOS, r, r]` that a caller gives.

    Raises ValueError for sequences of another form, ids that the model does not have, or more tokens than its context.
    """
    if not len(tokens) or segment_length_of(tokens) is None:
        refuse_padding(view, tokens, "sequences [BOS, r, r] have none")
        raise ValueError(
            "tokens must be at least one sequence [BOS, r, r]: one token, then a segment of two or more tokens, then "
            f"the same segment again; found shape {tuple(tokens.shape)}"
        )
    return packed_rows(view, tokens)


@dataclass(frozen=True, eq=False)
class RepeatedSegments:
    """Repeated random segments `[BOS, r, r]`, drawn as by `detect_heads`, or given."""

    given: Tensor | None
    n_sequences: int
    segment_length: int
    seed: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the sequences. Raises ValueError as `induction_loss`."""
        tokens = self.given
        if tokens is None:
            tokens = repeated_sequences(
                view, n_sequences=self.n_sequences, segment_length=self.segment_length, seed=self.seed
            )
        return given_sequences(view, tokens)


def repeated_ids(prompts: Any) -> Int[Tensor, "sequences pos"] | None:
    """Return prompts as one tensor if they are token ids `[BOS, r, r]` in every row; None for all others."""
    try:
        tokens = torch.stack([torch.as_tensor(row) for row in prompts])
    except (TypeError, ValueError, RuntimeError):  # text, a tokenizer's batch, rows of unequal length
        return None
    ids = tokens.ndim == 2 and not tokens.is_floating_point()
    return tokens if ids and segment_length_of(tokens) is not None else None


def segment_length_of(tokens: Int[Tensor, "sequences pos"]) -> int | None:
    """Return L of sequences `[BOS, r, r]`, 1 + 2 L tokens each with L of two or more; None for others."""
    length = (tokens.shape[1] - 1) // 2
    if length < 2 or tokens.shape[1] != 1 + 2 * length:
        return None
    return length if torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :]) else None


def detector_pairs(name: str, length: int) -> tuple[list[int], list[int]]:
    """Return the queries of a detector, all of the second copy of L tokens, and the key that it scores for each."""
    queries = list(range(length + 1, 2 * length + 1))
    return queries, [DETECTORS[name].key(query, length) for query in queries]


def repeated_marks(length: int, causal: bool) -> dict[str, Bool[Tensor, "query key"]]:
    """Return the keys that queries are scored on, by score; in an encoder `next` too, and no key for some detectors."""
    wanted = {
        name: detector_pairs(name, length) if causal or one.in_encoders else ([], []) for name, one in DETECTORS.items()
    }
    wanted["prev_first"] = [*range(2, length + 1)], [*range(1, length)]
    if not causal:
        wanted["next"] = [*range(length + 1, 2 * length)], [*range(length + 2, 2 * length + 1)]
    marks = {name: torch.zeros(2 * length + 1, 2 * length + 1, dtype=torch.bool) for name in wanted}
    for name, (queries, keys) in wanted.items():
        marks[name][queries, keys] = True
    return marks
