"""`LongRange`: the attention of a head to far keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.hooks.parts.part import Part
from tlspectral.models.reading.view import AttentionView, require_causal


@checked_settings
@dataclass(frozen=True, eq=False, repr=False)
class LongRange(Part):
    """Remove attention to far keys: query i sees key j only if i - j < window or j < sinks.

    Use it in `tls.ablate` or `tls.ablation_sweep` to test whether a head needs keys far away.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> with tls.ablate(model, "L0H3", tls.parts.LongRange(window=8)):
    ...     pass
    >>> tls.parts.LongRange(window=8, sinks=1)
    LongRange(window=8, sinks=1)

    The softmax runs over the keys that are left. The control of a sweep is the same part of other heads of the layer.

    Attributes:
        window: how many of the last keys a head still sees; its own token counts as one.
        sinks: how many first tokens it still sees. Default: 0. They are counted after padding, and separately in each
            document if the mask keeps the documents of a row apart.
        at: position of the queries that lose far keys. Default: None, all positions.

    Raises:
        ValueError: window or sinks is not a whole number, window is below 1, or sinks is below 0.
        UnsupportedArchitecture: the model is an encoder, whose queries also see later keys.
    """

    name = "long_range"
    acts_on = "mask"
    by_strip = True
    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        window, sinks = whole_number(self.window), whole_number(self.sinks)
        if window is None or window < 1:
            raise ValueError(
                f"window must be a whole number of keys, 1 (the token itself) or more; found {shown(self.window)}"
            )
        if sinks is None or sinks < 0:
            raise ValueError(f"sinks must be a whole number of first tokens, 0 or more; found {shown(self.sinks)}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dict with `window` and `sinks` of this part, for the attrs of tables."""
        return {"window": self.window, "sinks": self.sinks}

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, LongRange]:
        """Return a dict from each layer in `by_layer` (layer to heads) to this part itself.

        `view` is the model. Raises UnsupportedArchitecture for an encoder.
        """
        require_causal(view, "long range counts the keys before a query")
        return dict.fromkeys(by_layer, self)

    def beyond(
        self, visible: Bool[Tensor, "*rows query key"], own: Bool[Tensor, "query key"]
    ) -> Bool[Tensor, "*rows query key"]:
        """Return a mask of the shape of `visible`: True where the head no longer sees the key (last axis).

        `visible` is True where a query sees a key in this run, `own` where the layer would show it without padding.
        """
        return self.beyond_in_strip(visible, own, 0, None)[0]

    def beyond_in_strip(
        self, visible: Bool[Tensor, "*rows queries keys"], own: Bool[Tensor, "queries keys"], first: int, before: Any
    ) -> tuple[Bool[Tensor, "*rows queries keys"], Any]:
        """Return the mask of `beyond` for some queries of a prompt and the keys up to the last query.

        `first` is the first of these queries. `before` is what this method returned second for the queries before them;
        None for the first queries. The second value tells which tokens are real, and which begin a document.
        """
        # A document of a packed row begins where a token does not see the real token in front of it, although the layer
        # itself would show that token. Sinks are counted from there.
        at = torch.arange(visible.shape[-1], device=visible.device)
        real = visible.diagonal(first, dim1=-2, dim2=-1)  # a token sees itself, and padding does not
        real = real if before is None else torch.cat([before[0], real], dim=-1)
        earlier = torch.where(real, at, -1).cummax(-1).values.roll(1, -1)
        earlier[..., 0] = -1
        earlier = earlier[..., first:]
        last = earlier.clamp_min(0)
        row = at[: len(own)].expand_as(last)
        hidden = own.to(at.device)[row, last] & ~visible.gather(-1, last[..., None])[..., 0]
        begins = real[..., first:] & ((earlier < 0) | hidden)
        begins = begins if before is None else torch.cat([before[1], begins], dim=-1)
        place = real.cumsum(-1)
        begun = torch.where(begins, place, 0).cummax(-1).values
        far = at[first:, None] - at >= self.window
        return visible & far & (place - begun >= self.sinks)[..., None, :], (real, begins)
