"""`Part`, the base class of all parts: which quantity of a head is removed, and where in a run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.algebra.nulls import haar_frame
from tlspectral.algebra.rotary import RotaryGeometry
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.parts.removal import Removal, returned_scores, root_mean_square
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import position_of, positions_by_place
from tlspectral.models.running.given import numbers
from tlspectral.user_functions import call_users


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """Base class of objects that act at one token position per sequence, `at`, or at all positions (`at=None`)."""

    at: Any = None

    def __post_init__(self) -> None:
        if self.at is not None and not isinstance(self.at, str):
            at = numbers(self.at) if isinstance(self.at, Tensor) else positions_by_place(self.at, "at")
            object.__setattr__(self, "at", at)

    def placed(self, at: Any) -> Any:
        """Return a copy that acts at the positions `at` (a number, a name, or one number per prompt) instead."""
        # `copy`, not `replace`, because a user's class may be a plain class.
        moved = copy(self)
        object.__setattr__(moved, "at", at)
        Placed.__post_init__(moved)
        return moved

    def of_rows(self, rows: slice) -> Any:
        """Return the object for a batch with some of the task's sequences.

        `rows` are the numbers of these sequences, as a slice. With one position per prompt, it is a copy with the
        positions of the batch; otherwise the object itself.
        """
        return self.placed(self.at[rows]) if isinstance(self.at, Tensor) else self

    def acts(self, rows: int, n_positions: int) -> Bool[Tensor, "rows pos"] | None:
        """Return a mask, True at the token positions where it acts in a run of `rows` prompts; None for everywhere.

        `n_positions` is the length of the run in tokens. Raises ValueError for a position behind the end of the run, or
        if `at` has positions for another number of prompts.
        """
        if self.at is None:
            return None
        at = torch.as_tensor(self.at).reshape(-1)
        if len(at) not in (1, rows):
            raise ValueError(
                f"at= has positions of {len(at)} prompts, and this run has {rows}: run all prompts in one batch, or "
                "use ablation_sweep, which runs them in batches"
            )
        if int(at.max()) >= n_positions:
            raise ValueError(
                f"at={int(at.max())} is not a position of this run: give a position from 0 to {n_positions - 1}"
            )
        return (at[:, None] == torch.arange(n_positions)).expand(rows, -1)


@dataclass(frozen=True, eq=False, repr=False)
class Part(Placed):
    """Base class of all parts of a head. Subclass it for a part of your own.

    >>> import tlspectral as tls
    >>> class Half(tls.parts.Part):
    ...     name = "half"
    ...     acts_on = "z"
    ...
    ...     def of(self, z, heads, run):
    ...         return z / 2
    >>> model = tls.load_model("tiny-rope")
    >>> with tls.ablate(model, "L0H3", Half(), into={"k": "L1"}):
    ...     round(tls.tasks.induction_loss(model, n_sequences=20).value, 1)
    0.4

    A part of your own has a `name`, the place where it acts (`acts_on`) and the one method of this place:

    | `acts_on` | method | returns |
    |---|---|---|
    | `"scores"` | `of(scores, pairs)` | the part of the scaled scores that is removed, [batch, heads, pos, pos] |
    | `"mask"` | `beyond(visible, own)` | True where a head no longer sees a key, of the shape of `visible` |
    | `"z"` | `of(z, heads, run)` | the replacement for z, the heads' output before W_O, [batch, pos, heads, d_head] |

    Attributes:
        at: token position at which the part is removed: the position where the head writes, so for scores the position
            of the query. None (default): everywhere. A name of the task's positions, such as "S2"; a number for all
            prompts; or a list of numbers, one per prompt. Negative numbers count from the end of the prompt.
        name: name of the part in tables and folders.
        acts_on: "scores" (before the softmax), "mask" (which keys are seen) or "z".
        rotary: True if only layers with rotary positions have this part.
        needs_tokens: True if the part is for certain prompts. A run that starts behind the embedding is then refused.
        by_strip: True if the method also works for some consecutive queries of a long prompt, with keys up to the last
            one. Otherwise the model's own attention over the whole prompt runs.

    A part is given to `tls.ablate` or `tls.ablation_sweep`, which raise TypeError or ValueError if the name or the
    method is missing, or if the method returns another shape.

    More: docs/write_your_own.md, with an example of each kind.
    """

    name: ClassVar[str]
    acts_on: ClassVar[Literal["scores", "mask", "z"]] = "scores"
    rotary: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = False
    by_strip: ClassVar[bool] = False

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
        at = shown.pop("at")
        shown |= {} if at is None else {"at": at}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    # --- for tables and messages ---

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dict of the part's settings by name, without defaults, for the `attrs` of tables; here empty."""
        return {}

    @property
    def noted(self) -> Mapping[str, Any]:
        """Dict of more `attrs` of a sweep, by name, known only after `fixed`; here empty."""
        return {}

    def in_words(self, whose: str = "") -> str:
        """Return the part in words for messages, such as "rope_phase of L0H1 taken out (at -1)".

        `whose` names the heads, such as " of L0H1".
        """
        done, settings = self._done()
        shown = [f"{name} {value}" for name, value in settings.items()]
        shown += [] if self.at is None else [f"at {self.at if isinstance(self.at, int | str) else 'given positions'}"]
        return f"{self.name}{whose} {done}" + (f" ({', '.join(shown)})" if shown else "")

    def _done(self) -> tuple[str, Mapping[str, Any]]:
        """Return "taken out" or "replaced", and a dict of the settings to show, for the text of `in_words`."""
        return "replaced" if self.acts_on == "z" else "taken out", self.settings

    # --- settled for prompts, and bound to heads ---

    def fixed(self, view: AttentionView, prompts: Any) -> Part:
        """Return the part, or a copy, for one model and its prompts, with `at` as numbers and complete `settings`.

        `view` is the model, `prompts` are the tokenized prompts of a task. A measurement calls this once, before it
        divides its work. Raises ValueError for a position that a prompt does not have.
        """
        settled = self._settled(view, prompts)
        return settled if self.at is None else settled.placed(position_of(prompts, self.at))

    def _settled(self, view: AttentionView, prompts: Any) -> Part:
        """Return a copy that knows the tokenized prompts it is used on, without changing `at`; here the part itself.

        `view` is the model, `prompts` are the tokenized prompts of a task.
        """
        return self

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> Mapping[int, Part]:
        """Return a dict from layer to the part that acts there on the heads in `by_layer`; here the part itself.

        `view` is the model, `by_layer` a dict from layer to heads. Layers where nothing is removed may be left out.
        Raises UnsupportedArchitecture if the part needs rotary positions and a layer has none.
        """
        for layer in by_layer if self.rotary else ():
            if view.rotary(layer) is None:
                raise UnsupportedArchitecture(
                    f"layer {layer}: no rotary positions, so there is no {self.name} to remove: choose heads of other "
                    "layers, or another part"
                )
        return dict.fromkeys(by_layer, self)

    def require_own(self, view: AttentionView, passed: Tensor) -> None:
        """Raise ValueError if a run has other prompts than this part is for; here nothing is checked.

        `view` is the model. `passed` is the activation at `AttentionView.tokens_point`, which identifies the tokens of
        the run.
        """

    def idle(self, tokens: Int[Tensor, "sequences pos"]) -> Bool[Tensor, "sequences"]:
        """Return a mask, True for prompts in which this part is known to change nothing; here False for all.

        `tokens` are the token ids of the prompts.
        """
        return torch.zeros(len(tokens), dtype=torch.bool)

    # --- a part of the scores ---

    def change(
        self, scores: HeadScores, allowed: Bool[Tensor, "*batch query key"]
    ) -> tuple[Float[Tensor, "batch heads q k"], Bool[Tensor, "*batch q k"]]:
        """Return the change of the scaled scores before a softcap, and a mask of the pairs of tokens that may change.

        The change is minus the result of `of`, which gets copies of the scores. `allowed` is True for pairs of query
        and key that the model does not mask. Raises ValueError unless `of` returns a finite score for each pair.
        """
        copied, formula = scores.copied(), cast("Any", self)
        given = {"scores": copied, "pairs": self.chosen_pairs(copied)}
        what = f"{type(self).__name__}.of() of the part {self.name!r}"
        removed = call_users(formula.of, given, what, f"a tensor of shape {tuple(scores.shape)}")
        return -returned_scores(removed, scores, allowed, what), allowed

    def chosen_pairs(self, scores: HeadScores) -> Bool[Tensor, "*of_heads pairs"] | None:
        """Return the mask of rotary pairs that `of` gets as `pairs`; None for all pairs. Here None.

        `scores` are the heads' scores in the run, whose layer has the pairs.
        """
        return None

    # --- the control of a sweep ---

    @property
    def beside_heads(self) -> bool:
        """True if the control of a sweep is the same part of other heads of the layer (parts of the mask and of z)."""
        return self.acts_on != "scores" or not callable(self.control)

    @property
    def screened(self) -> bool:
        """True if `ablation_sweep(screen="gradient")` can estimate the effect of this part; here True."""
        return True

    def draws_of(self, wanted: int) -> int:
        """Return the number of random controls per head if a sweep wants `wanted`; here `wanted` itself.

        A subclass returns fewer if no more controls differ.
        """
        return wanted

    def control(
        self, removal: Removal, which: list[int], seeds: list[list[int]]
    ) -> Float[Tensor, "batch drawn query key"]:
        """Return random changes of the scaled scores, one for each random control ("draw"), for a part of the scores.

        Each change is q O k^T: q and k are queries and keys without bias before rotation, O is a random orthogonal
        matrix. It is scaled to the RMS that the part has in the same sequence. Parts of the mask or of z do not use
        this method: their control is the same part of other heads of the layer. A class for scores gets that control
        with `control = "heads"`.

        Args:
            removal: the change that the part itself makes to some heads in this run.
            which: for each draw, the index of its head on the second axis of `removal.difference`.
            seeds: for each draw, the seed of its random matrix, as a list of numbers.
        """
        assert removal.scores is not None
        assert removal.allowed is not None
        width = removal.scores.query.content.shape[-1]
        frames = torch.stack([haar_frame(width, width, seed) for seed in seeds])
        allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, which]
        drawn = self.drawn(removal.scores, which, frames)
        own_rms, drawn_rms = (root_mean_square(scores, allowed) for scores in (removal.difference[:, which], drawn))
        return drawn * (own_rms / drawn_rms.clamp_min(torch.finfo(drawn_rms.dtype).tiny))[..., None, None]

    def drawn(
        self, scores: HeadScores, which: list[int], frames: Float[Tensor, "drawn d d"]
    ) -> Float[Tensor, "batch drawn query key"]:
        """Return q O k^T for each random control, as scaled scores that are not yet scaled to the RMS of the part.

        q and k are queries and keys in `scores`, without bias before rotation. `which` are indices of heads in `scores`
        and `frames` the random orthogonal matrices O, one for each control.
        """
        query, key = scores.query.content[:, which], scores.key.content[:, which]
        return query @ frames.to(query) @ key.mT

    def control_pairs(
        self, geometry: RotaryGeometry | None, heads: list[int]
    ) -> tuple[Bool[Tensor, "heads pairs"], list[int]] | None:
        """Return None: random controls come from the method `control`. `Band` overrides this method.

        There it returns a mask of the rotary pairs of each of the `heads`, for which a sweep draws random sets of pairs
        with the same RMS, and a list of numbers that are added to the seeds of these sets. `geometry` has the rotary
        pairs of the layer; None without rotary positions.
        """
        return None
