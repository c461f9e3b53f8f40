"""`embedding_change`: a task for sentence encoders, which measures how far the embedding of a text moves."""

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
    """Metric of a `Task`: 1 - cosine between the embedding of each prompt and its stored embedding, from 0 to 2.

    The embedding of a prompt is the mean over its tokens of the residual stream after the last layer.
    """

    before: Float64[Tensor, "prompts d_model"]
    """Embedding of each prompt in the run that is compared with."""

    def __call__(
        self,
        stream: Float[Tensor, "prompts pos d_model"],
        tokens: Int[Tensor, "prompts pos"],
        mask: Bool[Tensor, "prompts pos"],
    ) -> Float64[Tensor, "prompts"]:
        """Return 1 - cosine, from 0 to 2, between the embedding of each prompt and its stored embedding.

        `stream`: residual stream after the last layer at the prompts' tokens, whose mean is the embedding. `tokens` and
        `mask` are not used.
        """
        now = in_float64(stream).mean(1)
        return 1 - torch.nn.functional.cosine_similarity(now, self.before.to(now.device), dim=-1)

    def of_prompts(self, rows: list[int]) -> EmbeddingChange:
        """Return a new metric with the stored embeddings of the prompts whose numbers are in `rows`."""
        return EmbeddingChange(self.before[rows])


def embedding_change(model: Any, prompts: Any) -> Task:
    """Make a task that measures how far an ablation moves the embedding of each prompt: 1 - cosine, from 0 to 2.

    Use it to ablate heads of a sentence encoder, which has no logits:

        model = tls.load_model("minilm-l6")
        task = tls.tasks.embedding_change(model, ["A cat sat down.", "The cat sat up."])
        tls.ablation_sweep(model, "antisymmetric", task=task, control="random")

    The embedding of a prompt is the mean over its tokens of the residual stream after the last layer, as
    sentence-transformers does for `minilm-l6`. Each embedding is compared with the model's embedding during this call
    of `embedding_change`, including hooks on the model.

    Args:
        model: a bridge of an encoder without a head: `load_model("minilm-l6")`, or a BERT or RoBERTa that was saved
            without its head for masked tokens.
        prompts: strings; token ids [sequences, pos]; or a tokenizer's batch with `input_ids` and `attention_mask`. All
            have equally many tokens.

    Returns:
        A `Task` for `tls.evaluate` and `tls.ablation_sweep`. Its metric is the change of each prompt, without unit: 0
            if nothing changes; lower is better.

    Raises:
        UnsupportedArchitecture: the model returns logits, or prompts differ in length.
        ValueError, TypeError: prompts that cannot be read.

    Not established: that the model understands a text differently; a head can move all embeddings alike. A change is
    never negative, so `delta_p` of a sweep is small as soon as anything changes: compare with a control.
    """
    with measured(model) as view:
        if hasattr(view.model, "unembed"):
            raise UnsupportedArchitecture(
                f"{view.source['model']} returns logits, and embedding_change needs an encoder without a head, such as "
                "load_model('minilm-l6'): for this model give tls.logit_difference(...) or a tls.Task"
            )
        packed = packed_prompts(view, prompts)
        with torch.no_grad():
            at_once = max(1, min(_ROWS_AT_ONCE, rows_of_scores(view, packed.tokens.shape[1])))
            streams = (logits_at(view, rows, slice(None)) for rows in packed.tokens.split(at_once))
            before = torch.cat([in_float64(stream).mean(1) for stream in streams])
        return Task(packed.tokens, EmbeddingChange(before), higher_is_better=False, name="embedding change")
