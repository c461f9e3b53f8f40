"""Repeated random sequences `[BOS, r, r]`: prompts of the detectors and of the task `induction`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tlspectral.errors import earlier_calls, not_a
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens
from tlspectral.models.running.prompts import packed_rows, refuse_padding
from tlspectral.tables.detector_columns import DETECTORS

SMALL_VOCABULARY = 64  # under so many ids a segment is a permutation, so that no id occurs twice in it


@earlier_calls("n_sequences", "segment_length")
@checked_settings
def repeated_sequences(
    view: AttentionView, *, n_sequences: int = 200, segment_length: int = 64, seed: int = 0
) -> Int[Tensor, "sequences pos"]:
    """Return random sequences `[BOS, r, r]`: a start token, then a segment r of L random ids twice.

    Use them to see whether a head finds the first copy from the second.

    >>> import tlspectral as tls
    >>> view = tls.models.reading.attention_view(tls.load_model("tiny-rope"))
    >>> tls.tasks.repeated_sequences(view, n_sequences=2, segment_length=3).tolist()
    [[0, 19, 11, 20, 19, 11, 20], [0, 21, 14, 27, 21, 14, 27]]

    BOS is the tokenizer's BOS, otherwise its EOS, otherwise 0. With fewer than 64 ids in the vocabulary a segment is a
    permutation of ids other than BOS, because a token that occurs twice in r would have two induction targets.

    Args:
        view: `tls.models.reading.attention_view(model)`, not the model itself.
        n_sequences: number of sequences, two or more. Default: 200.
        segment_length: L, two or more. L is cut to the length that the context or a small vocabulary allows. Default:
            64.
        seed: seed of the draw. Default: 0.

    Returns:
        Tensor of token ids [n_sequences, 1 + 2 L].

    Raises:
        ValueError: fewer than two sequences, or no room for a segment of two tokens.
    """
    if not hasattr(view, "start_token"):
        raise TypeError(f"{not_a(view, 'a view')}: give tlspectral.models.reading.attention_view(model)")
    bos = view.start_token
    n_sequences = counted(n_sequences, 2, "n_sequences is the number of repeated sequences")
    segment_length = counted(segment_length, 2, "segment_length is the number of tokens that are repeated")
    length = min(segment_length, (view.n_ctx - 1) // 2)
    allowed = torch.arange(view.d_vocab)
    generator = torch.Generator().manual_seed(seed)
    if view.d_vocab < SMALL_VOCABULARY:
        allowed = allowed[allowed != bos]
        length = min(length, len(allowed))
    if length < 2:
        raise ValueError(
            f"repeated sequences need segments of two tokens or more, and this model has room for {length} (context "
            f"{view.n_ctx}, {len(allowed)} usable ids): use a model with a longer context, or another task"
        )
    if view.d_vocab < SMALL_VOCABULARY:
        drawn = [torch.randperm(len(allowed), generator=generator)[:length] for _ in range(n_sequences)]
        segment = allowed[torch.stack(drawn)]
    else:
        segment = allowed[torch.randint(0, len(allowed), (n_sequences, length), generator=generator)]
    return torch.cat([torch.full((n_sequences, 1), bos), segment, segment], dim=1)


def given_sequences(view: AttentionView, tokens: Int[Tensor, "sequences pos"]) -> PackedTokens:
    """Return the caller's sequences `[BOS, r, r]` (a start token, then a segment r twice) as a `PackedTokens` batch
    (ids and lengths) for the model behind `view`.

    Raises ValueError for sequences of another form, ids that the model does not have, or more tokens than its context.
    """
    if tokens.ndim != 2:
        raise ValueError(f"token ids of shape {tuple(tokens.shape)} are not sequences: give ids [sequences, pos]")
    if not len(tokens) or segment_length_of(tokens) is None:
        refuse_padding(view, tokens, "give sequences [BOS, r, r] without padding")
        raise ValueError(
            f"token ids of shape {tuple(tokens.shape)} are not repeated sequences: give at least one sequence [BOS, r, "
            "r], which is one token, then a segment of two or more tokens, then the same segment again"
        )
    return packed_rows(view, tokens)


@dataclass(frozen=True, eq=False)
class RepeatedSegments:
    """Prompts `[BOS, r, r]` (a start token, then a segment r twice) of the task "induction".

    Attributes:
        given: the caller's token ids [sequences, 1 + 2 L], or None to draw when a model reads the task.
        n_sequences: number of sequences to draw.
        segment_length: L, tokens in a segment to draw.
        seed: seed of the draw.
    """

    given: Tensor | None
    n_sequences: int
    segment_length: int
    seed: int

    def packed(self, view: AttentionView) -> PackedTokens:
        """Return the given or newly drawn sequences as a `PackedTokens` batch (ids and lengths) for the
        model behind `view`.

        Raises ValueError for given sequences of another form, or if no segment of two tokens fits the context.
        """
        tokens = self.given
        if tokens is None:
            tokens = repeated_sequences(
                view, n_sequences=self.n_sequences, segment_length=self.segment_length, seed=self.seed
            )
        return given_sequences(view, tokens)


def repeated_ids(prompts: Any) -> Int[Tensor, "sequences pos"] | None:
    """Return prompts as one tensor of ids [sequences, pos] if each is `[BOS, r, r]` (a token, then a segment r twice);
    otherwise None.
    """
    try:
        tokens = torch.stack([torch.as_tensor(row) for row in prompts])
    except (TypeError, ValueError, RuntimeError):  # text, a tokenizer's batch, rows of unequal length
        return None
    ids = tokens.ndim == 2 and not tokens.is_floating_point()
    return tokens if ids and segment_length_of(tokens) is not None else None


def segment_length_of(tokens: Int[Tensor, "sequences pos"]) -> int | None:
    """Return L if every row is `[BOS, r, r]`, a token and twice a segment r of L >= 2 tokens; otherwise None."""
    length = (tokens.shape[1] - 1) // 2
    if length < 2 or tokens.shape[1] != 1 + 2 * length:
        return None
    return length if torch.equal(tokens[:, 1 : 1 + length], tokens[:, 1 + length :]) else None


def detector_pairs(name: str, length: int) -> tuple[list[int], list[int]]:
    """Return two lists of positions for a detector: all queries of the second copy, and the key scored for each query.

    `name`: name of the detector, such as "induction". `length`: L, tokens in a copy.
    """
    queries = list(range(length + 1, 2 * length + 1))
    return queries, [DETECTORS[name].key(query, length) for query in queries]


def repeated_marks(length: int, causal: bool) -> dict[str, Bool[Tensor, "query key"]]:
    """Return a dict from the name of each detector score to a mask [1 + 2 L, 1 + 2 L] of the pairs that it averages.

    A mask is True at (query, key) pairs of a sequence `[BOS, r, r]`. `length`: L, tokens in r. `causal`: False for an
    encoder, which also has the score `next`, and empty masks for some detectors.
    """
    wanted = {
        name: detector_pairs(name, length) if causal or detector.in_encoders else ([], [])
        for name, detector in DETECTORS.items()
    }
    wanted["prev_first"] = [*range(2, length + 1)], [*range(1, length)]
    if not causal:
        wanted["next"] = [*range(length + 1, 2 * length)], [*range(length + 2, 2 * length + 1)]
    marks = {name: torch.zeros(2 * length + 1, 2 * length + 1, dtype=torch.bool) for name in wanted}
    for name, (queries, keys) in wanted.items():
        marks[name][queries, keys] = True
    return marks
