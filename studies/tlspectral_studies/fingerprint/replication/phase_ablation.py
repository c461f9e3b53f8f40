"""FP section 8 and Fig. 3: what removing the rope phase of one head costs."""

from collections.abc import Iterator

from tlspectral.stats import benjamini_hochberg
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables, needs_weights

_WHERE, _FIGURE = "FP, section 8", "FP, Fig. 3"
# Induction loss intact and ablated, as printed; the tables hold differences alone.
LOSSES = {"pythia-410m": (0.52, 2.24), "pythia-1.4b": (0.56, 1.11), "llama-3-8b": (0.30, 0.91)}
_HEADS = {"pythia-410m": (5, 2), "pythia-1.4b": (1, 11), "llama-3-8b": (14, 26)}
_SMALL = 0.01  # nats
_STRONG = 0.5  # prev


def largest_effects(tables: PublishedTables) -> Iterator[Claim]:
    """The head with the largest effect, its detector rank, and how often a random head would rank as high."""
    ranks = {"pythia-410m": "1", "pythia-1.4b": "1", "llama-3-8b": "2"}
    printed = {"pythia-410m": "0.0026", "pythia-1.4b": "0.0026", "llama-3-8b": "0.0020"}  # 1/384, 1/384, 2/1024
    joint = 1.0
    for name, (intact, ablated) in LOSSES.items():
        heads = tables.heads[name]
        top = heads.loc[heads["dInd_rope"].idxmax()]
        layer, head = _HEADS[name]
        rank = float((heads["prev"] >= top["prev"]).sum())
        joint *= rank / len(heads)
        yield Claim(
            f"section8/{name}/head",
            _WHERE,
            f"{name}: largest effect is on head {layer}.{head}",
            "1",
            float((top["layer"], top["head"]) == (layer, head)),
            remark="1 is yes",
        )
        yield Claim(f"section8/{name}/rank", _WHERE, f"{name}: rank by prev of that head", ranks[name], rank)
        yield Claim(
            f"section8/{name}/p",
            _WHERE,
            f"{name}: share of heads that rank as high, the permutation p",
            printed[name],
            rank / len(heads),
            remark=f"{ranks[name]}/{len(heads)}",
        )
        yield Claim(
            f"section8/{name}/loss",
            _WHERE,
            f"{name}: induction loss without its phase, nats",
            f"{ablated:.2f}",
            intact + float(top["dInd_rope"]),
            remark=f"the intact loss is the paper's, {intact:.2f}: the table holds differences",
        )
    what = "joint probability of the three ranks"
    yield Claim("section8/joint", _WHERE, what, "1e-8", joint)


def flagged_heads(tables: PublishedTables) -> Iterator[Claim]:
    """Behaviour and D_head of the heads of section 8."""
    printed = (("pythia-410m", "prev", "0.95"), ("pythia-410m", "D_head", "0.61"), ("llama-3-8b", "prev", "0.65"))
    for name, column, text in (*printed, ("llama-3-8b", "D_head", "0.61")):
        value = tables.heads[name].set_index(["layer", "head"]).loc[_HEADS[name], column]
        layer, head = _HEADS[name]
        yield Claim(f"section8/{name}/{column}", _WHERE, f"{name}: {column} of {layer}.{head}", text, float(value))
    llama = tables.heads["llama-3-8b"]
    first = float(llama.loc[llama["prev"].idxmax(), "layer"])
    yield Claim("section8/llama/first", _WHERE, "llama-3-8b: layer of the strongest head", "0", first)


def concentration(tables: PublishedTables) -> Iterator[Claim]:
    """Share of heads with a small effect."""
    shares = [100 * float((tables.heads[name]["dInd_rope"].abs() < _SMALL).mean()) for name in LOSSES]
    what = "% of heads with an effect below 0.01 nats, {} of three models"
    yield Claim("section8/small/low", _WHERE, what.format("smallest"), "92", min(shares))
    yield Claim("section8/small/high", _WHERE, what.format("largest"), "99", max(shares))


