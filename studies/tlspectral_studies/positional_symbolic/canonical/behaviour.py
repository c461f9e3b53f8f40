"""How positional and how symbolic trained heads are: the measures of PS section 3 on the heads of section 5."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.rotary import times_phase
from tlspectral.positional import exclusion_split
from tlspectral.positional.scores import swap_scores
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS
from tlspectral_studies.positional_symbolic.canonical.model import CanonicalHeads
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalBatch

CANONICAL = (
    *columns("""
        task            | label           | index needs positions, retrieval symbols, partial_induction both.
        n_frequencies   | count           | Rotary frequencies of the head: 1 is the angle alone, 2 is 0 and the angle.
        angle           | pi/33 rad/token | The head's rotary frequency; 2 is one full rotation over a prompt.
        theta           | rad/token       | The same frequency in radians per token.
        run             | index           | Number of the model in its stack, from 0, in the order given.
        position        | index           | Where in the context the answer stands, from 0.
        n               | count           | Validation prompts behind the row; the same prompts for every run.
        correct         | count           | How many of the n prompts have the right class at the largest logit.
        accuracy        | share           | Share of the n prompts that are answered rightly. NaN where n is 0.
        s_pos           | mean of cosines | Positional score, every pair of the context a block; mean over prompts.
        s_sym           | mean of cosines | Symbolic score of the same.
        exclusion_index | share           | 0 where logits depend on the key's content alone, 1 on its position.
        logit_std       | logit           | Standard deviation of the query's logits over the tokens before it.
    """),
    *RUN_COLUMNS,
)
"""What tables of canonical heads share, for `columns(text, shared)`."""

HEAD_BEHAVIOUR = Schema("head_behaviour", columns("run, seed, s_pos, s_sym, exclusion_index, logit_std", CANONICAL))


@torch.no_grad()
def head_behaviour(heads: CanonicalHeads, batch: CanonicalBatch) -> pd.DataFrame:
    """Exclusion index, s_pos and s_sym of trained heads, each pair of the context being a block of one token.

    All pairs of tokens swap. A layer without positions in its tokens has the same keys after a swap, so that swapped
    words and swapped keys are one experiment here. tau is a tenth of the largest difference of attention, as in
    `tlspectral.positional_symbolic`.

    Args:
        heads: trained heads.
        batch: prompts of their task.

    Returns:
        DataFrame, a run a row. Columns: `run, seed, s_pos, s_sym, exclusion_index, logit_std`.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, sections 3.1 to 3.3), on its toy heads.

    What it does not establish: that the head solves its task; set it beside the accuracy.
    """
    length, n_runs = heads.task.length, len(heads.runs)
    table, own = logit_tables(heads, batch)
    split = exclusion_split(table)
    intact = torch.cat([table.diagonal(dim1=-2, dim2=-1), own[..., None]], dim=-1)  # runs prompts keys
    swaps = torch.combinations(torch.arange(length))
    i, j = swaps.T
    each = torch.arange(len(swaps))
    scores = []
    for run in range(n_runs):
        swapped = intact[run].expand(len(swaps), -1, -1).clone()  # swaps prompts keys
        swapped[each, :, i] = table[run, :, j, i].mT
        swapped[each, :, j] = table[run, :, i, j].mT
        weights = swapped.softmax(-1)
        after = torch.stack([weights[each, :, i], weights[each, :, j]], dim=-1)
        before = intact[run].softmax(-1)[:, swaps].movedim(1, 0)
        scores.append(swap_scores(before, after))
    means = {
        "s_pos": torch.stack([of_run.s_pos for of_run in scores]),
        "s_sym": torch.stack([of_run.s_sym for of_run in scores]),
        "exclusion_index": split.index,
        "logit_std": split.variance.sqrt(),
    }
    return HEAD_BEHAVIOUR.frame(
        {
            "run": np.arange(n_runs),
            "seed": [run.seed for run in heads.runs],
            **{name: values.nanmean(-1).numpy() for name, values in means.items()},
        }
    )


def logit_tables(
    heads: CanonicalHeads, batch: CanonicalBatch
) -> tuple[Float64[Tensor, "runs prompts keys places"], Float64[Tensor, "runs prompts"]]:
    """Logit of the content of every key of the context at every place of it, and of the query's own key, in float64."""
    table, w_q, w_k = (weight.detach().cpu().double() for weight in (heads.W_E, heads.W_Q, heads.W_K))
    q, k = (table @ weights for weights in (w_q, w_k))  # runs tokens columns
    query, keys, own = q[:, batch.query], k[:, batch.context], k[:, batch.query]
    offsets = torch.arange(heads.task.length, 0, -1, dtype=torch.float64)
    angles = offsets[:, None] * heads.frequencies[:, None, None]  # runs 1 places pairs
    real, imag = times_phase(query[:, :, None, 0::2], query[:, :, None, 1::2], angles.cos(), angles.sin())
    logits = keys[..., 0::2] @ real.mT + keys[..., 1::2] @ imag.mT  # runs prompts keys places
    return logits, (query * own).sum(-1)
