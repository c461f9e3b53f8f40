"""Arguments of an edge: which targets it can have, and which heads it reaches besides."""

import warnings
from dataclasses import dataclass
from typing import Any, get_args

from tlspectral.models.attention import attention_view
from tlspectral.models.attention.selection import heads_by_layer
from tlspectral.models.attention.writes import Input
from tlspectral.selection import Heads, head_name

INPUTS: tuple[Input, ...] = get_args(Input)
_NAMES = {"q": "queries", "k": "keys", "v": "values"}


def check_edge(into: Heads | None, input: str | None) -> None:
    """Raise a ValueError where the arguments of an edge do not go together."""
    if (into is None) != (input is None):
        given, missing = ("into", "input") if input is None else ("input", "into")
        raise ValueError(
            f"{given} needs {missing}: an edge ends in the queries, keys or values (input='q', 'k' or 'v') of target "
            "heads (into=)"
        )
    if input is not None and input not in INPUTS:
        raise ValueError(f"input must be 'q', 'k' or 'v' (queries, keys or values), not {input!r}")


def refuse_order(sources: dict[int, list[int]], targets: dict[int, list[int]]) -> None:
    """Raise a ValueError for a target that reads before a source writes."""
    if not sources or not targets:
        return
    last, first = max(sources), min(targets)
    if last >= first:
        source, target = head_name(last, sources[last][0]), head_name(first, targets[first][0])
        raise ValueError(
            f"{target} reads before {source} writes: into= takes heads of later layers than all of `heads`; heads of "
            "one layer read the same residual stream"
        )


def warn_of_other_heads(model: Any, into: Heads, input: Input) -> None:
    """Warn by name of heads that an edge reaches though they are no targets."""
    reach = heads_reached(model, into, input)
    others = [head for head in reach.heads if head not in reach.targets]
    if others:
        warnings.warn(
            f"the {_NAMES[input]} of {', '.join(reach.targets)} cannot be edited alone: the edit also reaches "
            f"{', '.join(others)} (heads of a group share keys and values, and a query/key norm over all heads ties "
            "those of a layer), so an effect is that of all of them; name them all in into= where that is meant",
            stacklevel=3,
        )


@dataclass(frozen=True)
class EdgeReach:
    """The heads that an edit of `ablate(..., into=...)` reaches.

    Attributes:
        input: what is edited, "q", "k" or "v".
        targets: the heads that were asked for, by name.
        heads: all heads whose queries, keys or values change, by name: the groups of the targets, and every head of a
            layer whose query/key norm runs over all heads (OLMo 2).
    """

    input: Input
    targets: tuple[str, ...]
    heads: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_NAMES[self.input]} of {', '.join(self.heads)}"


def heads_reached(model: Any, into: Heads, input: Input) -> EdgeReach:
    """Return which heads `ablate(..., into=into, input=input)` edits.

    Args:
        model: a TransformerBridge or HookedTransformer.
        into, input: as of `ablate`.

    Raises:
        BadHead: a head that does not exist.
        ValueError: as `ablate`, for these arguments.

    Example:
        >>> import tlspectral as tls
        >>> from tlspectral.hooks import heads_reached
        >>> model = tls.load_model("tiny-rope")
        >>> print(heads_reached(model, "L1H0", "q"))
        queries of L1H0
    """
    check_edge(into, input)
    view = attention_view(model)
    targets: list[tuple[int, int]] = []
    reached: list[tuple[int, int]] = []
    for layer, chosen in heads_by_layer(view, into).items():
        raw = view.raw(layer)
        n_heads, size = len(raw.w_q), len(raw.w_q) // len(raw.w_k)
        norm = {"q": raw.q_norm, "k": raw.k_norm, "v": None}[input]
        if norm is not None and norm.over_heads:
            changed = list(range(n_heads))
        elif input == "q":
            changed = chosen
        else:
            changed = [head for head in range(n_heads) if head // size in {target // size for target in chosen}]
        targets += [(layer, head) for head in chosen]
        reached += [(layer, head) for head in changed]
    of_targets, of_reached = (tuple(head_name(*pair) for pair in pairs) for pairs in (targets, reached))
    return EdgeReach(input, of_targets, of_reached)
