"""What a model in training has learned of the random-map task: losses, and the best head of each kind."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tlspectral.studies.common.model import Attended, AttentionOnlyTransformer
from tlspectral.studies.common.random_map import RandomMapBatch


@torch.no_grad()
def evaluate(model: AttentionOnlyTransformer, batch: RandomMapBatch) -> dict[str, float]:
    """Losses in nats per token and attention masses on sequences of the task (FP section 10).

    Returns:
        `loss`: cross-entropy over all targets. `loss_predictable`: over the predictable ones; a model that knows the
        task but not the noise has about -log(1 - noise). `prev_best`: attention to the previous token, of the head
        where it is largest. `ind_best`: attention to all keys that follow an earlier copy of the current token, of the
        head where it is largest. Both are means over the queries from a quarter of the sequence on, by when most tokens
        have occurred; a query whose token is new counts as 0 in `ind_best`.

    What it does not establish: that one and the same head does it on other sequences; see `tlspectral.detect_heads`.
    """
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
    # The key must lie before the query: at it, the copy would be its previous token, and the key the query itself.
    return (after & torch.ones_like(same[0]).tril(-1)).to(torch.float32)
