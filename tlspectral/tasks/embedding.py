"""`embedding_change`: how far the embedding of a text moves, the metric of an encoder that embeds sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import measured
from tlspectral.models.running.batches import rows_of_scores
from tlspectral.models.running.partial_runs import logits_at
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.tasks.task import Task

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class EmbeddingChange:
    """1 - cosine of the embedding of each prompt and the embedding of the same prompt in a run before, in [0, 2].

    An embedding is the mean of the last layer's residual stream over the tokens of a prompt.
    """

    before: Float64[Tensor, "prompts d_model"]

    def __call__(
        self,
        stream: Float[Tensor, "prompts pos d_model"],
        tokens: Int[Tensor, "prompts pos"],
        mask: Bool[Tensor, "prompts pos"],
    ) -> Float64[Tensor, "prompts"]:
        """Return the change of each prompt."""
        now = in_float64(stream).mean(1)
        return 1 - torch.nn.functional.cosine_similarity(now, self.before.to(now.device), dim=-1)

    def of_prompts(self, rows: list[int]) -> EmbeddingChange:
        """Return the metric of some of the prompts."""
        return EmbeddingChange(self.before[rows])


def embedding_change(model: Any, prompts: Any) -> Task:
    """Make the task: how far each prompt's mean embedding moves from its embedding now: 1 - cosine, in [0, 2].

    An embedding is the mean over all tokens of the residual stream behind the last layer, as sentence-transformers
    pools `minilm-l6`. Hooks that are on the model during this call act in the embeddings that are compared with.

        task = tls.tasks.embedding_change(model, tokens)
        tls.ablation_sweep(model, "antisymmetric", task=task, control="random")

    Args:
        model: a bridge of an encoder without a head: `load_model("minilm-l6")`, or another BERT or RoBERTa that was
            saved without its head for masked tokens.
        prompts: in a form that `Task` takes, all of one length.

    Raises:
        UnsupportedArchitecture: a model that returns logits; prompts of unequal length.
        ValueError, TypeError: prompts that cannot be read.

    What it does not establish: that a text means another thing to the model; a head can move all embeddings alike. A
    change is never negative, so that `delta_p` of a sweep, which compares signs, is small wherever anything changes:
    compare with a control.
    """
    with measured(model) as view:
        if hasattr(view.model, "unembed"):
            raise UnsupportedArchitecture(
                f"{view.source['model']} returns logits: the change of an embedding is that of an encoder without a "
                "head"
            )
        packed = packed_prompts(view, prompts)
        with torch.no_grad():
            at_once = max(1, min(_ROWS_AT_ONCE, rows_of_scores(view, packed.tokens.shape[1])))
            streams = (logits_at(view, rows, slice(None)) for rows in packed.tokens.split(at_once))
            before = torch.cat([in_float64(stream).mean(1) for stream in streams])
        return Task(packed.tokens, EmbeddingChange(before), higher_is_better=False, name="embedding change")
