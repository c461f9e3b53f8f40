"""What the study refuses: the call, and the words that say what was wrong and what to do."""

from inspect import unwrap

import numpy as np
import pandas as pd
import pytest
import zoo
from constrained_preset import TINY, model
from tlspectral_studies.fingerprint.constrained import (
    ARMS,
    Arm,
    constrained_grid,
    formation,
    formation_tests,
    phase_penalty,
    previous_token_heads,
    rerouting,
    symmetric_penalty,
)
from tlspectral_studies.fingerprint.figures.checkpoints import checkpoint_acts
from tlspectral_studies.fingerprint.figures.replication import position_kernels
from tlspectral_studies.fingerprint.history_questions import eventual_head_rank, formation_crossing, median_leaves_null
from tlspectral_studies.fingerprint.published import published_checkpoints, published_heads, published_kernels
from tlspectral_studies.fingerprint.replication import scheme_contrast
from tlspectral_studies.fingerprint.replication.claims import Claim
from tlspectral_studies.fingerprint.statistics import (
    another_model,
    class_test,
    hypergeometric_overlap,
    intraclass_correlation,
    leave_one_model_out,
    mann_whitney,
    nested_r_squared,
    permuted_pairing,
    placebo_attenuation,
    pseudo_rope,
    spearman_table,
    top_k_sensitivity,
    triage,
)

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint


def heads(n=8, **changes):
    """Columns that a statistic may want, each in another order."""
    rng = np.random.default_rng(0)
    names = ("prev", "D_head", "dir_frac", "rope_imag_frac", "freq_centroid")
    columns = {name: rng.uniform(size=n) for name in names}
    return pd.DataFrame({"layer": 0, "head": range(n), **columns, **changes})


def track(**changes):
    """Two checkpoints of one head."""
    columns = {"step": [0, 10], "prev": [0.1, 0.9], "rope_imag_frac_pct": [0.1, 0.9], "n_heads": 4}
    return pd.DataFrame({**columns, **changes})


def acts(**changes):
    """Two checkpoints with what the figure of the three acts draws."""
    median = {f"D_head_{name}": 0.5 for name in ("median", "null_median", "null_low", "null_high")}
    return track(**{**median, **changes})


def run(**changes):
    """An evaluation, a head and a kernel of one run, in one row."""
    row = {"arm": "rope_free", "seed": 0, "step": 5, "layer": 0, "head": 1, "prev": 0.9, "offset": -1, "score": 1.0}
    return pd.DataFrame([{**row, "ce_pred": 1.0, "ind_best": 0.9, "last_step": 5, "formed_both": 5.0, **changes}])


def twice(table):
    return pd.concat([table, table], ignore_index=True)


def two_models(name="model"):
    return pd.concat([heads(**{name: 1}), heads(**{name: 2})], ignore_index=True)


def draws(**attrs):
    table = heads().assign(draw=0)
    table.attrs = attrs
    return table


