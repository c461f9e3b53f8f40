"""Heads of the proofs of "Decoupling Positional and Symbolic Attention Behavior" (PS), run on random prompts.

Only what can be run in seconds without a model is here; scores of language models need weights.
"""

import math
from collections.abc import Iterator

import torch

from tlspectral.positional.exclusion import exclusion_split
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral_studies.positional_symbolic.exact_heads import ExactHead, mixed_head, positional_head, symbolic_head
from tlspectral_studies.positional_symbolic.peak_weights import positional_peak_weight, symbolic_peak_weight

PROMPTS, SEED = 3000, 0

INDEX = CanonicalTask("index", n_integers=1)  # PS reads the index task over bare symbols
_RETRIEVAL = CanonicalTask("retrieval")
_INDUCTION = CanonicalTask("partial_induction")
_PRINTED_ANGLES = "symbols 1 and m get the same vector, and one-hot values of equal tokens add up"


def solved(head: ExactHead, task: CanonicalTask, *, prompts: int = PROMPTS, seed: int = SEED) -> float:
    """Share of random prompts of a task that a head answers rightly."""
    batch = task.sample(prompts, torch.Generator().manual_seed(seed))
    tokens = torch.cat([batch.context, batch.query[:, None]], dim=1)
    right = tokens.gather(-1, batch.answer_position[:, None])[:, 0]
    return float((head.answer(tokens) == right).double().mean())


def existence(tables: PublishedTables) -> Iterator[Claim]:
    """Theorems 3, 5 and 6: heads that solve the tasks exist; the corrected constructions do."""
    built = (
        ("theorem3", "PS, Theorem 3", "H_POS on index prompts", positional_head(INDEX), INDEX),
        ("theorem5", "PS, Theorem 5", "H_SYM on retrieval prompts", symbolic_head(_RETRIEVAL), _RETRIEVAL),
        ("theorem6", "PS, Theorem 6", "H_MIX on partial induction prompts", mixed_head(_INDUCTION), _INDUCTION),
    )
    for row, where, what, head, task in built:
        yield Claim(
            f"ps/{row}/corrected",
            where,
            f"{what}: share of prompts solved by the corrected construction",
            "1.000",
            solved(head, task),
            remark=f"{PROMPTS} random prompts of n = 32",
        )


def printed_constructions(tables: PublishedTables) -> Iterator[Claim]:
    """The same heads with the numbers that appendix C gives."""
    added = "the largest weight is at the right place, but one-hot values of equal tokens add up and outweigh it"
    rounded = f"{_PRINTED_ANGLES}; gaps between positions are below the rounding of float32"
    built = (
        ("lemma3", "C.3", "H_POS as printed on index", positional_head, INDEX, added),
        ("lemma4", "C.5", "H_SYM as printed on retrieval", symbolic_head, _RETRIEVAL, _PRINTED_ANGLES),
        ("lemma6", "C.8", "H_MIX as printed on partial induction", mixed_head, _INDUCTION, rounded),
    )
    for row, where, what, build, task, why in built:
        share = solved(build(task, as_printed=True), task)
        what = f"{what} prompts: share of prompts solved"
        yield Claim(f"ps/{row}", f"PS, appendix {where}", what, "1.000", share, if_differs=why)


def exclusion(tables: PublishedTables) -> Iterator[Claim]:
    """Lemmas 2 and 5: H_POS is positional, H_SYM symbolic; the index of Theorem 1 is then 1 and 0."""
    built = (
        ("lemma2", "PS, Lemma 2", "H_POS, smallest", "1", positional_head(INDEX), INDEX),
        ("lemma5", "PS, Lemma 5", "H_SYM, largest", "0", symbolic_head(_RETRIEVAL), _RETRIEVAL),
    )
    for row, where, what, text, head, task in built:
        batch = task.sample(100, torch.Generator().manual_seed(SEED))
        tokens = torch.cat([batch.context, batch.query[:, None]], dim=1)
        index = exclusion_split(head.logit_matrix(tokens)).index
        worst = float(index.min() if text == "1" else index.max())
        what = f"exclusion index of {what} of 100 prompts, 0 symbolic and 1 positional"
        yield Claim(f"ps/{row}", where, what, f"{text}.000", worst)


def angle_limit(tables: PublishedTables) -> Iterator[Claim]:
    """Section 4: at angles above 2 pi / n, weights have several maxima according to PS."""
    tried = [2.5, 3.5, 4.5]
    sharp = [factor for factor in tried if one_maximum(factor * math.pi / INDEX.length)]
    yield Claim(
        "ps/angle",
        "PS, section 4",
        "angles of 2.5, 3.5 and 4.5 pi/n, above 2 pi/n, at which one place alone has the largest weight",
        "0",
        float(len(sharp)),
        if_differs="places are integers: weights tie only where a period divides a distance, as at 2 pi/n",
    )


def peak_weights(tables: PublishedTables) -> Iterator[Claim]:
    """Theorems 7 and 8: the weight on the answer is small in the middle for H_POS, and at the ends for H_SYM."""
    n = 33
    positional = torch.diff(positional_peak_weight(n, math.pi / n))
    symbolic = torch.diff(symbolic_peak_weight(n))
    slack = 1e-12  # the two middle values can be equal
    half = len(positional) // 2
    u_shaped = bool((positional[:half] < slack).all() and (positional[half + 1 :] > -slack).all())
    inverted = bool((symbolic[:half] > -slack).all() and (symbolic[half + 1 :] < slack).all())
    where, what = "PS, Theorem 7", "weight on the answer by its place, n = 33, is {} (1 is yes)"
    yield Claim("ps/theorem7/positional", where, f"H_POS: {what.format('U-shaped')}", "1", float(u_shaped))
    yield Claim("ps/theorem7/symbolic", where, f"H_SYM: {what.format('an inverted U')}", "1", float(inverted))


def second_weight(theta: float) -> float:
    """Smallest ratio of the second largest weight on a key to the largest, over an answer with keys on both sides.

    The softmax of `cos(theta (i - j))` over the n keys, for the answer j from which every distance to n - 1 is seen:
    PS's lemmas leave out the query's own place.
    """
    distance = torch.arange(1, INDEX.length, dtype=torch.float64)
    return float(((theta * distance).cos().max() - 1).exp())


def one_maximum(theta: float) -> bool:
    """Whether `cos(theta (i - j))` is largest at i = j alone, for every answer j among n keys and the query's own."""
    distance = torch.arange(1, INDEX.length + 1, dtype=torch.float64)
    return bool(((theta * distance).cos() < 1 - 1e-12).all())
