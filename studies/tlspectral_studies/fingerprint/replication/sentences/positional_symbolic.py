"""Sentences of "Decoupling Positional and Symbolic Attention Behavior" (PS): its models' scores were not published."""

import math
from collections.abc import Iterator

from tlspectral_studies.fingerprint.replication import exact_heads
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.positional_schemes import ROTARY
from tlspectral_studies.fingerprint.replication.sentences.power import correlations_power, no_sample, significant
from tlspectral_studies.fingerprint.replication.sentences.sentence import Choice, Population, Power, Reading, Sentence

_SIGNS = {"prev": 1, "dup": -1, "ind": -1}  # positional heads at high frequencies, symbolic ones at low
_FACTORS = tuple(2 + step / 4 for step in range(1, 21))  # angles above 2 pi / n, in units of pi / n
_NEARLY = 0.95  # share of the largest weight that nearly ties with it
_NEARER = 1 - (1 - _NEARLY) / 2
_LEMMAS = {
    "lemma3": "For the head H_POS and any s_POS [...] M(s_POS) = f_POS(s_POS)",
    "lemma4": "For the head H_SYM and any s_SYM [...] M(s_SYM) = f_SYM(s_SYM)",
    "lemma6": "For H_MIX and any s_MIX [...] M(s_MIX) = f_MIX(s_MIX)",
}
_PS_MODELS = ("gemma-2-2b-it", "Qwen-2", "Llama-3")
_MODELS = "gemma-2-2b-it, and of its Qwen-2 and Llama-3 models"


def frequency_and_behaviour(tables: PublishedTables) -> Iterator[Sentence]:
    """The main finding: needs PS's models; FP's tables hold a stand-in."""
    table = tables.correlations(ROTARY, "freq_centroid", list(_SIGNS))
    right = table["statistic"] * table["against"].map(_SIGNS) > 0
    sure = right & significant(table["pvalue"].to_numpy())
    sizes = tables.sizes(ROTARY)
    listed = ", ".join(f"{row['model']} {row['against']} {row['statistic']:+.2f}" for _, row in table.iterrows())
    yield Sentence(
        "sentence/ps_frequencies",
        "PS, abstract and section 3.3",
        "all heads exhibit a strong correspondence between behavior and frequency use",
        "stand-in from FP's tables: rank correlation of freq_centroid with prev, dup and ind on three models, Holm "
        "over 9",
        min(sizes.values()),
        correlations_power(sizes, len(table)),
        None,
        Reading.every(
            "higher frequencies with prev, lower with dup and ind, all nine significant; their number",
            sure,
            "its models and scores: FP's models and detectors",
        ),
        f"needs the weights of {_MODELS} (`tlspectral.positional.positional_symbolic` with per_frequency=True); "
        f"{listed}",
        population=Population.of(_PS_MODELS, ROTARY),
    )


def scores_are_negatively_correlated(tables: PublishedTables) -> Iterator[Sentence]:
    """The correlation that is called strong support of Theorem 1."""
    yield Sentence(
        "sentence/ps_exclusion",
        "PS, section 3.3",
        "strong empirical support for our theoretical positional-symbolic exclusion principle [...] r = -0.91",
        "correlation of the two scores over heads beside that of heads which follow a swap by the toss of a coin",
        208,
        correlations_power({"gemma-2-2b-it": 208}, 1),
        None,
        None,
        f"needs the weights of {_MODELS} (`tlspectral.positional_symbolic` gives the correlation beside its null)",
    )


def early_heads_are_more_positional(tables: PublishedTables) -> Iterator[Sentence]:
    """The medians of footnote 2."""
    yield Sentence(
        "sentence/ps_medians",
        "PS, section 3.3, footnote 2",
        "For positional scores, early layers showed a higher median (0.83) than late layers (0.56 [...]). "
        "Conversely, symbolic scores were higher in late layers (median 0.67) than in early layers (median 0.49",
        "medians of the two scores over heads of early and late layers, Mood's test",
        208,
        Power("none: the test takes heads as independent, and no table of scores was published"),
        None,
        None,
        f"needs the weights of {_MODELS} (`positional_symbolic.medians.median_tests` of `positional_symbolic` on "
        "`BindingTask(n_blocks=256)` with swaps='all'); medians depend on tau, which PS does not give",
    )


