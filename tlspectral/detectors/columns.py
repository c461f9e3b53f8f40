"""The columns of `detect_heads`."""

from tlspectral.tables import COLUMNS, Column, Table

DETECTORS = ("prev", "dup", "ind")
PROMPT_DETECTORS = ("prev", "dup", "self")

_FIRST_COPY = (
    Column("prev_first",
        "Mean attention from each query of the first copy, the first one left out, to the token before it. On the "
        "sequences of prev.", "attention probability", range="0 .. 1",
        also_known_as="previous-token score without repetition",
        does_not_establish="Its chance level differs from that of prev, since its queries see fewer keys."),
    Column("prev_first_se", "Standard error of prev_first over sequences.", "attention probability", range="0 .. inf",
        does_not_establish="Sampling of sequences only: neither another task nor another seed of the model."),
)  # fmt: skip


def _of_prompts(name: str, target: str, also_known_as: str) -> tuple[Column, Column]:
    return (
        Column(name,
            f"Mean attention from a query to {target}, over sequences and the queries that count. NaN where no query "
            "counts. The chance level is in df.attrs.", "attention probability", range="0 .. 1",
            also_known_as=also_known_as,
            does_not_establish="That the head looks for this: attention follows content too, and it is not shown that "
            "the output depends on it."),
        Column(f"{name}_se", f"Standard error of {name} over sequences, NaN for fewer than two that count.",
            "attention probability", range="0 .. inf",
            does_not_establish="Sampling of sequences only: neither other prompts nor another seed of the model."),
    )  # fmt: skip


_PATTERN = (
    Column("pattern",
        "Mean over sequences, and over the queries that `pattern=` marks a key of, of the attention to the marked "
        "keys, each times its weight. Only with `pattern=`. The chance level is in df.attrs.", "attention probability",
        range="-inf .. inf; 0 .. 1 for weights of 0 and 1",
        does_not_establish="That the output depends on this attention."),
    Column("pattern_se", "Standard error of pattern over sequences, NaN for fewer than two that count.",
        "attention probability", range="0 .. inf",
        does_not_establish="Sampling of sequences only: neither other prompts nor another seed of the model."),
)  # fmt: skip
_HEAD = (COLUMNS["layer"], COLUMNS["head"])
_DETECTOR_COLUMNS = tuple(COLUMNS[f"{name}{end}"] for name in DETECTORS for end in ("", "_se"))
_PROMPT_COLUMNS = (
    *_of_prompts("prev", "the token before it, from position 2 on", "previous-token score"),
    *_of_prompts("dup", "earlier tokens equal to its own, from position 2 on where there are any",
        "duplicate-token score"),
    *_of_prompts("self", "its own token, from position 2 on", "attention to the current token"),
)  # fmt: skip
DETECT_HEADS = Table("detect_heads", "`tls.detect_heads`", (*_HEAD, *_DETECTOR_COLUMNS, *_FIRST_COPY, *_PATTERN))
DETECT_HEADS_ON_PROMPTS = Table(
    "detect_heads.prompts", "`tls.detect_heads` with `prompts=`", (*_HEAD, *_PROMPT_COLUMNS, *_PATTERN)
)
TABLES = (DETECT_HEADS, DETECT_HEADS_ON_PROMPTS)
