"""What the view of a model tells: tokens, embeddings, positions, rotary frequencies; nothing in the model changes."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from ablation_runs import recorded
from attention_models import fresh
from conformance.reading import standard_frequencies
from families import save
from family_configs import forms
from model_state import assert_unchanged, state_of
from zoo import shared

import tlspectral as tls
from tlspectral.models.reading import attention_view, bridge, measured
from tlspectral.models.reading.view import AttentionView, vocabulary_chunks


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        ({"bos_token_id": 5, "eos_token_id": 7}, 5),
        ({"bos_token_id": 0, "eos_token_id": 7}, 0),
        ({"bos_token_id": None, "eos_token_id": 7}, 7),
        ({"bos_token_id": None, "eos_token_id": None}, 0),
        (None, 0),
    ],
)
def test_start_token(ids, start):
    model = SimpleNamespace(
        tokenizer=None if ids is None else SimpleNamespace(**ids), cfg=SimpleNamespace(), blocks=[None]
    )
    view = AttentionView(model, "bridge", n_layers=1, d_model=4, d_vocab=10, n_ctx=8)
    assert view.start_token == start


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "LN"), ("llama", "RMS")])
def test_sizes_and_embeddings(name, kind):
    hf = zoo.hf_model(name)
    view = attention_view(shared("bridge", name))
    assert (view.n_layers, view.d_model, view.d_vocab, view.n_ctx) == (2, zoo.WIDTH, zoo.VOCABULARY, zoo.CONTEXT)
    assert view.source["backend"] == view.backend == "bridge"
    assert view.device == torch.device("cpu")
    assert torch.equal(view.embedding(), hf.get_input_embeddings().weight)
    unembedding, norm = view.unembedding()
    assert torch.equal(unembedding, hf.get_output_embeddings().weight.T)
    assert norm.kind == kind
    assert torch.equal(norm.gain, hf.base_model.ln_f.weight if name == "gpt2" else hf.base_model.norm.weight)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom"])
def test_learned_positions(backend, name):
    positions = attention_view(shared(backend, name)).position_embedding()
    if name == "bloom":
        assert positions is None
        return
    decoder = zoo.hf_model(name).base_model
    # OPT's table has two rows of padding before the position 0.
    expected = decoder.decoder.embed_positions.weight[2:] if name == "opt" else decoder.wpe.weight
    # HookedTransformer centres what writes to the stream: rounding of the mean.
    found = positions.detach() - positions.detach().mean(1, keepdim=True)
    torch.testing.assert_close(found, (expected - expected.mean(1, keepdim=True)).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("axis", "shape", "size", "expected"),
    [(0, (11, 7), {"size": 4}, [4, 4, 3]), (1, (11, 7), {"size": 4}, [4, 3]), (1, (2, 10_000), {}, [4096, 4096, 1808])],
)
def test_vocabulary_chunks_cover_the_embedding_once(axis, shape, size, expected):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    chunks = list(vocabulary_chunks(weight, axis=axis, **size))
    assert [chunk.shape[axis] for chunk in chunks] == expected
    assert {chunk.dtype for chunk in chunks} == {torch.float64}
    assert torch.equal(torch.cat(chunks, dim=axis), weight.double())


# --- rotary frequencies ---


def test_scaled_frequencies_are_not_the_unscaled_ones_and_gemma3_has_two_kinds():
    # Without this the comparison with the config could pass on configs whose scaling does nothing.
    for name, unscaled in (("llama3", standard_frequencies(500.0, 12)), ("yarn", standard_frequencies(10000.0, 12))):
        rotary = attention_view(shared("bridge", name)).layer(0).rotary
        assert float((rotary.theta / unscaled - 1).abs().max()) > 0.5
        assert rotary.valid_up_to is None
    view = attention_view(shared("bridge", "gemma3"))
    theta = [view.layer(index).rotary.theta for index in range(2)]
    assert float(theta[0][-1] / theta[1][-1]) > 10  # base 100 against 10000 and a factor of 2


@pytest.mark.parametrize("name", zoo.LENGTH_DEPENDENT)
def test_a_long_prompt_does_not_move_the_frequencies_that_are_read(name):
    model = fresh("bridge", name)
    view = attention_view(model)
    before = view.layer(0).rotary
    assert before.valid_up_to == 32
    kept = model.rotary_emb.original_component.inv_freq.clone()
    with torch.no_grad():
        model(zoo.prompt(length=64))
    # The module overwrote its own table, so that reading that one would show.
    assert not torch.equal(model.rotary_emb.original_component.inv_freq, kept)
    assert torch.equal(view.layer(0).rotary.theta, before.theta)


# --- what is read changes nothing ---


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("opt", torch.float64)])
def test_what_is_read_is_not_the_models_memory(name, dtype):
    """In float64 on the CPU a conversion returns the model's own memory."""
    model = fresh("bridge", name).to(dtype)
    before = state_of(model)
    view = attention_view(model)
    layer, output = view.layer(0), view.output(0)
    theta = [] if layer.rotary is None else [layer.rotary.theta]
    for tensor in (layer.w_q, layer.w_k, layer.b_q, output.w_v, output.w_o, *theta):
        tensor.zero_()
    assert_unchanged(model, before)


# --- what tells weights apart ---


