"""`Task`: the prompts that a model is run on and the metric that scores it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from tlspectral.tasks.metrics import LogitDifference

Metric = Callable[..., Tensor] | LogitDifference
Predict = None | int | slice | Sequence[int] | Tensor | Callable[[int], slice]


@dataclass(frozen=True, eq=False)
class Task:
    """Prompts and a metric: what `evaluate`, `ablation_sweep` and every other function that scores a model takes.

        first = model.to_single_token(" Mary")
        second = model.to_single_token(" John")
        task = tls.Task(prompts, lambda logits, tokens, mask: logits[:, -1, first] - logits[:, -1, second], predict=-1)

    Prompts of unequal length are moved to the left and filled at the end; a causal model does not see the filling, and
    it is not scored. Ready tasks are in `tls.tasks`: `induction`, `language`, `logit_difference`.

    Attributes:
        prompts: strings (tokenised as by `model.to_tokens`, BOS included where the model has one); token ids
            [sequences, pos]; a list of one-dimensional tensors or lists of ids, of unequal length; or a tokenizer's
            batch with `input_ids` and `attention_mask`, padded on either side.
        metric: function of `logits` [sequences, predicted, d_vocab] in float32 or wider, `tokens` [sequences, pos] and
            `mask` [sequences, pos] (True for real tokens), all of them on the model's device, that returns a score per
            sequence, [sequences]. It gets all prompts at once, in their order.
        predict: positions whose logits the metric needs; the others are never computed. A position, negative from the
            end of each prompt (-1: its last real token); a list of them; a slice; a tensor [sequences, predicted];
            None: all. Where a prompt is shorter than that, its last real token is taken.
        attention: a query and a key position per sequence, [sequences, 2], for attention measured on the prompts;
            negative from the end of each prompt.
        labels: a DataFrame with a row per sequence, such as the condition it belongs to.
        higher_is_better: whether a higher score is better, None if that is not to be said. It decides what harm is.
        name: name in tables.

    What it does not establish: that a score measures the ability it is named after.
    """

    prompts: Any
    metric: Metric
    _: KW_ONLY
    predict: Predict = None
    attention: Any = None
    labels: pd.DataFrame | None = None
    higher_is_better: bool | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.metric) and not isinstance(self.metric, LogitDifference):
            raise TypeError(
                "metric is a function of logits, tokens and mask that returns a score per sequence; found "
                f"{self.metric!r}"
            )
        if self.labels is not None and not isinstance(self.labels, pd.DataFrame):
            raise TypeError(f"labels are a DataFrame with a row per sequence; found {type(self.labels).__name__}")

    @property
    def label(self) -> str:
        """Name in tables: `name`, or that of the metric."""
        return self.name or getattr(self.metric, "__name__", type(self.metric).__name__)

    def __repr__(self) -> str:
        prompts = self.prompts["input_ids"] if isinstance(self.prompts, Mapping) else self.prompts
        size = f"{len(prompts)} prompts" if hasattr(prompts, "__len__") else repr(prompts)
        return f"Task({self.label}, {size})"
