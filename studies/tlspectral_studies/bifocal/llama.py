"""A small Llama in plain torch whose rotary positions can be learned, and the arms that are compared.

BA (section 4.1) says "Llama-2-based, 128 hidden dim, 4 heads". Fixed here where it is silent: 2 layers, SwiGLU of 344
columns (Llama's 8/3 of the width, rounded up to a multiple of 8), no biases, RMSNorm, rotary pairs (t, t + d_head/2) of
base 10,000 on whole heads, untied embeddings, matrices drawn from N(0, 0.02).

Parameters, with d_vocab = 9, 7 and 11 for Dyck-3, Bio-Rotation and Modulo-7: 398,208, 397,696 and 398,720 in the
backbone, the same in every arm. Learned on top of it: none in `standard`, 128 in `omega` (2 layers x 4 heads x 16
pairs), 384 in `full`, 192 in `bifocal`, 256 in `placebo`. `parameter_counts` counts them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tlspectral.algebra.rotary import times_phase
from tlspectral.spectral_rope import SpectralRoPE
from tlspectral.spectral_rope.module import Scope, Side

SPECTRAL_PARAMETERS = ("omega", "gain", "phase")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the backbone."""

    d_vocab: int
    n_layers: int = 2
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 344
    n_ctx: int = 448
    rotary_base: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.n_heads):
            raise ValueError(f"d_model={self.d_model} gives {self.n_heads} heads no whole number of rotary pairs each")

    @property
    def d_head(self) -> int:
        """Columns of a head."""
        return self.d_model // self.n_heads


@dataclass(frozen=True)
class SpectralArm:
    """Which rotary parameters are learned, in every layer, on top of the fixed rotation of queries and keys.

    Attributes:
        learned: some of `omega`, `gain`, `phase`; the others stay where they start. None: no spectral module at all.
        half_geometric: only the first half of the heads learns (BA's two modalities side by side).
        shared_phase: the phase rotates queries and keys alike, as BA's module swap (section 3.2) implies; it cancels.
        phase_noise: standard deviation of the phases at the start; BA says N(0, 10^-3).
        gain_on_keys: the gain multiplies keys too, and so acts as its square.
        scope: rows of the parameters, as in `SpectralRoPE`.
    """

    learned: tuple[str, ...] = ()
    half_geometric: bool = False
    shared_phase: bool = False
    phase_noise: float = 0.0
    gain_on_keys: bool = False
    scope: Scope = "head"

    def __post_init__(self) -> None:
        unknown = sorted({*self.learned} - {*SPECTRAL_PARAMETERS})
        if unknown:
            raise ValueError(f"{', '.join(unknown)} cannot be learned: choose of {', '.join(SPECTRAL_PARAMETERS)}")


# Gain and phase of a trained query projection add nothing: W_Q can take them in. So the placebo learns more parameters,
# and can compute nothing new.
ARMS = {
    "standard": SpectralArm(),
    "omega": SpectralArm(("omega",)),
    "full": SpectralArm(SPECTRAL_PARAMETERS),
    "bifocal": SpectralArm(SPECTRAL_PARAMETERS, half_geometric=True),
    "placebo": SpectralArm(("gain", "phase")),
}
# BA's own noise on the phases, on queries alone and shared as in the paper.
PHASE_NOISE_ARMS = {
    "full_noise": SpectralArm(SPECTRAL_PARAMETERS, phase_noise=1e-3),
    "full_noise_shared": SpectralArm(SPECTRAL_PARAMETERS, shared_phase=True, phase_noise=1e-3),
}
# BA's module to the letter (eq. 2, section 3.2): a row of parameters per layer, the same operator on queries and keys.
LITERAL_ARM = {
    "literal": SpectralArm(SPECTRAL_PARAMETERS, shared_phase=True, phase_noise=1e-3, gain_on_keys=True, scope="layer")
}


