"""What the package measures, measured on spectral models: scores proved, tables as of the merged model, ablations."""

import functools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from conformance.spectral import equation_2_scores
from conformance.spectral_models import assert_tables_agree, tabulated
from positional_measurements import agreement_of_shared_prefill, block_prompt
from spectral_zoo import base, move
from tlspectral_studies.positional_symbolic.traces import attention_traces, frequency_norms
from zoo import logits

from tlspectral.errors import ScoreMismatch
from tlspectral.heads import frequency_table
from tlspectral.heads.operators.factored import qk_operators
from tlspectral.heads.operators.verification import verify_scores
from tlspectral.hooks import ablate, ablation_sweep, band_effects
from tlspectral.hooks.parts import Band
from tlspectral.hooks.path_patching import edge_effects
from tlspectral.models.loading import load_model
from tlspectral.models.reading import attention_view
from tlspectral.positional.exclusion import frequency_exclusion, head_exclusion
from tlspectral.positional.readout import LastQuery
from tlspectral.spectral_rope import SpectralHookedTransformer, merge, to_spectral
from tlspectral.tasks import evaluate, induction, induction_loss
from tlspectral.tasks.repeated import repeated_sequences


@functools.cache
def moved(backend, name, only=("omega", "phase", "gain")):
    return move(to_spectral(base(backend, name), log_omega=False), only=only)


# --- scores ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({"scope": scope, "shared_phase": True} for scope in ("model", "layer", "group")),
        {"heads": [(1, 2), (1, 3)], "frequencies": [0, 5]},
    ],
)
def test_scores_are_proved_at_every_scope_and_of_a_part(options):
    verify_scores(move(to_spectral(base("bridge", "llama"), **options)))


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_the_packaged_model_becomes_spectral(backend):
    model = load_model("tiny-rope", backend=backend)
    spectral, tokens = to_spectral(model), torch.arange(30)[None]
    assert torch.equal(logits(spectral, tokens), logits(model, tokens))
    verify_scores(move(spectral))
    assert spectral.tlspectral_source == model.tlspectral_source


@zoo.needs_hooked
def test_scores_of_a_spectral_hooked_transformer_are_proved():
    cfg = base("hooked", "qwen2").cfg
    spectral = SpectralHookedTransformer(cfg)
    spectral.load_state_dict(base("hooked", "qwen2").state_dict(), strict=False)
    verify_scores(move(spectral))


@pytest.mark.parametrize("part", ["theta", "gain", "phase"])
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gptj", marks=pytest.mark.slow)])
def test_a_geometry_that_is_not_what_acts_is_seen(name, part, monkeypatch):
    spectral = move(to_spectral(base("bridge", name), log_omega=False))
    real = spectral.spectral_geometry

    def lying(layer):
        geometry = real(layer)
        return replace(geometry, **{part: getattr(geometry, part) + 1e-3})

    monkeypatch.setattr(spectral, "spectral_geometry", lying)
    with pytest.raises(ScoreMismatch):
        verify_scores(spectral)


# --- tables ---


@pytest.mark.slow
def test_a_fresh_spectral_model_has_the_bases_table():
    found, expected = tabulated(to_spectral(base("bridge", "llama"))), tabulated(base("bridge", "llama"))
    assert_tables_agree(found, expected, rtol=1e-9, atol=1e-12)  # phases and gains of 0 and 1 in float64: exact