def other_strong_heads(tables: PublishedTables) -> Iterator[Claim]:
    """Effects of the other heads with prev above one half, which the paper calls about 0."""
    for name in LOSSES:
        heads = tables.heads[name]
        rank = heads["dInd_rope"].rank(ascending=False).astype(int)
        others = heads.loc[(heads["prev"] > _STRONG) & (heads["dInd_rope"] < heads["dInd_rope"].max())]
        effects = others["dInd_rope"].sort_values(ascending=False)
        listed = ", ".join(f"{value:+.2f} (rank {rank[index]})" for index, value in effects.items())
        yield Claim(
            f"section8/{name}/others",
            _WHERE,
            f"{name}: largest |effect| of the other heads with prev > 0.5, nats, about 0",
            "~0.0",
            float(effects.abs().max()),
            if_differs=f"effects {listed}",
        )


def weak_heads(tables: PublishedTables) -> Iterator[Claim]:
    """Largest effect of a head that does not attend to the previous token."""
    worst = max(
        float(heads.loc[heads["prev"] < _STRONG, "dInd_rope"].max())
        for heads in (tables.heads[name] for name in LOSSES)
    )
    yield Claim("section8/low_prev", _WHERE, "largest effect of a head with prev < 0.5, nats", "<= 0.17", worst)


def aggregate_correlations(tables: PublishedTables) -> Iterator[Claim]:
    """Correlations of effects with spectral metrics over all heads, which the paper calls null."""
    table = tables.correlations(LOSSES, ["D_head", "dir_frac", "rope_imag_frac"], "dInd_rope")
    table["q"] = benjamini_hochberg(table["pvalue"]).q
    lowest = table["pvalue"].idxmin()
    least = f"{table.loc[lowest, 'model']}, {table.loc[lowest, 'column']}: rho {table.loc[lowest, 'statistic']:+.2f}"
    yield Claim(
        "section8/aggregate",
        _WHERE,
        "smallest q (BH over 9) of rank correlations of the effect with spectral metrics, null",
        "> 0.05",
        float(table["q"].min()),
        remark=f"{least}, p = {table.loc[lowest, 'pvalue']:.3f}",
    )


def kernels(tables: PublishedTables) -> Iterator[Claim]:
    """Fig. 3: where four kernels of Pythia-410m peak, and what the ablation does to the peak of 5.2."""
    curves = tables.kernels
    intact = curves.loc[~curves["ablated"]]
    peak = intact.loc[intact.groupby(["layer", "head"])["score"].idxmax(), "offset"]
    at_minus_one = curves.loc[(curves["layer"] == 5) & (curves["head"] == 2) & (curves["offset"] == -1)]
    score = at_minus_one.set_index("ablated")["score"]
    ablated = curves.loc[curves["ablated"]]
    moved = int(ablated.loc[ablated["score"].idxmax(), "offset"])
    what = "pythia-410m: kernels, of four heads, that peak at offset -1"
    yield Claim("fig3/peaks", f"{_FIGURE}, left", what, "4", float((peak == -1).sum()))
    yield Claim(
        "fig3/flattened",
        f"{_FIGURE}, right",
        "pythia-410m: change of the score of 5.2 at offset -1 without its phase, flattened",
        "< 0",
        float(score[True] - score[False]),
        remark=f"{score[False]:.2f} to {score[True]:.2f}; the peak moves to offset {moved}",
    )


def losses(tables: PublishedTables) -> Iterator[Claim]:
    """Intact losses and the error of the sum of parts: neither is in a table."""
    for name, (intact, _) in LOSSES.items():
        yield needs_weights(
            f"section8/{name}/intact",
            _WHERE,
            f"{name}: induction loss of the intact model, nats",
            f"{intact:.2f}",
            "tlspectral.tasks.induction_loss",
        )
    what = "largest error of scores as symmetric plus directional part, float32"
    yield needs_weights("section8/parts", _WHERE, what, "<= 6e-6", "tlspectral.hooks.ablate")