INFINITE = heads(dir_frac=np.inf)
REFUSED = {
    # published tables
    "heads": (lambda: published_heads("gpt3"), r"'gpt3': there are gpt2, .*llama-3-8b"),
    "history": (lambda: published_checkpoints("gpt2"), "'gpt2': there are pythia-410m, pythia-160m"),
    # history questions
    "no prev": (lambda: formation_crossing(track().drop(columns="prev")), r"no column prev.*HeadHistory\.track"),
    "step names": (lambda: formation_crossing(track(step=["base", "tuned"])), "'step' holds names such as 'base'"),
    "steps twice": (lambda: formation_crossing(track(step=[0, 0])), "several rows of step 0"),
    "NaN": (lambda: formation_crossing(track(prev=[0.1, np.nan])), "'prev' is NaN in row 1"),
    "no rows": (lambda: formation_crossing(track()[:0]), "no rows"),
    "no median": (lambda: median_leaves_null(track()), "no column D_head_median"),
    "no percentile": (lambda: eventual_head_rank(track()), "no column prev_pct"),
    # figures
    "no model": (lambda: checkpoint_acts({}), "one to 4 models, found 0"),
    "five models": (lambda: checkpoint_acts({str(place): acts() for place in range(5)}), "found 5"),
    "acts NaN": (lambda: checkpoint_acts({"a": acts(D_head_median=np.nan)}), "of a has NaN in column 'D_head_median'"),
    "kernels": (lambda: position_kernels(published_kernels().query("ablated")), "found 0"),
    # statistics of one table
    "no scores": (lambda: triage(heads(), scores=()), "at least one score"),
    "k of 0": (lambda: triage(heads(), ks=(0,)), "k of at least 1"),
    "no layer": (lambda: triage(heads().drop(columns="layer")), r"no column \['layer'\]"),
    "pair": (lambda: spearman_table(heads(), ["D_haed"], ["prev"]), "no column 'D_haed': did you mean 'D_head'"),
    "words": (lambda: spearman_table(heads(name="L0H0"), ["name"], ["prev"]), "'name' must hold numbers"),
    "clusters of a layer": (lambda: intraclass_correlation(heads(kv_head=0), "prev", "kv_head"), "numbered anew"),
    "clusters of nothing": (lambda: intraclass_correlation(heads(), "prev", ()), "at least one cluster"),
    "pair of two models": (
        lambda: spearman_table(two_models(), ["D_head"], ["prev"]),
        "2 values of model.* must be of one model",
    ),
    "pair of a table twice": (lambda: spearman_table(twice(heads()), ["D_head"], ["prev"]), "several rows for layer 0"),
    "class of two models": (
        lambda: class_test(two_models(), threshold=0.5),
        "2 values of model.* must be of one model",
    ),
    "class without": (lambda: class_test(heads().drop(columns="dir_frac"), threshold=0.5), r"no column \['dir_frac'\]"),
    "clusters of two models": (lambda: intraclass_correlation(two_models(), "prev"), "2 values of model"),
    "clusters of two steps": (lambda: intraclass_correlation(two_models("step"), "prev"), "2 values of step"),
    "clusters of infinite": (lambda: intraclass_correlation(INFINITE, "dir_frac"), "holds infinite values"),
    "class of infinite": (lambda: class_test(INFINITE, threshold=0.5), "infinite"),
    "fit of infinite": (lambda: nested_r_squared(INFINITE, "prev", "dir_frac", "D_head"), "infinite"),
    "fit of nothing": (lambda: nested_r_squared(heads(), "prev", "dir_frac", []), "at least one column"),
    "empty y": (lambda: mann_whitney([1, 2], [np.nan]), "group y holds no numbers"),
    "infinite": (lambda: mann_whitney([np.inf], [1]), "infinite"),
    # past the check of annotations
    "alternative": (lambda: unwrap(mann_whitney)([1], [2], alternative="two.sided"), "alternative"),
    "overlap of too many": (lambda: hypergeometric_overlap(10, 11, 2, 1), "do not fit into a population of 10"),
    "overlap of none": (lambda: hypergeometric_overlap(10, 3, -1, 0), "do not fit"),
    "overlap too large": (lambda: hypergeometric_overlap(10, 3, 2, 3), "have 0 to 2 in common, and cannot have 3"),
    # several models
    "unmatched": (lambda: leave_one_model_out({"a": 1.0, "b": 2.0}, {"a": 1, "c": 2}), r"models \['b', 'c'\] have a"),
    "one group": (lambda: leave_one_model_out({"a": 1.0, "b": 2.0}, {"a": 1, "b": 1}), "two groups are compared"),
    "few heads": (
        lambda: top_k_sensitivity({"big": heads(20), "small": heads()}, {"big": "a", "small": "b"}, ks=(10,)),
        "small: k=10, but only 8 heads have",
    ),
    "even k": (lambda: another_model(heads(), k=4), "k=4 is even"),
    "no tables": (lambda: scheme_contrast({}), "at least one"),
    "d": (lambda: scheme_contrast({"d": heads().drop(columns="prev")}), "^d: "),
    "claim": (lambda: Claim("id", "where", "what", "about half", 0.5).verdict, "not a published number"),
    # placebos
    "no RoPE": (lambda: permuted_pairing(zoo.shared("bridge", "gpt2")), r"no layer with rotary positions.*pseudo_rope"),
    "RoPE": (lambda: pseudo_rope(tls.load_model("tiny-rope")), r"layer 0 of tiny-rope has.*permuted_pairing"),
    "some RoPE": (lambda: pseudo_rope(zoo.shared("bridge", "smollm3")), r"layer \d of .* has rotary positions"),
    "no draws": (lambda: permuted_pairing(tls.load_model("tiny-rope"), draws=0), "at least one draw"),
    "lacks heads": (lambda: placebo_attenuation(heads(), draws().iloc[:7]), "draw 0 lacks 1 of 8 heads, such as L0H7"),
    "another": (
        lambda: placebo_attenuation(draws(model="one").drop(columns="draw"), draws(model="other")),
        "head table was made with model one, the draws with model other",
    ),
    "placebo without phase": (
        lambda: placebo_attenuation(heads().drop(columns="rope_imag_frac"), draws()),
        "table of heads has no column rope_imag_frac: give a table of analyze_heads",
    ),
    "not draws": (lambda: placebo_attenuation(heads(), heads()), "draws has no column draw.*permuted_pairing"),
    "heads twice": (
        lambda: placebo_attenuation(twice(heads()), draws()),
        "table of heads has several rows for layer 0, head 0",
    ),
    # constrained training
    "no phase": (lambda: phase_penalty(model("standard")), "without rotary positions"),
    "half a constraint": (lambda: Arm("mine", "rotary", symmetric_penalty), "give both, or neither"),
    "evaluations": (
        lambda: formation(run().drop(columns=["ce_pred", "ind_best"]), vocabulary=32),
        "evaluations has no column ce_pred, ind_best",
    ),
    "runs twice": (lambda: formation(twice(run()), vocabulary=32), r"arm rope_free, seed 0 has several .*step 5\)"),
    "formation": (lambda: formation_tests(run()), "formation has no column formed_loss"),
    "kernel": (lambda: rerouting(run(), run(head=0)), "kernels has none of L0H1 at step 5"),
    "kernels twice": (lambda: rerouting(run(), twice(run())), "several rows for one step, layer, head, offset"),
    "heads of two runs": (lambda: previous_token_heads(twice(run())), "several rows for one step, layer, head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    call, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "huge"}, "'huge' is no preset; there are paper, quick"),
        ({"arms": ["rope_anti"]}, "'rope_anti' is no arm; there are ape_free, ape_sym"),
        ({"arms": []}, "no arms were given"),
        ({"arms": ["ape_free", ARMS["ape_free"]]}, "arm 'ape_free' comes twice"),
        ({"seeds": 0}, "seeds=0: a grid needs one"),
        ({"until": 0}, "until=0: name a step after the start, of 6"),
    ],
)
def test_what_makes_no_grid_leaves_no_folder(tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        constrained_grid(tmp_path / "grid", **{"preset": TINY, **given})
    assert not (tmp_path / "grid").exists()


@pytest.mark.slow
def test_a_grid_of_another_preset_is_refused(tiny_grid):
    with pytest.raises(IncompatibleCheckpoint, match="was made with other settings"):
        constrained_grid(tiny_grid[0], "quick", seeds=2)