@pytest.mark.slow
def test_moved_frequencies_are_in_the_tables():
    spectral = moved("bridge", "llama", ("omega",))
    found, expected = tabulated(spectral), tabulated(base("bridge", "llama"))
    different = {name for name in found if not found[name].equals(expected[name])}
    assert different == {"freq_centroid"}
    assert found.attrs["weights_sha256"] != expected.attrs["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("only", ["omega", "phase", "gain"])
def test_the_digest_of_a_layer_knows_its_spectral_parameters(only):
    models = to_spectral(base("bridge", "llama")), moved("bridge", "llama", (only,))
    digests = {attention_view(model).layer_digest(1) for model in (base("bridge", "llama"), *models)}
    assert len(digests) == 3


def test_frequency_tables_are_per_head_and_wavelengths_are_lengths():
    spectral = moved("bridge", "llama")
    table, geometry = frequency_table(spectral).set_index(["layer", "head", "frequency"]), spectral.spectral_geometry(1)
    for head, pair in ((0, 0), (2, 1)):
        assert table.loc[(1, head, pair), "theta"] == float(geometry.theta[head, pair])
        assert table.loc[(1, head, pair), "wavelength"] == pytest.approx(2 * np.pi / abs(geometry.theta[head, pair]))
    spectral = to_spectral(base("bridge", "llama"), log_omega=False)
    with torch.no_grad():
        spectral.spectral["0"].omega[0, 0] = -0.5
    table = frequency_table(spectral)
    assert table["theta"].min() == pytest.approx(-0.5)
    assert (table["wavelength"] > 0).all()
    assert table["wavelength"].iloc[0] == pytest.approx(4 * np.pi, rel=1e-6)  # float32 omega


def test_phase_factors_of_an_operator():
    spectral = moved("bridge", "qwen3")
    own, found = qk_operators(base("bridge", "qwen3"))[1, 2], qk_operators(spectral)[1, 2]
    geometry = spectral.spectral_geometry(1)
    factor = complex(geometry.gain[2, 3] * torch.exp(1j * geometry.phase[2, 3]))
    m_t = own.phase(3).re.dense() + 1j * own.phase(3).im.dense()
    expected = factor * m_t
    torch.testing.assert_close(found.phase(3).re.dense(), expected.real, rtol=0, atol=1e-12)  # noise 1e-16
    torch.testing.assert_close(found.phase(3).im.dense(), expected.imag, rtol=0, atol=1e-12)


# --- ablation ---


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("bridge", "yarn"),
        ("bridge", "qwen3"),
        pytest.param("bridge", "olmo2", marks=pytest.mark.slow),
        pytest.param("hooked", "llama", marks=[zoo.needs_hooked, pytest.mark.slow]),
    ],
)
def test_ablated_scores_are_the_parts_of_what_acts(backend, name):
    spectral, heads = moved(backend, name), [0, 3]
    view, geometry = attention_view(spectral.base), spectral.spectral_geometry(1)
    names = view.hook_names(1)
    with torch.no_grad():
        _, clean = spectral.run_with_cache(zoo.prompt())

    def scores(**changes):
        return equation_2_scores(view, 1, clean[names["query"]], clean[names["key"]], replace(geometry, **changes))

    whole, backwards = scores(), scores(theta=-geometry.theta)
    content, phase = (whole + backwards) / 2, (whole - backwards) / 2  # even and odd in the offset
    mirrored = content.swapaxes(-1, -2)
    at_0 = scores(theta=0 * geometry.theta)  # nothing turns: gain, phase and YaRN's factor are left
    static = at_0.swapaxes(-1, -2)
    expected = {
        "rope_phase": content,
        "rotary_band": scores(gain=geometry.gain * (torch.arange(geometry.n_pairs) > 0)),
        "antisymmetric": (content + mirrored) / 2 + phase,
        "symmetric": (content - mirrored) / 2 + phase,
        "antisymmetric_static": whole - (at_0 - static) / 2,
        "symmetric_static": whole - (at_0 + static) / 2,
    }
    seen = np.tril(np.ones(mirrored.shape[-2:], dtype=bool))
    for part, wanted in expected.items():
        if name in ("qwen3", "olmo2") and "symmetric" in part:
            continue  # its transpose leaves the loudness of tokens where it is
        removed = Band([0]) if part == "rotary_band" else part
        with torch.no_grad(), ablate(spectral, [(1, head) for head in heads], removed):
            _, cache = spectral.run_with_cache(zoo.prompt())
        found = cache[names["scores"]].double().numpy()
        # float32 noise of scores up to 20, measured 1e-5; without gain, phase or the residual angles off by units.
        assert np.abs(found - wanted)[:, heads][..., seen].max() < 5e-5, part
        assert torch.equal(cache[names["scores"]][:, 1:3], clean[names["scores"]][:, 1:3])


