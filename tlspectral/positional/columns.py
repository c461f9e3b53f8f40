"""Columns of the tables around positional and symbolic scores: the scores, answers, contrasts, agreement with weights.

PS is Urrutia et al., "Decoupling Positional and Symbolic Attention Behavior in Transformers". A draw is a list of
blocks, a query one of them that is asked about.
"""

from dataclasses import replace

from tlspectral.tables.column import Column, Table
from tlspectral.tables.head_columns import COLUMNS, POSITIONAL_COLUMNS

# fmt: off
_HEAD = (COLUMNS["layer"], COLUMNS["head"], COLUMNS["name"])
_FREQUENCY = COLUMNS["frequency"]


_AVERAGED = " Mean over prompts that have a score: over the queries of a draw, then over draws, or over a list."
SCORES = (
    *(replace(column, meaning=column.meaning + _AVERAGED) for column in POSITIONAL_COLUMNS),
    *(Column(f"{column.name}_se", f"Standard error of {column.name} over the draws of a task or the prompts of a list. "
        "NaN for one.", column.unit, range="0 .. inf",
        does_not_establish="These prompts only: neither another wording nor another task.")
        for column in POSITIONAL_COLUMNS if column.name not in ("tau", "alpha_ess")),
)
"""Scores of `positional_symbolic` and their standard errors."""

_DRAW = Column("draw", "Number of the list of blocks, or of the prompt in a list of prompts, from 0.", "index",
    range="0 .. draws - 1")
_QUERY = Column("query", "Index of the block of the list that is asked about, from 0.", "index",
    range="0 .. blocks - 1", source="PS B.5", also_known_as="queried block")

_ANSWERS = (
    Column("answer", "The right answer, as text.", "text", range="a choice of the draw", source="PS B.4"),
    Column("probability", "Probability that the model gives to the first token of the right answer after the prompt.",
        "probability", range="0 .. 1",
        does_not_establish="That the model read the block: answers differ in how probable they are in any text."),
    Column("rank", "Rank of that token among all tokens by probability; 1 is the most probable.", "index",
        range="1 .. d_vocab",
        does_not_establish="That the model read the block: an answer may rank high after any such prompt."),
    Column("relative_probability", "probability as a share of that of the first tokens of all choices of this draw.",
        "share", range="0 .. 1",
        does_not_establish="That the model read the block: compare with chance, and with other lists."),
    Column("chance", "Share of the draw's choices that have the right answer's first token.", "share", range="0 .. 1",
        does_not_establish="What a model without the list would answer: it takes into account how often a draw has an "
        "answer, not how probable answers are in any text."),
)

_DEPENDENT = (
    "An exact level: heads of a layer are not independent, as the test assumes. At nominal 5 % it rejects 29.7 % of "
    "simulated tables with an intra-class correlation of 0.4."
)
_MEDIANS = (
    Column("score", "Which score is tested.", "label", range="s_pos, s_sym", source="PS 3.3"),
    *(Column(f"{half}_median", f"Median of the score over heads of the {layers}.", "weighted mean of cosines",
        range="0 .. 1", source="PS 3.3, footnote 2", does_not_establish="That depth is the cause of a difference.")
        for half, layers in (("early", "first half of the layers"),
            ("late", "other layers, the middle one among them"))),
    Column("statistic",
        "Chi-square of Mood's median test, with Yates' correction. NaN where there is nothing to compare.",
        "chi-square", range="0 .. inf", source="PS 3.3, footnote 2", does_not_establish=_DEPENDENT),
    Column("pvalue", "p of that test.", "probability", range="0 .. 1", source="PS 3.3, footnote 2",
        does_not_establish=_DEPENDENT),
)

_THIRD = "A mechanism: both may follow a third quantity, such as depth. Heads of a layer are not independent samples."


def _null(prefix: str, shuffled: str, limit: str) -> tuple[Column, ...]:
    return (
        *(Column(f"{prefix}null_{end}", f"{quantile} % quantile of spearman with {shuffled}.", "correlation",
            range="-1 .. 1", does_not_establish=limit) for end, quantile in (("low", 2.5), ("high", 97.5))),
        Column(f"{prefix}null_pct", f"Share of shuffles at or below spearman, with {shuffled}.", "share",
            range="0 .. 1", does_not_establish=limit),
    )


_AGREEMENT = (
    Column("score", "Which score on the prompt is compared.", "label", range="s_pos, s_sym, exclusion_index",
        source="PS 3.3"),
    Column("column", "Which column of the head table it is compared with.", "label",
        range="a column of the head table"),
    Column("n", "Heads that have both numbers.", "count", range="0 .. heads",
        does_not_establish="An effective sample size: heads of a layer are not independent."),
    Column("spearman", "Rank correlation of score and column over heads. NaN for fewer than three heads or a constant.",
        "correlation", range="-1 .. 1", does_not_establish=_THIRD),
    *_null("", "heads shuffled", _THIRD + " This null is too narrow for that reason."),
    *_null("layer_", "heads shuffled within their layer, so that a trend over layers stays in", _THIRD),
)

