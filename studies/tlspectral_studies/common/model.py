"""A small attention-only transformer in plain torch, to be read from top to bottom and to be trained.

Parameters have the names and shapes of TransformerLens, and are made in its order, so that the same seed gives the
initial weights of a HookedTransformer. The architecture is one that TransformerLens' native model and HookedTransformer
both compute: LayerNorm with gain and bias in front of every layer and of the unembedding, biases on q, k, v and o. By
default there is no bias on the logits and rotary pairs are (0, 1), (2, 3), ... . HookedTransformer has the bias by
default and pairs columns t and t + d_head/2. That is the same model with the columns of W_Q, W_K and their biases in
another order, but training from the same seed gives other weights.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tlspectral.algebra.rotary import times_phase
from tlspectral.models.loading.packaged import bridge_from_weights


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and positions, named as TransformerLens names them.

    `positional_embedding_type` is `"rotary"` (RoPE on whole heads) or `"standard"` (learned absolute positions). With
    `rotary_adjacent_pairs` columns (0, 1), (2, 3), ... are rotated together, else t and t + d_head/2. With
    `unembed_bias` the logits have a trained bias, as HookedTransformer's have.
    """

    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    d_head: int = 16
    d_vocab: int = 32
    n_ctx: int = 128
    positional_embedding_type: str = "rotary"
    rotary_base: int = 10000
    eps: float = 1e-5
    rotary_adjacent_pairs: bool = True
    unembed_bias: bool = False

    def __post_init__(self) -> None:
        if self.positional_embedding_type not in ("rotary", "standard"):
            raise ValueError(
                f"positional_embedding_type={self.positional_embedding_type!r} is neither 'rotary' nor 'standard'"
            )
        if self.positional_embedding_type == "rotary" and self.d_head % 2:
            raise ValueError(f"rotary positions rotate pairs of columns, but d_head={self.d_head} is odd")


class Embed(nn.Module):
    """Token embedding."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(config.d_vocab, config.d_model))

    def forward(self, tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Look the tokens up."""
        return F.embedding(tokens, self.W_E)


class PosEmbed(nn.Module):
    """Learned absolute positions."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(config.n_ctx, config.d_model))

    def forward(self, n_positions: int) -> Float[Tensor, "pos d_model"]:
        """Vectors of the first positions."""
        return self.W_pos[:n_positions]


class LayerNorm(nn.Module):
    """LayerNorm with gain and bias."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.w = nn.Parameter(torch.ones(config.d_model))
        self.b = nn.Parameter(torch.zeros(config.d_model))
        self.eps = config.eps

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Normalise each position."""
        return F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)


class Attended(NamedTuple):
    """Scaled scores of a layer's heads, -inf on later keys, and their attention pattern."""

    scores: Float[Tensor, "batch heads query key"]
    pattern: Float[Tensor, "batch heads query key"]