def test_ablation_under_left_padding():
    """The bridge then has tables of its own for every sequence."""
    spectral, tokens = moved("bridge", "llama"), zoo.prompt(length=12)
    empty = torch.zeros(2, 5, dtype=torch.long)
    empty[1, 2:] = tokens[1, :3]
    mask = torch.tensor([[0] * 5 + [1] * 12, [0] * 2 + [1] * 15])
    with torch.no_grad(), ablate(spectral, [(0, 1), (1, 2)], "antisymmetric"):
        found = spectral(torch.cat([empty, tokens], dim=1), attention_mask=mask)
        alone = [spectral(tokens[:1]), spectral(torch.cat([tokens[1:, :3], tokens[1:]], dim=1))]
    # Rounding 1e-6; the ablation moves some logit by tenths.
    torch.testing.assert_close(found[:1, 5:], alone[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1:, 2:], alone[1], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_sweep_is_one_ablated_forward_per_head():
    spectral = moved("bridge", "gptj")
    tokens = repeated_sequences(attention_view(spectral), n_sequences=3, segment_length=8, seed=1)
    table = ablation_sweep(spectral, "rope_phase", heads=[(0, 1), (0, 2), (1, 3)], task=induction(tokens)).set_index(
        ["layer", "head"]
    )
    for layer, head in table.index:
        with ablate(spectral, [(layer, head)], "rope_phase"):
            plain = induction_loss(spectral, tokens).value
        assert table.loc[(layer, head), "value"] == pytest.approx(plain, abs=1e-5)  # rounding of stacked runs, 1e-6


@pytest.mark.slow
def test_bands_are_of_each_heads_own_frequencies():
    spectral = moved("bridge", "llama")
    tokens = repeated_sequences(attention_view(spectral), n_sequences=3, segment_length=8, seed=1)
    effects = functools.partial(band_effects, spectral, task=induction(tokens), draws=2)
    table = effects([(0, 0), (0, 2), (1, 1)])
    alone = effects([(0, 2)])["score_rms"].to_numpy()
    np.testing.assert_allclose(table[(table.layer == 0) & (table["head"] == 2)]["score_rms"], alone, rtol=1e-5)
    intact = induction_loss(spectral, tokens).value
    for (layer, head), rows in table.groupby(["layer", "head"]):
        theta = spectral.spectral_geometry(layer).theta[head].abs()
        for row, third in zip(
            rows.itertuples(), theta.argsort(descending=True, stable=True).tensor_split(3), strict=True
        ):
            with ablate(spectral, [(layer, head)], Band(third.tolist())):
                plain = induction_loss(spectral, tokens).value
            assert row.delta == pytest.approx(plain - intact, abs=1e-5)


# --- positional and symbolic ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prompt", "key"])
def test_several_queries_share_a_cache(mode):
    # float32 in other batches, 1e-5.
    assert agreement_of_shared_prefill(moved("bridge", "qwen3"), mode, per_frequency=True) < 1e-3


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_head_of_a_spectral_layer_is_scored_as_it_would_be_alone(softcap):
    generator = torch.Generator().manual_seed(0)
    contents, places = (torch.randn(3, 9, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    together = LastQuery(contents, places, None, torch.ones(7, dtype=torch.bool), 0.5, softcap)
    assert together.n_pairs == 4
    measures = [
        lambda seen: [seen.head_logits(), seen.frequency_logits()],
        lambda seen: [seen.head_logits((torch.tensor([4, 1]), torch.tensor([0, 6])))],
        lambda seen: list(head_exclusion(seen)),
        lambda seen: list(frequency_exclusion(seen)),
    ]
    for head in range(3):
        alone = replace(together, contents=contents[head : head + 1], places=places[head])
        for measure in measures:
            for found, expected in zip(measure(together), measure(alone), strict=True):
                torch.testing.assert_close(found[head : head + 1], expected, rtol=1e-12, atol=1e-12)  # rounding


@pytest.mark.slow
def test_traces_and_norms_are_those_of_the_merged_model():
    spectral = moved("bridge", "llama", ("phase", "gain"))
    merged = merge(spectral)
    for mode in ("prompt", "key"):
        found, expected = (
            attention_traces(model, block_prompt(), [(0, 1), (1, 2)], swaps=[(1, 2)], frequencies=[0, 2], mode=mode)
            for model in (spectral, merged)
        )
        assert_tables_agree(found.drop(columns="frequency"), expected.drop(columns="frequency"), rtol=0, atol=1e-5)
    found, expected = (frequency_norms(model, block_prompt(), [(0, 1), (1, 2)]) for model in (spectral, merged))
    assert_tables_agree(found, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(found, pd.DataFrame)


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["L1H0.q", "L1KV0.k"])
def test_an_edge_into_learned_gains_and_phases_is_that_of_a_run_with_it_cut(receiver):
    model = moved("bridge", "llama")
    tokens = repeated_sequences(attention_view(model), n_sequences=4, segment_length=6, seed=1)
    task = induction(tokens)
    intact = evaluate(model, task)
    with ablate(model, "L0H1", "output", into=receiver):
        effect = evaluate(model, task) - intact
    options = {"senders": ["L0H1"], "task": task, "replace": "zero"}
    found = edge_effects(model, receiver, measure="task", **options)["delta"].item()
    # Measured: 3e-8, float32; effects are .001 and .007.
    assert found == pytest.approx(effect.value, abs=1e-6)
    pattern = model.run_with_cache(tokens)[1]["blocks.1.attn.hook_pattern"][:, 0]
    copied = torch.stack([pattern[:, query, query - 5] for query in range(7, 13)]).mean().item()
    attention = edge_effects(model, receiver, measure="ind", **options)["attention"][0]
    # Measured: 1e-8, float32; without the gain and phase of the queries the call is refused.
    assert attention == pytest.approx(copied, abs=1e-6)