_WAVELENGTH = (
    "That the phase content causes the score: s_pos follows the wavelength whatever the head, so look at others."
)
_FREQUENCY_AGREEMENT = (
    Column("n", "Rotary pairs of the head.", "count", range="1 .. pairs",
        does_not_establish="An effective sample size: neighbouring frequencies are alike."),
    Column("spearman", "Rank correlation over the head's rotary pairs of im_share (weights) with s_pos (a prompt).",
        "correlation", range="-1 .. 1", source="FP 7 beside PS figure 1C", does_not_establish=_WAVELENGTH),
    *_null("", "the head's frequencies shuffled", "An exact level: only unshuffled neighbours are alike."),
    Column("turned_pct", "Share of the circular shifts of the frequencies with a correlation at or below spearman.",
        "share", range="0 .. 1", does_not_establish="A fine level: there are only as many shifts as pairs."),
    Column("others", "Mean correlation of this head's im_share with s_pos of all other heads.", "correlation",
        range="-1 .. 1", does_not_establish="A null of this head: it shows what all heads share over frequencies."),
)

_SIZE = "That the model needs it: remove it with ablate. Nor its size in logits: table_std has that of all together."
_PS6 = "PS 6 (the conjecture); the share is ours"
_SHARES = (
    Column("content",
        "Share of the squares in the table of logits, content of each block at the place of each block about its mean, "
        "that depends on the content alone. NaN where a window hides a block.", "share", range="0 .. 1", source=_PS6,
        also_known_as="main effect of content", does_not_establish=_SIZE),
    Column("position", "Share of the same squares that depends on the place alone.", "share", range="0 .. 1",
        source=_PS6, also_known_as="main effect of position", does_not_establish=_SIZE),
    Column("interaction",
        "Share of the same squares that is no sum of a function of the content and one of the place.", "share",
        range="0 .. 1", source=_PS6, does_not_establish=_SIZE),
    Column("table_std", "Standard deviation of the logits over these tables.", "logit", range="0 .. inf",
        does_not_establish="How much attention moves: that depends on the other keys too."),
)
LOGIT_SHARES = Table("logit_shares", "`tlspectral.positional.logit_shares`", (*_HEAD, *_SHARES))
POSITIONAL_SYMBOLIC = Table("positional_symbolic",
    "`tls.positional_symbolic`, frequency with `per_frequency`, query and draw with `by`; `tlspectral positional -o "
    "FOLDER` writes it as heads, queries, draws and frequencies, _prompt.parquet and _key.parquet",
    (*_HEAD, _FREQUENCY, replace(_QUERY, meaning="Of a task, index of the block that is asked about, from 0. Of a "
        "prompt, position of the token whose attention is scored.", source="PS B.5, Definition 2"), _DRAW, *SCORES))
MEDIAN_TESTS = Table("median_tests",
    "`tlspectral.positional.median_tests`; `tlspectral positional -o FOLDER` writes it as median_tests_prompt.parquet "
    "and median_tests_key.parquet", _MEDIANS)
_CONTRAST = (
    Column("score", "Which score is compared.", "label", range="s_pos, s_sym, exclusion_index"),
    *(Column(name, f"Mean of the score over heads of the {which} table.", "as the score", range="0 .. 1",
        does_not_establish="A typical head: heads differ more than means do.")
        for name, which in (("a", "first"), ("b", "second"))),
    Column("difference", "a less b.", "as the score", range="-1 .. 1", does_not_establish="That every head differs."),
    *(Column(name, f"{side} end of the interval of difference, by Student's t from leaving out one layer (two tasks on "
        "one model) or one draw (two models on one task) after another. NaN for fewer than three.", "as the score",
        range="-1 .. 1", does_not_establish="Anything about other tasks or models.")
        for name, side in (("low", "Low"), ("high", "High"))),
    Column("pvalue", "Two-sided p of the same t.", "probability", range="0 .. 1",
        does_not_establish="Anything about other tasks or models; it is small where neighbouring layers resemble."),
    Column("n", "Layers or draws behind the interval.", "count", range="1 .. inf"),
    Column("paired_by", "What is paired, and what the interval is over.", "label", range="head, over layers; draw"),
)
POSITIONAL_CONTRAST = Table("positional_contrast", "`tlspectral.positional.positional_contrast`", _CONTRAST)
BLOCK_ANSWERS = Table("block_answers", "`tlspectral.positional.task_answers`", (_DRAW, _QUERY, *_ANSWERS))
SCORE_AGREEMENT = Table("score_agreement",
    "`tlspectral.positional.score_agreement`; `tlspectral positional -o FOLDER` writes it as agreement_prompt.parquet "
    "and agreement_key.parquet", _AGREEMENT)
FREQUENCY_AGREEMENT = Table("frequency_agreement",
    "`tlspectral.positional.frequency_agreement`; `tlspectral positional -o FOLDER` writes it as "
    "frequency_agreement_prompt.parquet and frequency_agreement_key.parquet", (*_HEAD, *_FREQUENCY_AGREEMENT))
TABLES = (
    LOGIT_SHARES, POSITIONAL_SYMBOLIC, MEDIAN_TESTS, BLOCK_ANSWERS, POSITIONAL_CONTRAST, SCORE_AGREEMENT,
    FREQUENCY_AGREEMENT,
)
