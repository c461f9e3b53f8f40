"""Heads with weights set by hand that solve the canonical tasks: positional, symbolic and mixed.

The constructions are those of "Decoupling Positional and Symbolic Attention Behavior" (PS, appendices C.3, C.5 and
C.8): one-hot embeddings, no value matrix, no activation function, and the answer is the token that got most attention.
As printed they do not always answer correctly. What is different here:

* One-hot values of equal tokens add up, so the largest weight need not decide. With the answer's logit a `gap` above
  all others, a factor of `ln n / gap` on the logits makes one weight exceed all others together.
* `v = (1, 1) / sqrt 2` has norm 1; the printed `(1/2, 1/2)` halves the logits of position.
* Symbol i of m has angle `2 pi (i - 1) / m`; with the printed `2 pi i / m` from i = 2 on, symbols 1 and m coincide.
* `H_SYM^theta` needs `theta < 2 pi / (m (n - 1))`; the printed bound is `2 pi / m`.
* `H_MIX` rotates by `pi / (2 n)` at an amplitude of half the gap between symbols. The printed bounds, `2 pi / (n |S|)`
  in Lemma 6 and this over n before it, leave gaps between positions at the rounding of float32.
* `H_POS` gives the query token the same key as any other; PS does not define it.

A head's pair of columns is one complex coordinate, as in `tlspectral.algebra.rotary`.

No head that acts positionally solves retrieval if the answer is the most attended token. PS C.6 shows that this needs
the condition on the readout: an MLP can read the answer from the output of a positional head, as the tests show.
"""

import cmath
import math
from dataclasses import dataclass

import torch
from jaxtyping import Complex128, Float64, Int64
from torch import Tensor

from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask


@dataclass(frozen=True)
class ExactHead:
    """A rotary head on one-hot tokens whose values are the one-hot tokens themselves (PS, Definition 1 and section 4).

    Token x at position n attends to token y at position j with logit
    `logit_scale * sum_t Re(query[x, t] conj(key[y, t]) e^{i theta_t (n - j)})`. The query is the last token of a prompt
    and attends to all tokens, itself included.

    Attributes:
        query, key: complex coordinates of each token before rotation.
        theta: radians per token of each pair; 0 for a non-rotary pair (NoPE).
        logit_scale: factor on every logit.
    """

    query: Complex128[Tensor, "tokens pairs"]
    key: Complex128[Tensor, "tokens pairs"]
    theta: Float64[Tensor, "pairs"]
    logit_scale: float = 1.0

    def logits(self, tokens: Int64[Tensor, "*batch pos"]) -> Float64[Tensor, "*batch pos"]:
        """Logits of the last token's attention to every token."""
        products, rotations = self._products(tokens), self._rotations(tokens)
        return (products.real * rotations.real - products.imag * rotations.imag).sum(-1)

    def attention(self, tokens: Int64[Tensor, "*batch pos"]) -> Float64[Tensor, "*batch pos"]:
        """Weights of the last token's attention to every token."""
        return self.logits(tokens).softmax(-1)

    def attended(self, tokens: Int64[Tensor, "*batch pos"]) -> Float64[Tensor, "*batch tokens"]:
        """Output of the head: the weight on each token of the vocabulary, summed over its positions."""
        weights = self.attention(tokens)
        return weights.new_zeros(*tokens.shape[:-1], len(self.key)).scatter_add(-1, tokens, weights)

    def answer(self, tokens: Int64[Tensor, "*batch pos"]) -> Int64[Tensor, "*batch"]:
        """The token that got most attention; the lowest id where several did."""
        return self.attended(tokens).argmax(-1)

    def logit_matrix(self, tokens: Int64[Tensor, "*batch pos"]) -> Float64[Tensor, "*batch keys keys"]:
        """A[k, j], the logit of the content of key k placed at position j, for the keys before the query.

        Entries of equal factors are equal to the last bit, so that `exclusion_split` is exactly 0 where it should be.
        """
        products, rotations = self._products(tokens)[..., :-1, None, :], self._rotations(tokens)[:-1]
        return (products.real * rotations.real - products.imag * rotations.imag).sum(-1)

    def _products(self, tokens: Int64[Tensor, "*batch pos"]) -> Complex128[Tensor, "*batch pos pairs"]:
        """Scaled products of the query with every key, before rotation."""
        return self.logit_scale * self.query[tokens[..., -1:]] * self.key[tokens].conj()

    def _rotations(self, tokens: Int64[Tensor, "*batch pos"]) -> Complex128[Tensor, "pos pairs"]:
        """Rotation between the query and every position."""
        offset = torch.arange(tokens.shape[-1] - 1, -1, -1, dtype=torch.float64)
        return _unit_vectors(offset[:, None] * self.theta)