class Attention(nn.Module):
    """Causal attention, every head written out."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        heads, d_model, d_head = config.n_heads, config.d_model, config.d_head
        self.W_Q = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(heads, d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        self.W_K = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(heads, d_model, d_head))
        self.b_K = nn.Parameter(torch.zeros(heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(heads, d_head))
        self.rotary = config.positional_embedding_type == "rotary"
        self.adjacent = config.rotary_adjacent_pairs
        future = torch.ones(config.n_ctx, config.n_ctx, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)
        if self.rotary:
            theta = 1.0 / config.rotary_base ** (torch.arange(0, d_head, 2).float() / d_head)  # radians per token
            angle = torch.outer(torch.arange(config.n_ctx).float(), theta)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Output of the layer, which is added to the residual stream, by torch's fused attention.

        Training takes this way: it keeps no scores for the backward pass.
        """
        q, k, v = self.projected(x)  # batch heads pos d_head
        return self.mixed(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def with_attention(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch pos d_model"], Attended]:
        """The same output to rounding, and the attention."""
        n = x.shape[1]
        q, k, v = self.projected(x)  # batch heads pos d_head
        scores = q @ k.mT / q.shape[-1] ** 0.5  # batch heads query key
        scores = scores.masked_fill(self.get_buffer("future")[:n, :n], -torch.inf)  # batch heads query key
        pattern = scores.softmax(-1)  # batch heads query key
        return self.mixed(pattern @ v), Attended(scores, pattern)

    def projected(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "3 batch heads pos d_head"]:
        """Rotated queries, rotated keys and values."""
        weights, biases = torch.stack([self.W_Q, self.W_K, self.W_V]), torch.stack([self.b_Q, self.b_K, self.b_V])
        qkv = torch.einsum("bpd,rhdk->rbhpk", x, weights) + biases[:, None, :, None]  # 3 batch heads pos d_head
        if not self.rotary:
            return qkv
        return torch.cat([self.rotated(qkv[:2]), qkv[2:]])

    def mixed(self, z: Float[Tensor, "batch heads pos d_head"]) -> Float[Tensor, "batch pos d_model"]:
        """Sum over heads of what each writes."""
        return torch.einsum("bhpk,hkd->bpd", z, self.W_O) + self.b_O

    def rotated(self, x: Float[Tensor, "*heads pos d_head"]) -> Float[Tensor, "*heads pos d_head"]:
        """Rotate each pair of columns by position * theta_t."""
        n = x.shape[-2]
        cos, sin = self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]  # pos pairs
        real, imag = (x[..., 0::2], x[..., 1::2]) if self.adjacent else x.chunk(2, dim=-1)  # ... pos pairs
        pairs = times_phase(real, imag, cos, sin)  # ... pos pairs
        return torch.stack(pairs, dim=-1).flatten(-2) if self.adjacent else torch.cat(pairs, dim=-1)


class Block(nn.Module):
    """Norm and attention on the residual stream; there is no MLP."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.ln1 = LayerNorm(config)
        self.attn = Attention(config)


class Unembed(nn.Module):
    """Logits."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(config.d_model, config.d_vocab))
        self.b_U = nn.Parameter(torch.zeros(config.d_vocab)) if config.unembed_bias else None

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of every position."""
        logits = x @ self.W_U  # batch pos d_vocab
        return logits if self.b_U is None else logits + self.b_U


class AttentionOnlyTransformer(nn.Module):
    """Embedding, attention layers, final norm, unembedding.

    Matrices are drawn from N(0, 0.8 / sqrt(d_model)), biases are 0 and gains 1 (TransformerLens' `init_mode="gpt2"`).

    Args:
        config: the architecture.
        seed: of the initial weights; the global random state is neither used nor changed.
    """

    def __init__(self, config: TransformerConfig, *, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        if config.positional_embedding_type == "standard":
            self.pos_embed = PosEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_final = LayerNorm(config)
        self.unembed = Unembed(config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if ".W_" in name:
                nn.init.normal_(parameter, std=0.8 / config.d_model**0.5, generator=generator)

    @property
    def layers(self) -> list[Block]:
        """The blocks, by their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def to_model(self) -> Any:
        """Return a copy as a TransformerBridge, which `analyze_heads`, `ablate` and all of TransformerLens take.

        Where rotary pairs are half a head apart, columns of W_Q, W_K and their biases are put in another order: the
        native model of TransformerLens pairs neighbours. Logits, scores and all columns of the head table stay.

        Example:
            >>> import tlspectral as tls
            >>> from tlspectral_studies.common import AttentionOnlyTransformer, TransformerConfig
            >>> model = AttentionOnlyTransformer(TransformerConfig()).to_model()
            >>> len(tls.analyze_heads(model, null_draws=2, detectors=False))
            8
        """
        parameter = self.embed.W_E
        config = {**asdict(self.config), "model_name": "own training"}
        bridge = bridge_from_weights(config, self.state_dict(), parameter.device, parameter.dtype)
        bridge.tlspectral_source = {"model": "own training", "revision": None}
        return bridge

    def forward(self, tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits, as they are trained.

        Raises:
            ValueError: more tokens than n_ctx.
        """
        x = self.embedded(tokens)  # batch pos d_model
        for block in self.layers:
            x = x + block.attn(block.ln1(x))  # batch pos d_model
        return self.unembed(self.ln_final(x))  # batch pos d_vocab

    def with_attention(
        self, tokens: Int64[Tensor, "batch pos"]
    ) -> tuple[Float[Tensor, "batch pos d_vocab"], list[Attended]]:
        """Logits, and the attention of each layer.

        Raises:
            ValueError: more tokens than n_ctx.
        """
        x = self.embedded(tokens)  # batch pos d_model
        attention = []
        for block in self.layers:
            added, attended = block.attn.with_attention(block.ln1(x))
            x = x + added  # batch pos d_model
            attention.append(attended)
        return self.unembed(self.ln_final(x)), attention  # batch pos d_vocab

    def embedded(self, tokens: Int64[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream in front of the first layer."""
        if tokens.shape[1] > self.config.n_ctx:
            raise ValueError(f"{tokens.shape[1]} tokens do not fit into a context of n_ctx={self.config.n_ctx}")
        x = self.embed(tokens)  # batch pos d_model
        return x if self.config.positional_embedding_type == "rotary" else x + self.pos_embed(tokens.shape[1])
