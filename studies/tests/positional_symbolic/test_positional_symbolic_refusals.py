"""What the study refuses: the call, and the words that say what was wrong and what to do."""

import functools
import inspect
import math
from dataclasses import replace

import pandas as pd
import pytest
import zoo
from canonical_preset import SHORT
from positional_tables import joined
from tlspectral_studies.positional_symbolic import figures
from tlspectral_studies.positional_symbolic.agreement import frequency_agreement, score_agreement
from tlspectral_studies.positional_symbolic.canonical import CanonicalHeads, CanonicalRun, answer_shape, canonical_sweep
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask
from tlspectral_studies.positional_symbolic.exact_heads import positional_head, sufficient_logit_scale, symbolic_head
from tlspectral_studies.positional_symbolic.medians import median_tests
from tlspectral_studies.positional_symbolic.peak_weights import positional_peak_weight, symbolic_peak_weight
from tlspectral_studies.positional_symbolic.traces import attention_traces, frequency_norms

import tlspectral as tls
from tlspectral.errors import BadHead, UnsupportedArchitecture

INDEX, RETRIEVAL = CanonicalTask("index"), CanonicalTask("retrieval")
FIRST, *BLOCKS, LAST = (zoo.prompt(batch=1, length=24)[0] % 32).split(4)
PROMPT = tls.positional.BlockPrompt(FIRST, BLOCKS, LAST)
RUNS = pd.DataFrame({"task": ["index"], "n_frequencies": 1, "angle": 0.5, "seed": 0, "position": 0, "n": 4, "step": 0})
RUNS = RUNS.assign(correct=2, accuracy=0.5, most_frequent=0.1)
PATHS = pd.DataFrame({"angle": [0.5], "seed": 0, "step": 0, "kind": "key", "token": 0, "label": 0, "x": 0.0, "y": 0.0})
STATISTICS = pd.DataFrame({"score": ["s_pos"], "column": "D_head", "null_low": 0.0, "null_high": 0.1})


@functools.cache
def model(positions="rope"):
    return tls.load_model(f"tiny-{positions}")


def traced(positions="rope", heads=((0, 1),), swap=(1, 3), **options):
    return inspect.unwrap(attention_traces)(model(positions), PROMPT, list(heads), swaps=[swap], **options)


def normed(positions="rope", head=(0, 1)):
    return frequency_norms(model(positions), PROMPT, [head])


def sweep(tasks=("index",), **options):
    return canonical_sweep(tasks, **{"preset": SHORT, "angles": (0.0,), "seeds": 1, **options})


def head_rows(**columns):
    table = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "rope_imag_frac": 0.5, "D_head": 0.5, "prev": 0.5})
    return table.assign(**columns)


def score_rows():
    return head_rows()[["layer", "head"]].assign(s_pos=[0.1, 0.2, 0.3], s_sym=0.5, exclusion_index=0.5)


def frequency_rows(**columns):
    index = pd.MultiIndex.from_product([range(2), range(2), range(3)], names=["layer", "head", "frequency"])
    return index.to_frame(index=False).assign(**columns)