def sufficient_logit_scale(n_keys: int, gap: float) -> float:
    """Factor on the logits that gives the answer's key more weight than all other keys together, `ln n / gap`.

    Args:
        n_keys: tokens before the query.
        gap: least difference between the answer's logit and another's, before the factor.

    Returns:
        The factor, a pure number.

    Raises:
        ValueError: the gap is not positive, so that no factor is enough.

    With it, n - 1 other keys weigh at most (n - 1) / n of the answer's, whatever they hold. Lemmas 3, 4 and 6 of PS
    need it for the step from the largest weight to the output.

    What it does not establish: that a smaller factor fails. The bound is for the worst prompt, and for `symbolic_head`
    at theta = 0 it is all but exact; random prompts often need less.
    """
    # Tied logits differ by rounding, about 1e-16; the mixed head for 1000 pairs of 16 symbols has a gap of 1e-7.
    if gap < 1e-14:
        raise ValueError(f"the answer's logit is not above all others (gap {gap:.3g}), and no factor changes that")
    return math.log(n_keys) / gap


def positional_head(task: CanonicalTask, *, theta: float | None = None, as_printed: bool = False) -> ExactHead:
    """`H_POS`: keys are all equal and the query for position j points there, `logit = cos(theta (i - j))`.

    Args:
        task: gives the length n and the vocabulary; the head solves `"index"` with any numbers of symbols.
        theta: radians per token, pi / n by default.
        as_printed: with `v = (1/2, 1/2)` and no factor on the logits.

    Returns:
        A positional head, with 1 pair, for index queries. Other queries attend uniformly.

    Raises:
        ValueError: theta gives several positions the largest logit, as 2 pi / n does; not raised as printed.

    The source is PS, Theorem 3 and appendix C.3.

    What it does not establish: as printed, only the position of the largest weight is right. The answer is wrong in
    about four of five prompts with n = 32 and 16 symbols (`CanonicalTask("index", n_integers=1)`).
    """
    n = task.length
    theta = math.pi / n if theta is None else theta
    v = (1 + 1j) / 2 if as_printed else (1 + 1j) / math.sqrt(2)
    key = torch.full((task.n_tokens, 1), v, dtype=torch.complex128)
    query = torch.zeros_like(key)
    query[task.n_pairs : task.n_pairs + n, 0] = v * _unit_vectors(theta * (torch.arange(n, dtype=torch.float64) - n))
    # The nearest rival is another position, or the query's own key, n tokens from position 0.
    gap = 1 - max(math.cos(theta * distance) for distance in range(1, n + 1))
    scale = 1.0 if as_printed else sufficient_logit_scale(n, gap)
    return ExactHead(query, key, torch.tensor([theta], dtype=torch.float64), scale)


def symbolic_head(task: CanonicalTask, *, theta: float = 0.0, as_printed: bool = False) -> ExactHead:
    """`H_SYM^theta`: symbol s has angle a_s on a circle, `logit = cos(a_s - a_query + theta (t - (n - 1) / 2))`.

    Args:
        task: gives the length n, the number m of symbols and the vocabulary; the head solves `"retrieval"`.
        theta: radians per token; 0 is the symbolic head `H_SYM` (NoPE).
        as_printed: with the printed angles of symbols and no factor on the logits.

    Returns:
        A head with 1 pair for symbol queries; symbolic if theta is 0. Other queries attend uniformly.

    Raises:
        ValueError: theta is negative or not below its bound: 2 pi / (m (n - 1)), or 2 pi / m as printed.

    The source is PS, Theorem 5 and appendix C.5.

    What it does not establish: as printed, symbols 1 and m are the same to the head, distractors with equal tokens
    outweigh the answer, and for most theta below the printed bound the largest weight is not at the answer.
    """
    n, m = task.length, task.n_symbols
    bound = 2 * math.pi / (m if as_printed else m * max(n - 1, 1))
    if not 0 <= theta < bound:
        raise ValueError(f"theta is {theta:.6g}; for {n} pairs of {m} symbols it has to be in [0, {bound:.6g})")
    symbols = _symbol_vectors(m, as_printed)[:, None]
    to_the_centre = cmath.exp(1j * theta * ((n - 1) / 2 - n))
    # The answer at one end of the context, a neighbouring symbol at the other end.
    off_centre = theta * (n - 1) / 2
    gap = math.cos(off_centre) - math.cos(2 * math.pi / m - off_centre)
    scale = 1.0 if as_printed else sufficient_logit_scale(n, gap)
    return _symbol_head(task, symbols * to_the_centre, symbols, [theta], scale)


