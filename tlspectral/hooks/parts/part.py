"""What a part of a head is: a value that says what is taken away, and where in a run it acts."""

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """Acts at one position per sequence, `at`; None means everywhere."""

    at: Any = None

    def __post_init__(self) -> None:
        if self.at is not None and not isinstance(self.at, str):
            at = numbers(self.at) if isinstance(self.at, Tensor) else positions_by_place(self.at, "at")
            object.__setattr__(self, "at", at)

    def placed(self, at: Any) -> Any:
        """Return a copy that acts at other positions. A class of your own need not be a dataclass."""
        moved = copy(self)
        object.__setattr__(moved, "at", at)
        Placed.__post_init__(moved)
        return moved

    def of_rows(self, rows: slice) -> Any:
        """Return the same for a run of some of the sequences that it is settled for."""
        return self.placed(self.at[rows]) if isinstance(self.at, Tensor) else self

    def acts(self, rows: int, n_positions: int) -> Bool[Tensor, "rows pos"] | None:
        """Return where it acts in a run; None for everywhere.

        Raises ValueError for positions that the run does not have, or of another number of prompts.
        """
        if self.at is None:
            return None
        at = torch.as_tensor(self.at).reshape(-1)
        if len(at) not in (1, rows):
            raise ValueError(
                f"at has positions of {len(at)} prompts, and this run has {rows}: run all of them at once, or use "
                "ablation_sweep, which runs them in batches"
            )
        if int(at.max()) >= n_positions:
            raise ValueError(f"at={int(at.max())} is no position of this run, which has 0 to {n_positions - 1}")
        return (at[:, None] == torch.arange(n_positions)).expand(rows, -1)


