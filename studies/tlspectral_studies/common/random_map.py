"""The random-map task: every sequence follows a map of its own, which can only be learned from the sequence itself.

Also measures of a model on the task: losses, and the attention of the best head of each kind.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tlspectral_studies.common.gradient_steps import to_device_of
from tlspectral_studies.common.model import Attended, AttentionOnlyTransformer


class RandomMapBatch(NamedTuple):
    """Sequences of the task, and which of their targets can be predicted.

    Attributes:
        tokens: ids, [batch, pos].
        predictable: [batch, pos - 1]; entry t is about the target at t + 1. True where that target is a step of the
            map (not noise) and the current token stood in the sequence before.
        noise: of the same shape; True where that target was drawn as noise.
    """

    tokens: Int64[Tensor, "batch pos"]
    predictable: Bool[Tensor, "batch targets"]
    noise: Bool[Tensor, "batch targets"]


@dataclass(frozen=True)
class RandomMapTask:
    """`x_{t+1} = f(x_t)`, f a fresh random map of the vocabulary in each sequence; now and then a uniform token.

    A previous-token head and an induction head solve it together: where did the current token stand before, and what
    came after it? This is the task of the constrained training in "Fingerprint, Not Blueprint" (FP section 10).

    Attributes:
        vocabulary: number of tokens.
        length: tokens of a sequence.
        noise: probability of a uniform token in place of the map's. It can happen to be the map's token.
    """

    vocabulary: int = 32
    length: int = 128
    noise: float = 0.1

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 2 or not 0.0 <= self.noise <= 1.0:
            raise ValueError(
                "the random-map task needs two tokens in the vocabulary, two in a sequence and a probability of noise,"
                f" found vocabulary={self.vocabulary}, length={self.length}, noise={self.noise}"
            )

    def sample(self, n_sequences: int, generator: torch.Generator) -> RandomMapBatch:
        """Draw sequences on the CPU: the maps, then the first tokens, the positions of noise, the noise tokens."""
        n_steps = self.length - 1
        maps = torch.randint(0, self.vocabulary, (n_sequences, self.vocabulary), generator=generator)
        first = torch.randint(0, self.vocabulary, (n_sequences,), generator=generator)
        is_noise = torch.rand(n_sequences, n_steps, generator=generator) < self.noise
        noise = torch.randint(0, self.vocabulary, (n_sequences, n_steps), generator=generator)
        tokens = torch.empty(n_sequences, self.length, dtype=torch.int64)
        tokens[:, 0] = first
        rows = torch.arange(n_sequences)
        met = torch.zeros(n_sequences, self.vocabulary, dtype=torch.bool)  # tokens before the current one
        met_before = torch.empty(n_sequences, n_steps, dtype=torch.bool)
        for t in range(n_steps):
            current = tokens[:, t]
            met_before[:, t] = met[rows, current]
            met[rows, current] = True
            tokens[:, t + 1] = torch.where(is_noise[:, t], noise[:, t], maps[rows, current])
        return RandomMapBatch(tokens, met_before & ~is_noise, is_noise)


@torch.no_grad()
def evaluate(model: AttentionOnlyTransformer, batch: RandomMapBatch) -> dict[str, float]:
    """Losses in nats per token and attention masses on sequences of the task (FP section 10).

    Returns:
        The columns of `train.history` but for step and penalty. Masses are means over the queries from a quarter of the
        sequence on, by when most tokens have occurred; a query whose token is new counts as 0 in `ind_best`.

    What it does not establish: that one and the same head does it on other sequences; see `tlspectral.detect_heads`.
    """
    batch = RandomMapBatch(*to_device_of(model, *batch))
    logits, layers = model.with_attention(batch.tokens)
    losses = token_losses(logits, batch.tokens)
    return {
        "loss": losses.mean().item(),
        "loss_predictable": losses[batch.predictable].mean().item(),
        "prev_best": previous_token_attention(layers).max().item(),
        "ind_best": induction_attention(layers, batch.tokens).max().item(),
    }


def previous_token_attention(layers: list[Attended]) -> Float[Tensor, "layers heads"]:
    """Attention to the previous token, mean over sequences and the queries from a quarter of the sequence on."""
    first = layers[0].pattern.shape[-1] // 4
    # Entry i of the diagonal is query i + 1, key i.
    return torch.stack(
        [layer.pattern.diagonal(-1, dim1=-2, dim2=-1)[..., first - 1 :].mean((0, -1)) for layer in layers]
    )


def induction_attention(layers: list[Attended], tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "layers heads"]:
    """Attention to all keys that follow an earlier copy of the query's token, mean over the same queries."""
    first = tokens.shape[1] // 4
    follows = follows_a_copy(tokens)[:, None]  # batch 1 query key
    return torch.stack([(layer.pattern * follows).sum(-1)[..., first:].mean((0, -1)) for layer in layers])


def token_losses(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int64[Tensor, "batch pos"]
) -> Float[Tensor, "batch targets"]:
    """Cross-entropy of every target, [batch, pos - 1], in nats."""
    log_probabilities = logits[:, :-1].log_softmax(-1)
    return -log_probabilities.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def follows_a_copy(tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "batch pos pos"]:
    """1 where a key comes right after an earlier copy of the query's token, [batch, query, key], else 0."""
    same = tokens[:, :, None] == tokens[:, None, :]  # batch query key
    after = torch.zeros_like(same)
    after[:, :, 1:] = same[:, :, :-1]
    # The key must lie before the query: the query as its own key would count where its previous token is a copy.
    return (after & torch.ones_like(same[0]).tril(-1)).to(torch.float32)
