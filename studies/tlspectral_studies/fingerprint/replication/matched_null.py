"""FP section 3: the random-orientation null of GPT-2."""

from collections.abc import Iterator

from tlspectral.stats import partial_spearman
from tlspectral_studies.fingerprint.published import PUBLISHED_HEADS
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables, needs_weights

_WHERE = "FP, section 3"
_HEADS = {
    "gpt2": "144",
    "opt-1.3b": "768",
    "gpt-neo-1.3b": "384",
    "bloom-1b1": "384",
    "pythia-410m": "384",
    "pythia-1.4b": "384",
    "llama-3-8b": "1024",
}


def numbers_of_heads(tables: PublishedTables) -> Iterator[Claim]:
    """Numbers of heads per model."""
    for name in PUBLISHED_HEADS:
        yield Claim(f"heads/{name}", _WHERE, f"{name}: heads", _HEADS[name], float(len(tables.heads[name])))


def null_levels(tables: PublishedTables) -> Iterator[Claim]:
    """Mean over GPT-2's heads of each head's own null mean."""
    heads = tables.heads["gpt2"]
    for metric, printed in (("dir_frac", "0.707"), ("D_head", "0.608")):
        yield Claim(
            f"null/{metric}",
            _WHERE,
            f"GPT-2: {metric} of random orientations, mean over heads",
            printed,
            float(heads[f"{metric}_null_mean"].mean()),
        )


def heads_off_the_null(tables: PublishedTables) -> Iterator[Claim]:
    """GPT-2 heads more than two standard deviations of their null away from its mean."""
    heads = tables.heads["gpt2"]
    by_direction, by_rotation = heads["dir_frac_z"].abs() > 2, heads["D_head_z"].abs() > 2
    counted = (
        ("either", "by dir_frac or D_head", "141", by_direction | by_rotation),
        ("dir_frac", "by dir_frac", "140", by_direction),
    )
    for name, how, printed, off in counted:
        yield Claim(f"null/off/{name}", _WHERE, f"GPT-2: heads with |z| > 2 {how}", printed, float(off.sum()))


def null_referenced_partial(tables: PublishedTables) -> Iterator[Claim]:
    """The partial correlation of Table 2 with metrics as deviations from their null instead of raw ones."""
    heads = tables.heads["gpt2"]
    above = {metric: heads[metric] - heads[f"{metric}_null_mean"] for metric in ("D_head", "dir_frac")}
    partial = partial_spearman(above["D_head"], heads["prev"], above["dir_frac"]).statistic
    z = partial_spearman(heads["D_head_z"], heads["prev"], heads["dir_frac_z"])
    yield Claim(
        "null/partial",
        _WHERE,
        "GPT-2: partial correlation with null-referenced metrics",
        "-0.204",
        partial,
        remark=f"as deviations from the null mean; with z-scores {z.statistic:.3f} (p = {z.pvalue:.2f})",
    )


def self_checks(tables: PublishedTables) -> Iterator[Claim]:
    """Error of reconstructed scores, which needs a model."""
    what = "largest error of scores reconstructed from M, learned-absolute positions"
    yield needs_weights("check/scores", _WHERE, what, "<= 1e-4", "tlspectral.heads.verify_scores")
