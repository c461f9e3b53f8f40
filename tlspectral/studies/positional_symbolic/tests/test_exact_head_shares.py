"""Content, position and interaction of the exact heads, whose shares follow from their formulas."""

import math

import pytest
import torch
from exact_prompts import sampled

from tlspectral.positional import split_logits
from tlspectral.studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral.studies.positional_symbolic.exact_heads import mixed_head, positional_head, symbolic_head

N = 16


def prompts(name):
    task = CanonicalTask(name, length=N, n_symbols=8, n_integers=4)
    return task, sampled(task, 4, seed=2)[0]


def shares(head, tokens):
    return split_logits(head.logit_matrix(tokens)).shares().mT  # prompts, 3


# Everything is float64 and exact by formula: measured 1e-15; heads differ by tenths.
ROUNDING = 1e-10


def test_the_positional_head_is_position_and_the_symbolic_head_content():
    task, tokens = prompts("index")
    assert shares(positional_head(task), tokens) == pytest.approx(torch.tensor([[0.0, 1.0, 0.0]] * 4), abs=ROUNDING)
    task, tokens = prompts("retrieval")
    assert shares(symbolic_head(task), tokens) == pytest.approx(torch.tensor([[1.0, 0.0, 0.0]] * 4), abs=ROUNDING)


def test_the_mixed_head_is_a_sum_of_both():
    """PS section 6 in its simplest case: `cos(a_s - a_query) + c cos(theta (n - t))` has no interaction."""
    task, tokens = prompts("partial_induction")
    context = tokens[:, :-1]
    found = shares(mixed_head(task), tokens)
    angle = 2 * math.pi / task.n_symbols
    query = tokens[:, -1] - task.query_ids.start
    by_symbol = torch.cos(angle * (context // task.n_integers - query[:, None]).double())
    c, theta = (1 - math.cos(angle)) / 2, math.pi / (2 * N)
    by_place = c * torch.cos(theta * (N - torch.arange(N)).double())
    content, position = by_symbol.var(-1, correction=0), by_place.var(correction=0)
    assert found[:, 0] == pytest.approx(content / (content + position), abs=ROUNDING)
    assert found[:, 1] == pytest.approx(position / (content + position), abs=ROUNDING)
    assert found[:, 2] == pytest.approx(torch.zeros(4), abs=ROUNDING)
    assert float(found[:, 1].min()) > 1e-3  # small: it only decides between equal symbols


@pytest.mark.parametrize("theta", [0.0, 0.045])
def test_a_symbolic_head_that_rotates_has_the_rest_in_the_interaction(theta):
    """Over all symbols alike, `cos(a + theta x)` has the content `m cos a`, m the mean of cos(theta x) over places."""
    task, _ = prompts("retrieval")
    context = torch.arange(N) % task.n_symbols * task.n_integers  # every symbol twice
    tokens = torch.cat([context, torch.tensor([task.query_ids.start + 3])])[None]
    m = 1.0 if theta == 0 else math.sin(N * theta / 2) / (N * math.sin(theta / 2))
    expected = torch.tensor([[m**2, 0.0, 1 - m**2]], dtype=torch.float64)
    assert shares(symbolic_head(task, theta=theta), tokens) == pytest.approx(expected, abs=ROUNDING)