DIGESTS = {
    "tiny-rope": "dcedad863d4dcd74a2dec3b0d1b94141d7d62cfad3a3969c3bcb66b4191c83fd",
    "tiny-ape": "e35290c43b405d7592a6422928102ea85446a0d1d75ae2e94227f727cb52cd2d",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_weights_have_one_digest_on_both_lines_of_transformer_lens(name):
    """Stored numbers: a folder of parts that was begun on one line goes on on the other."""
    assert attention_view(tls.load_model(name)).weights_digest() == DIGESTS[name]


def test_other_weights_and_another_bias_have_another_digest():
    model = fresh("bridge", "gpt2")
    found = [attention_view(model).weights_digest()]
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    bias = next(weight for name, weight in model.named_parameters() if name.endswith("bias") and weight.any())
    for changed in (matrices[0].data[0, 1:2], matrices[-2].data[0, 1:2], bias.data[:1]):
        changed += 1e-3
        found.append(attention_view(model).weights_digest())
    assert len({*found}) == len(found)


@zoo.needs_hooked
def test_a_table_of_positions_that_no_pass_reads_has_no_part_in_the_digest():
    """TransformerLens leaves it as it was in memory, so it differs each time that BLOOM is loaded."""
    model = zoo.hooked("bloom")
    before = zoo.logits(model), attention_view(model).weights_digest()
    model.pos_embed.W_pos.data += 1.0
    assert torch.equal(zoo.logits(model), before[0])
    assert attention_view(model).weights_digest() == before[1]


# --- how often layers are read ---


def test_layers_are_read_once_while_a_measurement_is_open(spied):
    model = fresh("bridge", "llama")
    reads = spied(bridge, "read_attention", at=1)
    with measured(model) as view:
        first = view.raw(1)
        assert view.raw(1) is first
        assert view.layer(1).n_heads == view.n_heads(1)
        with torch.no_grad():  # a layer that is read without gradients has none
            view.raw(1)
        assert reads == [1, 1]
    view.raw(1)
    assert reads == [1, 1, 1]
    view.model.blocks[1].attn.k.original_component.weight = torch.nn.Parameter(torch.zeros(24, zoo.WIDTH))
    assert not view.raw(1).w_k.any()


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:2 distinct pairs")
def test_a_measurement_reads_each_layer_once(spied):
    model = fresh("bridge", "smollm3")  # four layers
    reads = spied(bridge, "read_attention", at=1)

    def most(call):
        reads.clear()
        call()
        return max(map(reads.count, range(4)))

    clean, other = zoo.prompt(2, 8), zoo.prompt(2, 8, seed=1)
    task = tls.logit_difference(clean, 7, 10, counterfactual=other)
    # Twice where a part of the measurement runs with gradients: a layer that is read without them has none.
    assert most(lambda: tls.analyze_heads(model, detectors=False, null_draws=2)) == 1
    assert most(lambda: tls.detect_heads(model, n_sequences=2)) == 1
    assert most(lambda: tls.ablation_sweep(model, "symmetric", heads="L1H0", task=task, control="random")) <= 2
    assert most(lambda: tls.heads.frequency_table(model)) == 1
    assert most(lambda: tls.run_circuit(model, [("L0H3", "L1H0.q")], task)) <= 2
    assert most(lambda: tls.edge_effects(model, "L1H0.q", task=task)) <= 2
    assert most(lambda: tls.edge_effects(model, task=task, screen="gradient")) <= 2
    assert most(lambda: tls.qk_attribution(model, clean[0], "L1H0", 7, 2, by="mode", top=2)) <= 2


WINDOWED = ["mistral", "gemma3", "gptneo", "llama4"]


def assert_seen_keys_have_the_attention(model, length=20):
    view = attention_view(model)
    for (layer, _), pattern in recorded(model, ("pattern",), zoo.prompt(2, length)).items():
        assert torch.equal(view.reader.seen_keys(view.model, layer, length).cpu(), (pattern > 0).any(1).any(0).cpu()), (
            layer
        )


@pytest.mark.parametrize("name", [*WINDOWED, "bert", *zoo.also_slow("gpt2", "gemma2", "gemma3n", "gemma4", "olmo3")])
def test_the_keys_that_a_layer_lets_a_query_see_are_those_with_attention(name):
    """One window for all layers, which the config alone tells (Mistral), windows on some layers, chunks, an encoder."""
    assert_seen_keys_have_the_attention(shared("bridge", name))


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["mistral", *zoo.also_slow("gptneo")])
def test_the_keys_that_a_hooked_transformer_lets_a_query_see_are_those_with_attention(name):
    assert_seen_keys_have_the_attention(shared("hooked", name))


ON_SOME = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
WINDOWS = {"mixtral": {}, "phi3": {}, "starcoder2": {}, "exaone4": {}, "qwen2": ON_SOME, "qwen2_moe": ON_SOME}


@pytest.mark.slow
@pytest.mark.parametrize("family", WINDOWS)
def test_windows_of_families_are_read_where_each_keeps_them(family, tmp_path):
    """In the config alone, in each layer that has one, or (EXAONE 4) in each layer whether it has one or not."""
    save(family, {**forms(family)[""], "sliding_window": zoo.WINDOW, **WINDOWS[family]}, str(tmp_path))
    model = tls.load_model(tmp_path)
    assert_seen_keys_have_the_attention(model)
    view = attention_view(model)
    on_all = family in ("mixtral", "phi3", "starcoder2")
    n_seen = {int(view.reader.seen_keys(view.model, layer, 20).sum(1).max()) for layer in view.layers}
    assert n_seen == ({zoo.WINDOW} if on_all else {zoo.WINDOW, 20})
