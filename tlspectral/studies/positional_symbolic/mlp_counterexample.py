"""A positional head that solves a symbolic task, because an MLP after it reads the numbers in its output.

No head that acts positionally solves retrieval if the answer is the most attended token. "Decoupling Positional and
Symbolic Attention Behavior" (PS, appendix C.6) shows that this needs the condition on the readout.
"""

import math

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral.studies.positional_symbolic.exact_heads import ExactHead

COUNTEREXAMPLE_TASK = CanonicalTask("retrieval", length=2, n_symbols=2, n_integers=2)
"""Two pairs of symbols a, b and integers 0, 1, and the query for a symbol that occurs once: n = 3 in PS."""

# The weights of the counterexample are at least 0.09 apart from each other and from 0; rounding is 1e-16.
_EQUAL_WITHIN = 1e-6


def counterexample_head() -> ExactHead:
    """The positional head of PS C.6: logits 1, -1 and 0 on the first pair, the second and the query, whatever they are.

    What it does not establish: that its most attended token answers anything; that token is always the first.
    """
    task = COUNTEREXAMPLE_TASK
    key = torch.zeros(task.n_tokens, 1, dtype=torch.complex128)
    key[: task.n_pairs] = 1
    query = torch.zeros_like(key)
    query[-task.n_symbols :] = 1
    return ExactHead(query, key, torch.tensor([math.pi], dtype=torch.float64))


def counterexample_answer(attended: Float64[Tensor, "*batch tokens"]) -> Int64[Tensor, "*batch"]:
    """The answer to retrieval that AND, OR and EQ read from the output of `counterexample_head` (PS C.6).

    A pair is the answer if its symbol is the query's, EQ(weight of the symbol query, l_3), and it has the weight of one
    occurrence, OR(EQ(weight, l_1), EQ(weight, l_2)), with l = softmax(1, -1, 0). MLPs can compute the three functions.

    Args:
        attended: `counterexample_head().attended(tokens)` for prompts `[*batch, 3]` of `COUNTEREXAMPLE_TASK`.

    Returns:
        Id of the pair.

    What it does not establish: that trained heads and MLPs divide work like this; PS calls the example artificial.
    """
    task = COUNTEREXAMPLE_TASK
    first, second, own = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64).softmax(0)
    pairs = attended[..., : task.n_pairs]
    asked = _equal(attended[..., -task.n_symbols :], own).repeat_interleave(task.n_integers, dim=-1)
    occurs_once = _equal(pairs, first) | _equal(pairs, second)
    return (asked & occurs_once).long().argmax(-1)


def _equal(values: Float64[Tensor, "*shape"], value: Float64[Tensor, ""]) -> Bool[Tensor, "*shape"]:
    return (values - value).abs() < _EQUAL_WITHIN