class GainOnBothSides(SpectralRoPE):
    """`SpectralRoPE` whose gain multiplies queries and keys alike, as in BA's eq. 2."""

    def forward(
        self, x: Float[Tensor, "batch pos heads d_head"], positions: Int64[Tensor, "pos"], side: Side
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """Queries or keys with the residual rotation and the gain on them; all heads have the same row."""
        rotated = super().forward(x, positions, side)
        return rotated if side == "query" else rotated * torch.cat([self.gain, self.gain], -1)


class Attention(nn.Module):
    """Causal attention: fixed rotation by the geometric frequencies, then that of the spectral module, if any."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.n_heads, self.d_head = config.n_heads, config.d_head
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.d_model, config.d_model, bias=False) for _ in range(4)
        )
        self.spectral: SpectralRoPE | None = None

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        cos: Float[Tensor, "pos pairs"],
        sin: Float[Tensor, "pos pairs"],
        at: Int64[Tensor, "batch queries"] | None,
    ) -> Float[Tensor, "batch queries d_model"]:
        """Output of the layer, which is added to the residual stream, at all positions or at those of `at`."""
        z = self.head_outputs(x, cos, sin, at)  # batch heads queries d_head
        return self.o_proj(z.transpose(1, 2).flatten(2))

    def head_outputs(
        self,
        x: Float[Tensor, "batch pos d_model"],
        cos: Float[Tensor, "pos pairs"],
        sin: Float[Tensor, "pos pairs"],
        at: Int64[Tensor, "batch queries"] | None,
    ) -> Float[Tensor, "batch heads queries d_head"]:
        """Mixed values of each head, before the output projection."""
        q, k, v = (
            project(x).unflatten(-1, (self.n_heads, self.d_head)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # batch pos heads d_head
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.spectral is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            q, k = self.spectral(q, positions, "query"), self.spectral(k, positions, "key")
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # batch heads pos d_head
        if at is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        q = q.gather(2, at[:, None, :, None].expand(-1, self.n_heads, -1, self.d_head))  # batch heads queries d_head
        seen = torch.arange(x.shape[1], device=x.device) <= at[:, None, :, None]  # batch 1 queries pos
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.down_proj = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Output of the layer, which is added to the residual stream."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Norm and attention, norm and feed-forward, on the residual stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        cos: Float[Tensor, "pos pairs"],
        sin: Float[Tensor, "pos pairs"],
        at: Int64[Tensor, "batch queries"] | None = None,
    ) -> Float[Tensor, "batch queries d_model"]:
        """The residual stream after the layer, at all positions or at those of `at`."""
        added = self.attention(self.attention_norm(x), cos, sin, at)  # batch queries d_model
        if at is not None:
            x = x.gather(1, at[:, :, None].expand(-1, -1, x.shape[-1]))  # batch queries d_model
        x = x + added
        return x + self.mlp(self.mlp_norm(x))


class SpectralLlama(nn.Module):
    """Embedding, blocks, final norm, unembedding.

    The backbone's weights depend on the sizes and the seed alone, so that arms of one seed start from the same weights
    and, but for phase noise, from the same function, to the bit.

    Args:
        config: sizes.
        arm: which rotary parameters are learned.
        seed: of the weights, and of the phases where they start with noise; the global random state is not used.
    """

    def __init__(self, config: LlamaConfig, arm: SpectralArm, *, seed: int = 0):
        super().__init__()
        self.config, self.arm = config, arm
        self.embed = nn.Embedding(config.d_vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.unembed = nn.Linear(config.d_model, config.d_vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
        pairs = config.d_head // 2
        theta = config.rotary_base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)  # radians per token
        angle = torch.outer(torch.arange(config.n_ctx, dtype=torch.float64), theta)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        if arm.learned:
            for layer, attention in enumerate(self.attentions()):
                attention.spectral = _spectral_module(theta, config, arm, seed=1000 * seed + layer)

    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [block.attention for block in self.blocks if isinstance(block, Block)]

    def forward(
        self, tokens: Int64[Tensor, "batch pos"], at: Int64[Tensor, "batch queries"] | None = None
    ) -> Float[Tensor, "batch queries d_vocab"]:
        """Logits at all positions, or at those of `at` only, which saves work in the last layer.

        Raises:
            ValueError: more tokens than n_ctx.
        """
        x, cos, sin = self._start(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, at if layer == len(self.blocks) - 1 else None)  # batch queries d_model
        return self.unembed(self.norm(x))

    def head_outputs(self, tokens: Int64[Tensor, "batch pos"]) -> list[Float[Tensor, "batch heads pos d_head"]]:
        """Mixed values of each layer's heads, before the output projection."""
        x, cos, sin = self._start(tokens)
        outputs = []
        for block in self.blocks:
            assert isinstance(block, Block)
            outputs.append(block.attention.head_outputs(block.attention_norm(x), cos, sin, None))
            x = block(x, cos, sin)  # batch pos d_model
        return outputs

    def _start(
        self, tokens: Int64[Tensor, "batch pos"]
    ) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "pos pairs"], Float[Tensor, "pos pairs"]]:
        n = tokens.shape[1]
        if n > self.config.n_ctx:
            raise ValueError(f"{n} tokens do not fit into a context of n_ctx={self.config.n_ctx}")
        return self.embed(tokens), self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]


def parameter_counts(config: LlamaConfig, arm: SpectralArm) -> dict[str, int]:
    """Count the trained parameters, `backbone` and `spectral`; spectral rows of geometric heads do not count."""
    model = SpectralLlama(config, SpectralArm())
    heads = config.n_heads // 2 if arm.half_geometric else config.n_heads if arm.scope == "head" else 1
    spectral = config.n_layers * heads * (config.d_head // 2) * len(arm.learned)
    return {"backbone": sum(parameter.numel() for parameter in model.parameters()), "spectral": spectral}


def _spectral_module(
    theta: Float[Tensor, "pairs"], config: LlamaConfig, arm: SpectralArm, *, seed: int
) -> SpectralRoPE:
    pairs = config.d_head // 2
    module = (GainOnBothSides if arm.gain_on_keys else SpectralRoPE)(
        theta.float(),
        config.n_heads,
        config.n_heads,
        real_index=torch.arange(pairs),
        imag_index=torch.arange(pairs) + pairs,
        scope=arm.scope,
        log_omega=False,  # retrieval drives a frequency to 0
        shared_phase=arm.shared_phase,
        phase_noise=arm.phase_noise,
        heads=range(config.n_heads // 2) if arm.half_geometric else None,
        seed=seed,
    )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in arm.learned)
    return module


def _rotated(
    x: Float[Tensor, "batch pos heads d_head"], cos: Float[Tensor, "pos pairs"], sin: Float[Tensor, "pos pairs"]
) -> Float[Tensor, "batch pos heads d_head"]:
    """Rotate each pair of columns (t, t + d_head/2) by position * theta_t."""
    real, imag = x.chunk(2, dim=-1)  # batch pos heads pairs
    cos, sin = cos[:, None], sin[:, None]  # pos 1 pairs
    return torch.cat(times_phase(real, imag, cos, sin), dim=-1)