def wrong_frequencies_leave_shapes(tables: PublishedTables) -> Iterator[Sentence]:
    """Accuracy against the place of the answer: a statement about trained models."""
    yield Sentence(
        "sentence/ps_shapes",
        "PS, introduction and Figure 3A",
        "in this case, a U -shaped accuracy pattern tends to emerge",
        "accuracy of trained models by the place of the answer",
        0,
        Power("none: no table of accuracies was published"),
        None,
        None,
        "needs the weights of PS's toy models; `tlspectral study canonical` trains such models: "
        "docs/results/positional.md has what came out",
    )


def one_angle_is_not_enough(tables: PublishedTables) -> Iterator[Sentence]:
    """Partial induction cannot be solved with one frequency: a statement about trained models."""
    yield Sentence(
        "sentence/ps_one_angle",
        "PS, section 4",
        "a toy model with 1-RoPE angle can not solve the partial induction task",
        "accuracy of trained models with one and two frequencies",
        0,
        Power("none: no table of accuracies was published"),
        None,
        None,
        "needs the weights of PS's toy models; `tlspectral study canonical` trains such models: "
        "docs/results/positional.md has what came out",
    )


def angles_above_the_limit(tables: PublishedTables) -> Iterator[Sentence]:
    """Section 4: above 2 pi / n weights are not maximized in just one position."""
    length = exact_heads.INDEX.length
    several = [factor for factor in _FACTORS if not exact_heads.one_maximum(factor * math.pi / length)]
    second = min(exact_heads.second_weight(factor * math.pi / length) for factor in _FACTORS)
    listed = ", ".join(f"{factor:g}" for factor in several)
    yield Sentence(
        "sentence/ps_angle",
        "PS, section 4",
        "if the angle is greater than 2 pi / n, attention weights are not maximized in just one position",
        f"{len(_FACTORS)} angles from {_FACTORS[0]} to {_FACTORS[-1]:g} pi / n, n = {length}",
        len(_FACTORS),
        no_sample(len(_FACTORS), "angles", ": exact, the weights of the construction"),
        Reading(
            "at each of them several positions tie for the largest weight; how many",
            float(len(several)),
            len(several) == len(_FACTORS),
        ),
        Reading(
            f"at each of them a second key has more than {_NEARLY} of the largest weight; the smallest share",
            second,
            second > _NEARLY,
            "an exact tie",
        ),
        f"ties at {listed or 'none'} pi / n: places are integers, so a period has to divide a distance",
        choices=(
            Choice(
                "level",
                f"{_NEARLY} of the largest weight",
                Reading(
                    f"at each of them a second key has more than {_NEARER} of the largest weight; the smallest share",
                    second,
                    len(several) == len(_FACTORS) or second > _NEARER,
                ),
            ),
        ),
    )


def constructions_solve_their_tasks(tables: PublishedTables) -> Iterator[Sentence]:
    """Theorems 3, 5 and 6: heads exist; corrected constructions are such heads."""
    corrected = {claim.what: claim.ours or 0.0 for claim in exact_heads.existence(tables)}
    rare = 1 - 0.2 ** (1 / exact_heads.PROMPTS)
    yield Sentence(
        "sentence/ps_constructions",
        "PS, Theorems 3, 5 and 6 with appendix C",
        "there is a purely positional head H_POS [symbolic head H_SYM, head H_MIX with two angles] such that M = f",
        "share of random prompts of the task that each of the three heads answers rightly",
        exact_heads.PROMPTS,
        Power(
            f"a share of errors of {rare:.1e} is seen with power 0.8 in {exact_heads.PROMPTS} prompts",
            smallest=rare,
            effect="share of prompts answered wrongly",
        ),
        Reading(
            "heads of the three kinds answer every prompt, as corrected here; smallest share",
            min(corrected.values()),
            min(corrected.values()) == 1,
        ),
        None,
        "the constructions as printed do not: Lemmas 3, 4 and 6",
    )


def printed_heads_solve_their_tasks(tables: PublishedTables) -> Iterator[Sentence]:
    """Lemmas 3, 4 and 6: they are about the heads as printed."""
    for claim in exact_heads.printed_constructions(tables):
        row = claim.id.removeprefix("ps/")
        share = claim.ours or 0.0
        yield Sentence(
            f"sentence/ps_{row}",
            claim.where.replace("PS,", f"PS, {row.replace('lemma', 'Lemma ')},"),
            _LEMMAS[row],
            f"{claim.what.split(':')[0]}: share of random prompts that the head answers rightly",
            exact_heads.PROMPTS,
            no_sample(exact_heads.PROMPTS, "prompts"),
            Reading("the head as printed answers every prompt; share", share, share == 1),
            None,
            f"{claim.if_differs}; corrected heads answer all (Theorems 3, 5 and 6)",
        )