def mixed_head(task: CanonicalTask, *, as_printed: bool = False) -> ExactHead:
    """`H_MIX`: finds the symbol with a non-rotary pair and its last occurrence with a slow pair.

    `logit = cos(a_s - a_query) + c cos(theta_2 (n - t))`, where the second term, `c = (1 - cos(2 pi / m)) / 2` and
    `theta_2 = pi / (2 n)`, prefers late positions and changes less over the context than the first between symbols.

    Args:
        task: gives the length n, the number m of symbols and the vocabulary; the head solves `"partial_induction"`
            with any number of occurrences of the query's symbol, and `"retrieval"`.
        as_printed: with the printed vectors, no factor on the logits and the bound of Lemma 6 for theta_2,
            `2 pi / (n |vocabulary|)`, where the vocabulary has no index queries.

    Returns:
        A head with 2 pairs for symbol queries. Other queries attend uniformly.

    The source is PS, Theorem 6 and appendix C.8.

    What it does not establish: that a trained head works like this, or that one needs such logits: the factor is 2.5e4
    for n = 32 and 16 symbols. As printed, symbols 1 and m are the same to the head too.
    """
    n, m = task.length, task.n_symbols
    symbol_gap = 1 - math.cos(2 * math.pi / m)
    if as_printed:
        theta, late, scale = 2 * math.pi / (n * (task.n_pairs + m)), (1 + 1j) / 2, 1.0
    else:
        theta = math.pi / (2 * n)
        amplitude = symbol_gap / 2
        late = math.sqrt(amplitude) * (1 + 1j) / math.sqrt(2)
        # Two neighbouring occurrences, the later next to the query: less than what is left of the gap between symbols.
        scale = sufficient_logit_scale(n, amplitude * (math.cos(theta) - math.cos(2 * theta)))
    symbols = _symbol_vectors(m, as_printed)
    vectors = torch.stack([symbols, torch.full_like(symbols, late)], dim=1)
    return _symbol_head(task, vectors, vectors, [0.0, theta], scale)


def _symbol_head(
    task: CanonicalTask,
    queries: Complex128[Tensor, "symbols pairs"],
    keys: Complex128[Tensor, "symbols pairs"],
    theta: list[float],
    scale: float,
) -> ExactHead:
    """A head with these queries for symbol queries and these keys for pairs of a symbol, 0 for all other tokens."""
    query = torch.zeros(task.n_tokens, len(theta), dtype=torch.complex128)
    key = torch.zeros_like(query)
    query[-task.n_symbols :] = queries
    key[: task.n_pairs] = keys.repeat_interleave(task.n_integers, dim=0)
    return ExactHead(query, key, torch.tensor(theta, dtype=torch.float64), scale)


def _unit_vectors(angle: Float64[Tensor, "*shape"]) -> Complex128[Tensor, "*shape"]:
    """The complex number of modulus 1 at each angle."""
    return torch.polar(torch.ones_like(angle), angle)


def _symbol_vectors(m: int, as_printed: bool) -> Complex128[Tensor, "symbols"]:
    """Symbols on the unit circle; as printed, `R^i v` for symbol i = 2..m, which ends where symbol 1 is."""
    step = torch.arange(m, dtype=torch.float64)
    if as_printed:
        step[1:] += 1
    return _unit_vectors(2 * math.pi / m * step)
