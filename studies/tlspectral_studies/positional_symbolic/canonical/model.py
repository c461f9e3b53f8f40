"""One layer with one rotary head, for a canonical task; many such models side by side in stacked tensors.

There is no norm, no MLP, no bias and no 1/sqrt(d) in the score. The residual stream of the query token goes straight to
the logits, beside what the head reads. Only the row of the query is computed: it is the only one with a loss.
"""

from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from tlspectral.algebra.rotary import times_phase
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask


@dataclass(frozen=True)
class CanonicalRun:
    """One model: its rotary frequencies in radians per token, and the seed of its weights and its training prompts."""

    frequencies: tuple[float, ...]
    seed: int = 0


def angle_unit(task: CanonicalTask) -> float:
    """Radians per token of the angle 1: pi over the tokens of a prompt, the query included (PS D.1)."""
    return pi / (task.length + 1)


class CanonicalHeads(nn.Module):
    """Several one-layer one-head models of a task, stacked along the first axis of every tensor.

    A query at the last position m and a key at position n have the score `sum_t Re(q_t conj(k_t) exp(i (m - n) w_t))`,
    with one pair of columns per frequency w_t: columns 2t and 2t + 1 are its real and imaginary coordinate. The query
    token is among the keys. W_V W_U takes a token to logits without narrowing to the head's columns. Table and matrices
    are drawn from N(0, 1/d_model), each run from its own seed and in an order in which two runs of the same seed have
    equal tables, W_V and W_U whatever their frequencies. PS (appendix D.1) gives none of this: d_model, the residual,
    the missing norm and the initial weights are choices made here. The table's scale matters: drawn from N(0, 1), heads
    learn much less in the steps of the quick preset.

    Args:
        task: vocabulary, length and classes.
        runs: the models, all with the same number of frequencies.
        d_model: width of the token table.
        learn_frequencies: make the frequencies parameters, from the given ones on.

    Raises:
        ValueError: no run, no frequency, or runs with different numbers of them.
    """

    def __init__(
        self, task: CanonicalTask, runs: list[CanonicalRun], *, d_model: int = 64, learn_frequencies: bool = False
    ):
        super().__init__()
        counts = {len(run.frequencies) for run in runs}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "models are stacked that have the same number of frequencies, at least one; "
                f"found {len(runs)} runs with {sorted(counts)} frequencies"
            )
        self.task, self.runs = task, tuple(runs)
        d_head, std = 2 * counts.pop(), d_model**-0.5
        shapes = {
            "W_E": (task.n_tokens, d_model),
            "W_V": (d_model, d_model),
            "W_U": (d_model, task.n_answers),
            "W_Q": (d_model, d_head),
            "W_K": (d_model, d_head),
        }
        drawn: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for run in runs:
            generator = torch.Generator().manual_seed(run.seed)
            for name, shape in shapes.items():
                drawn[name].append(std * torch.randn(shape, generator=generator))
        self.W_E, self.W_V, self.W_U, self.W_Q, self.W_K = (
            nn.Parameter(torch.stack(of_run)) for of_run in drawn.values()
        )
        offsets = torch.arange(task.length, -1, -1, dtype=torch.float64)  # from the query back to each key, itself last
        frequencies = torch.tensor([run.frequencies for run in runs], dtype=torch.float64)  # runs pairs
        angles = offsets[:, None] * frequencies[:, None]  # runs keys pairs
        self.register_buffer("offsets", offsets.float())
        self.fixed_frequencies = frequencies  # no buffer: some devices have no float64
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())
        # One parameter per run. A stacked one does not fill whole vector registers, and the remainder is rounded
        # differently: a run's frequencies would depend on how many others it is stacked with.
        self.learned_frequencies = nn.ParameterList(frequencies.float().unbind() if learn_frequencies else [])

    @property
    def frequencies(self) -> Float64[Tensor, "runs pairs"]:
        """Current frequencies, [runs, pairs], in radians per token."""
        if not len(self.learned_frequencies):
            return self.fixed_frequencies
        return torch.stack([frequencies.detach().cpu().double() for frequencies in self.learned_frequencies])

    def forward(
        self, context: Int64[Tensor, "runs batch length"], query: Int64[Tensor, "runs batch"]
    ) -> Float[Tensor, "runs batch answers"]:
        """Logits of the answers, one batch per run."""
        keys, answers = self.W_K.shape[-1], self.W_U.shape[-1]
        # Products are computed once per token of the vocabulary: a batch has some 8000 tokens, the vocabulary 560.
        weights = torch.cat([self.W_Q, self.W_K, self.W_U, self.W_V @ self.W_U], dim=-1)  # runs d_model columns
        q, k, direct, values = (self.W_E @ weights).split([keys, keys, answers, answers], dim=-1)  # runs tokens columns
        tokens = torch.cat([context, query[..., None]], dim=-1)  # runs batch keys
        q = _looked_up(q, query)  # runs batch d_head
        k = _looked_up(k, tokens)  # runs batch keys d_head
        pattern = self._scores(q, k).softmax(-1)  # runs batch keys
        read = (pattern[..., None, :] @ _looked_up(values, tokens)).squeeze(-2)  # runs batch answers
        return read + _looked_up(direct, query)

    def _scores(
        self, q: Float[Tensor, "runs batch d_head"], k: Float[Tensor, "runs batch keys d_head"]
    ) -> Float[Tensor, "runs batch keys"]:
        """Scores of the last position with every key, the query rotated by the distance to it."""
        cos, sin = self._rotation()  # runs 1 keys pairs
        real, imag = q[:, :, None, 0::2], q[:, :, None, 1::2]  # runs batch 1 pairs
        rotated_real, rotated_imag = times_phase(real, imag, cos, sin)  # runs batch keys pairs
        return (rotated_real * k[..., 0::2] + rotated_imag * k[..., 1::2]).sum(-1)

    def _rotation(self) -> tuple[Float[Tensor, "runs 1 keys pairs"], Float[Tensor, "runs 1 keys pairs"]]:
        if not len(self.learned_frequencies):
            return self.get_buffer("cos")[:, None], self.get_buffer("sin")[:, None]
        angles = [self.get_buffer("offsets")[:, None] * frequencies for frequencies in self.learned_frequencies]
        cos, sin = (torch.stack([function(angle) for angle in angles])[:, None] for function in (torch.cos, torch.sin))
        return cos, sin


def _looked_up(table: Float[Tensor, "runs tokens columns"], ids: Int64[Tensor, "runs *positions"]) -> Tensor:
    """Rows of each run's table by token id, [runs, *positions, columns]."""
    runs, n_tokens, columns = table.shape
    first = n_tokens * torch.arange(runs, device=ids.device).reshape(runs, *[1] * (ids.ndim - 1))
    return F.embedding(ids + first, table.reshape(runs * n_tokens, columns))