@dataclass(frozen=True, eq=False, repr=False)
class Part(Placed):
    """Take something of a head away: the base of every part, and of a part of your own.

    A part of your own has a `name`, says by `acts_on` where it acts, and has the one function of that place:

    | `acts_on` | function | returns |
    |---|---|---|
    | `"scores"` | `of(scores, pairs)` | what is taken from the scaled scores, [batch, heads, pos, pos] |
    | `"mask"` | `beyond(visible, own)` | the pairs of query and key that a head no longer sees, as `visible` |
    | `"z"` | `of(z, heads, run)` | what stands in place of z, [batch, pos, heads, d_head] |

    z is what a head hands to its output map. docs/write_your_own.md has one of each.

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

    Attributes:
        at: where it is taken away: None for everywhere; a name of the task's positions, such as `"S2"`; or a position
            for all prompts or one for each, counted from its first token, negative from its end. It is the position of
            what a head writes: of a part of the scores, the position of the query.
        name: name of the part in tables and folders.
        acts_on: what of a head's attention it changes: scores before the softmax; the mask, so that keys are not seen;
            or z.
        rotary: whether it is made of rotary pairs, so that layers without them have no such part.
        needs_tokens: whether it belongs to prompts of its own, so that a run has to show its tokens.
    """

    name: ClassVar[str]
    acts_on: ClassVar[Literal["scores", "mask", "z"]] = "scores"
    rotary: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = False

    def __repr__(self) -> str:
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        at = shown.pop("at")
        shown |= {} if at is None else {"at": at}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    # --- what tables and messages say of it ---

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings for `attrs` and the manifest, without those at their default."""
        return {}

    @property
    def noted(self) -> Mapping[str, Any]:
        """What `attrs` of a sweep have besides, of a settled part."""
        return {}

    def in_words(self, whose: str = "") -> str:
        """Return what is taken out or replaced, and with which settings."""
        done, settings = self._done()
        shown = [f"{name} {value}" for name, value in settings.items()]
        shown += [] if self.at is None else [f"at {self.at if isinstance(self.at, int | str) else 'given positions'}"]
        return f"{self.name}{whose} {done}" + (f" ({', '.join(shown)})" if shown else "")

    def _done(self) -> tuple[str, Mapping[str, Any]]:
        return "replaced" if self.acts_on == "z" else "taken out", self.settings

    # --- settled for prompts, and bound to heads ---

    def fixed(self, view: AttentionView, prompts: Any) -> Part:
        """Return the part with all that depends on the model and on the packed prompts of a run settled.

        A measurement that shares out its work settles a part once; its `settings` are then complete. Raises ValueError
        for a position that a prompt does not have.
        """
        settled = self._settled(view, prompts)
        return settled if self.at is None else settled.placed(position_of(prompts, self.at))

    def _settled(self, view: AttentionView, prompts: Any) -> Part:
        """Return the part with all but its position settled."""
        return self

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> Mapping[int, Part]:
        """Bind the part to heads by layer: return a part for each layer, which acts on the same; here itself.

        Layers on which it removes nothing are left out. Raises UnsupportedArchitecture for a part of rotary pairs on a
        layer without them.
        """
        for layer in by_layer if self.rotary else ():
            if view.rotary(layer) is None:
                raise UnsupportedArchitecture(
                    f"layer {layer}: no rotary positions, so there is no {self.name} to remove"
                )
        return dict.fromkeys(by_layer, self)

    def require_own(self, view: AttentionView, passed: Tensor) -> None:
        """Refuse a run of other prompts than the part's, by what passes `AttentionView.tokens_point`. ValueError."""

    def idle(self, tokens: Int[Tensor, "sequences pos"]) -> Bool[Tensor, "sequences"]:
        """Return on which prompts of a run a settled part is known to change nothing."""
        return torch.zeros(len(tokens), dtype=torch.bool)

    # --- a part of the scores ---

    def change(
        self, scores: HeadScores, allowed: Bool[Tensor, "*batch pos pos"]
    ) -> tuple[Float[Tensor, "batch heads pos pos"], Bool[Tensor, "*batch pos pos"]]:
        """Return what is added to the scaled scores, before a softcap, and the pairs of tokens that it is meant for.

        `of` gets copies. Raises ValueError unless it returns a score for each pair of tokens, see `returned_scores`.
        """
        given, formula = scores.copied(), cast("Any", self)
        found = formula.of(given, self.chosen_pairs(given))
        return -returned_scores(found, scores, allowed, f"of() of the part {self.name!r}"), allowed

    def chosen_pairs(self, scores: HeadScores) -> Bool[Tensor, "*of_heads pairs"] | None:
        """Return the rotary pairs that `of` is asked for, as a mask; None for all."""
        return None

    # --- what a sweep compares it with ---

    @property
    def beside_heads(self) -> bool:
        """Whether the control is the same part of other heads of the layer: of the mask and of z."""
        return self.acts_on != "scores" or not callable(self.control)

    @property
    def screened(self) -> bool:
        """Whether one backward pass gives a first-order estimate of its effect."""
        return True

    def draws_of(self, wanted: int) -> int:
        """Return how many draws a control of so many has; `control` may have fewer that differ."""
        return wanted

    def control(
        self, removal: Removal, which: list[int], seeds: list[list[int]]
    ) -> Float[Tensor, "batch drawn pos pos"]:
        """Return random scores that a sweep removes in place of this part, for each draw.

        They are `q O k^T`, with bias-free queries and keys before rotation and one random orthogonal O per draw, scaled
        to the RMS of the part over the pairs of tokens of each sequence. A sweep does not call this for a part of the
        mask or of z: their control is the same part of other heads of the layer. Write `control = "heads"` in your own
        class to have that control for a part of the scores.

        Args:
            removal: the part as it is removed from heads in this run.
            which: for each draw, the index of its head among the heads of `removal`.
            seeds: for each draw, the seed of its random matrix.
        """
        assert removal.scores is not None
        assert removal.allowed is not None
        width = removal.scores.query.content.shape[-1]
        frames = torch.stack([haar_frame(width, width, one) for one in seeds])
        allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, which]
        drawn = self.drawn(removal.scores, which, frames)
        own_rms, drawn_rms = (root_mean_square(scores, allowed) for scores in (removal.difference[:, which], drawn))
        return drawn * (own_rms / drawn_rms.clamp_min(torch.finfo(drawn_rms.dtype).tiny))[..., None, None]

    def drawn(
        self, scores: HeadScores, which: list[int], frames: Float[Tensor, "drawn d d"]
    ) -> Float[Tensor, "batch drawn pos pos"]:
        """Return random scores of some heads, of any size. `frames` are random orthogonal matrices, one for each."""
        query, key = scores.query.content[:, which], scores.key.content[:, which]
        return query @ frames.to(query) @ key.mT

    def control_pairs(
        self, geometry: RotaryGeometry | None, heads: list[int]
    ) -> tuple[Bool[Tensor, "heads pairs"], list[int]] | None:
        """Return the rotary pairs of each head for which random sets of equal RMS stand in, and what seeds add.

        None for a part whose control is not drawn in this way, but by `control`.
        """
        return None
