"""Models whose rotations have moved: proved, beside the ordinary model they are merged to, and in transformers' own."""

import functools

import numpy as np
import torch
import zoo
from ablation_runs import logits
from positional_measurements import block_prompt, differ, measured
from spectral_zoo import move

import tlspectral as tls
from tlspectral.heads import analyze_heads, frequency_table
from tlspectral.heads.operators.verification import verify_scores
from tlspectral.spectral_rope import merge, to_spectral

from .rows import asked, rotating_right

tabulated = functools.partial(analyze_heads, null_draws=4, detectors=False)


def assert_tables_agree(found, expected, *, rtol, atol):
    """Numbers to a tolerance, the rest exactly."""
    assert list(found) == list(expected)
    for name in found:
        if found[name].dtype.kind == "f":
            np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol, err_msg=name)
        else:
            assert found[name].equals(expected[name]), name


@functools.lru_cache(maxsize=1)
def moved_of(row):
    return move(to_spectral(row.model, log_omega=False))


@functools.lru_cache(maxsize=1)
def merged_of(row):
    """A spectral model whose gain and phase have moved, and the ordinary one that it is merged to."""
    spectral = move(to_spectral(row.model, log_omega=False), only=("phase", "gain"))
    return spectral, merge(spectral)


def mergeable(row, *case):
    """Norms of queries and keys stand between the weights and the gain, so that none can be merged."""
    return rotating_right(row) and row.name not in ("qwen3", "gemma3", "olmo2")


@asked(rotating_right, every=3)
def scores_are_proved(row):
    """To the tolerance of every model; measured 6e-6 at scores of 20, as for the bases."""
    assert len(verify_scores(moved_of(row))) == len(row.layers)


@asked(mergeable, every=5)
def tables_are_those_of_the_merged_model(row):
    spectral, merged = merged_of(row)
    assert type(merged) is type(row.model)
    found, expected = logits(merged), logits(spectral)
    # Rounding of W_Q in float32: 2e-6 of the largest logit, which gain and phase move by a tenth of it and more.
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 2e-5 * scale
    assert float((expected - row.logits).abs().max()) > 0.02 * scale
    found, expected = tabulated(spectral), tabulated(merged)
    without = ["cond_eig", "outside_m"]  # a condition number magnifies; the merged model's biases differ by rounding
    # W_Q of the merged model is rounded to float32 again: 1e-6 of every number and 1e-5 of differences of them.
    assert_tables_agree(found.drop(columns=without), expected.drop(columns=without), rtol=1e-4, atol=1e-5)
    own = tabulated(row.model)
    assert float((own["dir_frac"] - expected["dir_frac"]).abs().max()) > 1e-3
    assert float((own["rope_imag_frac"] - expected["rope_imag_frac"]).abs().max()) > 1e-3
    assert_tables_agree(frequency_table(spectral), frequency_table(merged), rtol=1e-4, atol=1e-5)  # rounding of W_Q
    found, expected = (tls.detect_heads(model, n_sequences=3, segment_length=8) for model in (spectral, merged))
    assert_tables_agree(found, expected, rtol=0, atol=1e-5)  # rounding; gain and phase move them by 1e-2
    found, expected = (tls.k_composition(model, (1, 2)) for model in (spectral, merged))
    found, expected = (one.sort_values(["layer", "head"]).reset_index()[["score"]] for one in (found, expected))
    assert_tables_agree(found, expected, rtol=0, atol=1e-5)


@asked(lambda row, part: mergeable(row) and row.name != "smollm3", every=15,
       part=("symmetric", "antisymmetric", "rope_phase", "rotary_band"))  # fmt: skip
def ablation_is_that_of_the_merged_model(row, part):
    spectral, merged = merged_of(row)
    removed = tls.parts.Band([0]) if part == "rotary_band" else part
    found = []
    for model in (spectral, merged):
        with tls.ablate(model, [(0, 1), (1, 0), (1, 2)], removed):
            found.append(logits(model))
    # Rounding of W_Q in float32; the ablation itself moves some logit by tenths.
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    assert float((found[0] - logits(spectral)).abs().max()) > 1e-2


@asked(mergeable, every=18)
def positional_scores_are_those_of_the_merged_model(row):
    spectral, merged = merged_of(row)
    for options in ({}, {"per_frequency": True}, {"mode": "key"}):
        found, expected = (measured(model, swaps="kept", tau=0.05, **options) for model in (spectral, merged))
        assert_tables_agree(found, expected, rtol=1e-3, atol=1e-3)  # rounding of W_Q; gain and phase give 0.1


@asked(rotating_right, every=18, per_frequency=(False, True))
def with_moved_rotations_words_that_swap_are_keys_that_swap_in_the_first_layer(row, per_frequency):
    """Keys are turned to other places by each head's own frequencies, as the model turns swapped words itself."""
    spectral = moved_of(row)
    words, keys = (measured(spectral, mode=mode, per_frequency=per_frequency) for mode in ("prompt", "key"))
    # float32 against float64, as in ordinary models: measured 2e-5.
    assert differ(words[words.layer == 0], keys[keys.layer == 0]) < 2e-4
    plain = measured(row.model, block_prompt(), per_frequency=per_frequency)
    assert float((plain["s_pos"] - words["s_pos"]).abs().max()) > 0.05


# --- in the model of transformers ---


def gradients(model):
    model.zero_grad()
    model(input_ids=zoo.prompt(), labels=zoo.prompt()).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def of_transformers(row):
    return row.backend == "bridge" and rotating_right(row) and row.name not in ("gptj", "codegen", "cohere")


@asked(of_transformers, every=9)
def the_model_of_transformers_is_the_function_of_its_bridge_with_and_without_checkpointing(row):
    model, tokens = zoo.hf_model(row.name), zoo.prompt(length=40)

    def run(one):
        with torch.no_grad():
            return one(tokens).logits

    before = {key: value.clone() for key, value in model.state_dict().items()}
    spectral = to_spectral(model)
    assert isinstance(spectral, type(model))
    assert torch.equal(run(spectral), run(model))
    move(spectral)
    # The bridge has other hook points and code: the same function to rounding, 1e-6 of logits of order 1.
    bridge = to_spectral(tls.load_model(model))
    bridge.spectral.load_state_dict(spectral.spectral.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(run(spectral), bridge(tokens), rtol=0, atol=3e-5)
    assert float((run(spectral) - run(model)).abs().max()) > 0.05
    wanted = gradients(spectral.train())
    assert wanted
    assert all(".spectral." in name for name in wanted)
    for reentrant in (True, False):
        spectral.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients(spectral)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        spectral.gradient_checkpointing_disable()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
