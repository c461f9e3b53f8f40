"""FP section 7 and Table 3: how much of D_head's association with prev the RoPE phase accounts for."""

from collections.abc import Iterator

from tlspectral.stats import attenuation, partial_spearman
from tlspectral_studies.fingerprint.printed_pvalues import partial_pvalue
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables, needs_weights
from tlspectral_studies.fingerprint.statistics import spearman_table

_TABLE, _SECTION = "FP, Table 3", "FP, section 7"
# partial, with phase controls, attenuation in per cent by the hybrid and by the rank estimator.
_PRINTED = {
    "pythia-410m": ("+0.35", "+0.14", "61", "47"),
    "pythia-1.4b": ("+0.50", "+0.31", "38", "10"),
    "llama-3-8b": ("+0.33", "+0.006", "98", "70"),
}


def attenuations(tables: PublishedTables) -> Iterator[Claim]:
    """Table 3: the partial correlation before and after rope_imag_frac and freq_centroid are controls."""
    for name, (before, after, hybrid_share, rank_share) in _PRINTED.items():
        hybrid = attenuation(tables.heads[name])
        rank = attenuation(tables.heads[name], method="rank")
        yield Claim(f"table3/{name}/before", _TABLE, f"{name}: partial correlation", before, hybrid.before.statistic)
        yield Claim(f"table3/{name}/after", _TABLE, f"{name}: with phase controls", after, hybrid.after.statistic)
        yield Claim(
            f"table3/{name}/hybrid",
            "FP, Table 3 and Fig. 2b",
            f"{name}: attenuation, hybrid, %",
            hybrid_share,
            100 * hybrid.statistic,
        )
        yield Claim(
            f"table3/{name}/rank",
            _TABLE,
            f"{name}: attenuation, rank, %",
            rank_share,
            100 * rank.statistic,
            remark=f"{rank.before.statistic:+.3f} to {rank.after.statistic:+.3f}",
        )


def llama_residual(tables: PublishedTables) -> Iterator[Claim]:
    """Partial correlation on Llama with phase controls, by either estimator."""
    heads = tables.heads["llama-3-8b"]
    hybrid, rank = attenuation(heads).after, attenuation(heads, method="rank").after
    what = "llama-3-8b: {} with phase controls"
    freedom = "with n - 2 degrees of freedom; controls taken off, p is {:.3f}"
    for row, measure, text, value, remark in (
        ("p", "p of the partial correlation", "0.84", partial_pvalue(hybrid), freedom.format(hybrid.pvalue)),
        ("rank_after", "rank-based partial", "+0.075", rank.statistic, ""),
        ("rank_p", "p of the rank-based partial", "0.016", partial_pvalue(rank), freedom.format(rank.pvalue)),
    ):
        yield Claim(f"table3/llama-3-8b/{row}", _TABLE, what.format(measure), text, value, remark=remark)


def range_at_a_quarter(tables: PublishedTables) -> Iterator[Claim]:
    """The introduction's 47 to 61 % at 25 % RoPE and 70 to 98 % at 100 %, over estimators and models."""
    shares = {
        name: [100 * attenuation(tables.heads[name], method=method).statistic for method in ("hybrid", "rank")]
        for name in _PRINTED
    }
    quarter = shares["pythia-410m"] + shares["pythia-1.4b"]
    others = f"{' and '.join(f'{value:.0f}' for value in shares['pythia-1.4b'])} % on pythia-1.4b are left out"
    where, what = "FP, section 1, item 5", "attenuation at {} % RoPE over models and estimators, {}, %"
    yield Claim("section1/quarter/low", where, what.format(25, "smallest"), "47", min(quarter), if_differs=others)
    yield Claim("section1/quarter/high", where, what.format(25, "largest"), "61", max(quarter))
    yield Claim("section1/full/low", where, what.format(100, "smallest"), "70", min(shares["llama-3-8b"]))
    yield Claim("section1/full/high", where, what.format(100, "largest"), "98", max(shares["llama-3-8b"]))


def single_controls(tables: PublishedTables) -> Iterator[Claim]:
    """Partial correlations with one phase control at a time."""
    printed = (
        ("pythia-410m", "freq_centroid", "+0.35"),
        ("llama-3-8b", "freq_centroid", "0.00"),
        ("llama-3-8b", "rope_imag_frac", "+0.32"),
    )
    for name, control, text in printed:
        heads = tables.heads[name]
        partial = partial_spearman(heads["D_head"], heads["prev"], heads[["dir_frac", control]])
        what = f"{name}: partial correlation with {control} as the only phase control"
        yield Claim(f"section7/{name}/{control}", _SECTION, what, text, partial.statistic)


def phase_against_behaviour(tables: PublishedTables) -> Iterator[Claim]:
    """Correlations of prev with the phase share, and with the share at high frequencies."""
    for name, text in (("pythia-410m", "+0.53"), ("pythia-1.4b", "+0.42"), ("llama-3-8b", "+0.50")):
        rho = spearman_table(tables.heads[name], "rope_imag_frac", "prev")["statistic"].iloc[0]
        what = f"{name}: rank correlation of rope_imag_frac with prev"
        yield Claim(f"section7/{name}/phase", _SECTION, what, text, float(rho))
    high = spearman_table(tables.heads["llama-3-8b"], "hi_freq_dir", "prev")["statistic"].iloc[0]
    what = "llama-3-8b: rank correlation of the share at high frequencies with prev"
    yield Claim("section7/llama-3-8b/high", _SECTION, what, "+0.68", float(high))


def placebos(tables: PublishedTables) -> Iterator[Claim]:
    """Pseudo-phase where there is no RoPE, and permuted pairings: both need W_Q and W_K."""
    pseudo, permuted = (
        "tlspectral_studies.fingerprint.statistics.placebos.pseudo_rope",
        "tlspectral_studies.fingerprint.statistics.placebos.permuted_pairing",
    )
    printed = [
        (f"pseudo/{name}", f"{name}: rank correlation of the pseudo-phase with prev", text, pseudo)
        for name, text in (("gpt2", "-0.14"), ("opt-1.3b", "-0.06"), ("gpt-neo-1.3b", "-0.09"))
    ]
    printed += [
        ("pseudo/low", "attenuation by pseudo-phase, smallest, %", "4", pseudo),
        ("pseudo/high", "attenuation by pseudo-phase, largest, %", "22", pseudo),
        ("permuted/low", "mean attenuation with permuted pairings, smaller, %", "31", permuted),
        ("permuted/high", "mean attenuation with permuted pairings, larger, %", "38", permuted),
        ("permuted/pythia-410m/p", "pythia-410m: p of the true pairing, 50 permutations", "0.039", permuted),
        ("permuted/pythia-1.4b/p", "pythia-1.4b: p of the true pairing, 50 permutations", "0.12", permuted),
    ]
    for row, what, text, function in printed:
        yield needs_weights(f"section7/{row}", _SECTION, what, text, function, "needs the columns of W_Q and W_K")