REFUSED = {
    **{
        f"{name} of {sizes}": (lambda name=name, sizes=sizes: CanonicalTask(name, *sizes), "task needs length")
        for name, sizes in (
            ("index", (0,)),
            ("index", (4, 0)),
            ("retrieval", (4, 1)),
            ("partial_induction", (1,)),
            ("partial_induction", (4, 4, 1)),
        )
    },
    "task": (lambda: CanonicalTask("induction"), "no canonical task"),
    # training and sweep
    "no run": (lambda: CanonicalHeads(INDEX, []), "same number of frequencies"),
    "no frequency": (lambda: CanonicalHeads(INDEX, [CanonicalRun(())]), "same number of frequencies"),
    "unequal runs": (lambda: CanonicalHeads(INDEX, [CanonicalRun((0.1,)), CanonicalRun((0.1, 0.2))]), "same number"),
    "no steps": (lambda: replace(SHORT, steps=0), "at least 1"),
    "no log": (lambda: replace(SHORT, log_every=0), "at least 1"),
    "half a batch": (lambda: replace(SHORT, training_samples=31), "do not fill one batch"),
    "task of a sweep": (lambda: sweep(("induction",)), "no canonical task"),
    "task twice": (lambda: sweep(("index", "index")), "each once"),
    "no angles": (lambda: sweep(angles=()), "at least one"),
    "no seeds": (lambda: sweep(seeds=0), "seeds=0"),
    "preset": (lambda: sweep(preset="fast"), "no preset"),
    "edge": (lambda: answer_shape(RUNS, edge=3), "edge is 3"),
    "shape column": (lambda: answer_shape(RUNS.drop(columns="correct")), "no column correct"),
    # figures
    **{
        f"{draw.__name__}: {said}": (lambda draw=draw, table=table: draw(table), said)
        for draw, whole, column in (
            (figures.accuracy_against_angle, RUNS, "most_frequent"),
            (figures.accuracy_against_position, RUNS, "correct"),
            (figures.accuracy_while_learning, RUNS, "step"),
            (figures.query_key_paths, PATHS, "label"),
        )
        for table, said in ((whole.drop(columns=column), f"no column {column}"), (whole.iloc[:0], "no rows"))
    },
    "frequencies of an arm": (lambda: figures.accuracy_against_angle(RUNS.assign(n_frequencies=3)), "not among"),
    "bins": (lambda: figures.accuracy_against_position(RUNS, bin_width=0), "bin_width is 0"),
    "two seeds": (lambda: figures.query_key_paths(pd.concat([PATHS, PATHS.assign(seed=1)])), "seeds 0, 1"),
    "statistics": (lambda: figures.score_agreement(joined(), STATISTICS), "no column spearman, null_share"),
    "medians of a head table": (
        lambda: median_tests(head_rows()),
        "scores has no column s_pos, s_sym: give a",
    ),
    "medians of nothing": (lambda: median_tests(score_rows()[:0]), "table of scores has no rows"),
    "medians by draw": (lambda: median_tests(pd.concat([score_rows()] * 2)), "one row per head"),
    # theorems
    "no key": (lambda: positional_peak_weight(1, 0.1), "two tokens at least.*n=1"),
    "no symbol": (lambda: symbolic_peak_weight(-3), "two tokens at least.*n=-3"),
    "no angle": (lambda: positional_peak_weight(8, math.nan), "finite number of radians; found nan"),
    # agreement with weights
    "agreement without a column": (
        lambda: score_agreement(score_rows(), head_rows().drop(columns="prev")),
        "table of heads has no column prev",
    ),
    "agreement without scores": (
        lambda: score_agreement(score_rows()[["layer", "head"]], head_rows()),
        "none of the columns s_pos",
    ),
    "agreement with another model": (lambda: score_agreement(score_rows(), head_rows(layer=100)), "of one model"),
    "agreement without shares": (
        lambda: frequency_agreement(frequency_rows(s_pos=0.5), frequency_rows(s_pos=0.5)),
        "table of weights has no column im_share",
    ),
    "agreement of other frequencies": (
        lambda: frequency_agreement(frequency_rows(s_pos=0.5).iloc[1:], frequency_rows(im_share=0.5)),
        "different numbers",
    ),
    # traces
    "mode": (lambda: traced(mode="keys"), "'prompt', 'key'"),  # past the check of annotations
    "swap": (lambda: traced(swap=(2, 2)), "blocks 2 and 2 cannot swap"),
    "no heads": (lambda: traced(heads=()), "no heads were given"),
    "head": (lambda: normed(head=(0, 9)), "L0H9"),
    "frequency": (lambda: traced(frequencies=[8, 1]), "frequency 8.*0 to 7"),
    "negative": (lambda: traced(frequencies=[-1]), "those of layer 0"),
    "norms without RoPE": (lambda: normed("ape"), "layer 0 has no rotary positions"),
    "traces without RoPE": (lambda: traced("ape", frequencies=[0]), "layer 0 has no rotary positions"),
    # exact heads: from 2 pi / n on there are several maxima, exactly where a period divides an offset
    "a lap": (lambda: positional_head(INDEX, theta=2 * math.pi / 32), "not above all others"),
    "two laps": (lambda: positional_head(INDEX, theta=4 * math.pi / 32), "not above all others"),
    "scale": (lambda: sufficient_logit_scale(5, -0.1), "no factor"),
    "backwards": (lambda: symbolic_head(RETRIEVAL, theta=-0.001), "has to be in"),
    "too fast": (lambda: symbolic_head(RETRIEVAL, theta=1.001 * 2 * math.pi / (16 * 31)), "has to be in"),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(call, said):
    with pytest.raises((ValueError, BadHead, UnsupportedArchitecture), match=said):
        call()
