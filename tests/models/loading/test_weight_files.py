"""Weights in a checkpoint's files that its config.json does not ask for: refused or listed, loaded and streamed."""

import json

import pytest
import torch
import zoo
from checkpoint_folders import tensors_of, with_config, with_tensors
from streamed_checkpoints import analyze, assert_streamed_equals_loaded, opened

import tlspectral as tls
from tlspectral.errors import BadWeights

ROUTES = {
    "loaded": lambda path: tls.load_model(path).tlspectral_source.get("unused_weights"),
    "streamed": lambda path: opened(path).source.get("unused_weights"),
}
every_route = pytest.mark.parametrize("unused_in", ROUTES.values(), ids=ROUTES)

WIDE = torch.ones(zoo.WIDTH)
LOWER = torch.ones(8, 8).tril()[None, None]


@pytest.fixture
def made(copied):
    """A folder of an architecture with other entries in its config.json and further tensors in its file."""

    def make(name, tensors=None, *, rename=lambda key: key, **config):
        return with_tensors(with_config(copied(name), **config), tensors, rename=rename)

    return make


def in_blocks(prefix, **tensors):
    """Tensors of both blocks, by their names within one."""
    return {f"{prefix}.{index}.{name}": value.clone() for name, value in tensors.items() for index in range(zoo.LAYERS)}


REFUSED = {
    "query norms under a Llama config": ("qwen3", {}, {"model_type": "llama"}, r"model\.layers\.0\.self_attn\.k_norm"),
    "biases under a Llama config": ("qwen2", {}, {"model_type": "llama"}, r"model\.layers\.0\.self_attn\.k_proj\.bias"),
    "one of two layers": ("llama", {}, {"num_hidden_layers": 1}, r"layer 1 is in the files .* there are 1 layers"),
    "a bias of the final norm": ("llama", {"model.norm.bias": WIDE}, {}, r"hold model\.norm\.bias"),
    "a gain of a final norm that has none": ("olmo", {"model.norm.weight": WIDE}, {}, r"hold model\.norm\.weight"),
    "a final norm that is not built": ("opt", {"model.decoder.norm.weight": WIDE}, {}, r"model\.decoder\.norm\.weight"),
    "a bias that has the name of a mask": (
        "gpt2",
        in_blocks("transformer.h", **{"attn.bias": torch.full((1, 1, 8, 8), 0.5)}),
        {},
        r"hold transformer\.h\.0\.attn\.bias",
    ),
    "a further layer without the marks of extra prediction": (
        "llama",
        {"model.layers.2.self_attn.q_proj.weight": torch.ones(zoo.WIDTH, zoo.WIDTH)},
        {},
        r"layer 2 is in the files .*\(model\.layers\.2\.self_attn\.q_proj\.weight\)",
    ),
    "more further layers than are stated": (
        "llama",
        {f"model.layers.{index}.mlp.up_proj.weight": torch.ones(64, zoo.WIDTH) for index in (2, 3)},
        {"num_nextn_predict_layers": 1},
        r"layer [23] is in the files",
    ),
}


@every_route
@pytest.mark.parametrize(("name", "tensors", "config", "said"), REFUSED.values(), ids=REFUSED)
def test_weights_that_the_config_does_not_ask_for_are_refused(made, unused_in, name, tensors, config, said):
    with pytest.raises(BadWeights, match=said):
        unused_in(made(name, tensors, **config))


PREDICTION = {"eh_proj.weight": torch.ones(4, 4), "self_attn.q_proj.weight": torch.ones(4, 4)}
PASSED = {
    "inv_freq": (
        "llama",
        in_blocks("model.layers", **{"self_attn.rotary_emb.inv_freq": torch.ones(6)}),
        {},
        ["model.layers.N.self_attn.rotary_emb.inv_freq"],
    ),
    "masks of GPT-2": (
        "gpt2",
        in_blocks("transformer.h", **{"attn.bias": LOWER, "attn.masked_bias": torch.tensor(-1e4)}),
        {},
        ["transformer.h.N.attn.bias", "transformer.h.N.attn.masked_bias"],
    ),
    "masks of GPT-Neo": (
        "gptneo",
        in_blocks("transformer.h", **{"attn.attention.bias": LOWER.bool()}),
        {},
        ["transformer.h.N.attn.attention.bias"],
    ),
    "masks of GPT-J": (
        "gptj",
        in_blocks("transformer.h", **{"attn.bias": LOWER.byte()}),
        {},
        ["transformer.h.N.attn.bias"],
    ),
    "masks of CodeGen": (
        "codegen",
        in_blocks("transformer.h", **{"attn.causal_mask": LOWER, "attn.bias": LOWER.bool()}),
        {},
        ["transformer.h.N.attn.bias", "transformer.h.N.attn.causal_mask"],
    ),
    "masks of NeoX": (
        "neox",
        in_blocks("gpt_neox.layers", **{"attention.bias": LOWER, "attention.masked_bias": torch.tensor([-1e9])}),
        {},
        ["gpt_neox.layers.N.attention.bias", "gpt_neox.layers.N.attention.masked_bias"],
    ),
    "extra prediction": ("llama", {"mtp.layers.0.mlp.up_proj.weight": WIDE}, {}, ["mtp.layers.N.mlp.up_proj.weight"]),
    "extra prediction by its marks": (
        "llama",
        {f"model.layers.2.{name}": value for name, value in PREDICTION.items()},
        {},
        ["model.layers.N.eh_proj.weight", "model.layers.N.self_attn.q_proj.weight"],
    ),
    "extra prediction as stated": (
        "llama",
        {"model.layers.2.mlp.up_proj.weight": torch.ones(64, zoo.WIDTH)},
        {"num_nextn_predict_layers": 1},
        ["model.layers.N.mlp.up_proj.weight"],
    ),
    "another tower": (
        "llama",
        {"vision_tower.encoder.layers.0.self_attn.q_proj.weight": WIDE, "model.audio_tower.norm.weight": LOWER},
        {},
        ["model.audio_tower.norm.weight", "vision_tower.encoder.layers.N.self_attn.q_proj.weight"],
    ),
    "a head for rewards": ("llama", {"v_head.summary.weight": WIDE}, {}, ["v_head.summary.weight"]),
}


@pytest.mark.slow
@every_route
@pytest.mark.parametrize(("name", "tensors", "config", "listed"), PASSED.values(), ids=PASSED)
def test_what_is_no_part_of_the_model_is_listed(made, unused_in, name, tensors, config, listed):
    assert unused_in(made(name, tensors, **config)) == {"count": len(tensors), "names": listed}


def test_a_long_list_is_cut_and_counted(made):
    letters = map(chr, range(97, 122))
    found = ROUTES["streamed"](made("llama", {f"v_head.{letter}.weight": WIDE.clone() for letter in letters}))
    assert found["count"] == 25
    assert len(found["names"]) == 20


# --- names that transformers changes ---


@pytest.mark.slow
@every_route
@pytest.mark.parametrize("name", ["bloom", "olmoe"])
def test_names_that_a_load_changes_are_used(made, unused_in, name):
    """A prefix that is missing, and one tensor per expert, packed in the model."""
    assert unused_in(made(name, rename=lambda key: key.removeprefix("transformer."))) is None


@every_route
def test_a_block_is_known_without_its_prefix(made, unused_in):
    """As the files of the first GPT-2 are: blocks of the bare model, and masks."""
    masks = in_blocks("transformer.h", **{"attn.bias": LOWER})
    path = made("gpt2", masks, rename=lambda key: key.removeprefix("transformer."))
    assert unused_in(path) == {"count": 2, "names": ["h.N.attn.bias"]}
    with_tensors(path, {"h.2.ln_1.weight": WIDE})
    with pytest.raises(BadWeights, match=r"layer 2 is in the files .*\(h\.2\.ln_1\.weight\)"):
        unused_in(path)


# --- pickles, and the unembedding ---


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_in_pickles_are_seen_too(made, zipped):
    """Masks as such, and weights that the config does not ask for."""
    paths = made("gpt2", in_blocks("transformer.h", **{"attn.bias": LOWER})), made("qwen3", model_type="llama")
    for path in paths:
        held = tensors_of(path)
        torch.save(held, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        (path / "model.safetensors").unlink()
    assert ROUTES["loaded"](paths[0]) == {"count": 2, "names": ["transformer.h.N.attn.bias"]}
    with pytest.raises(BadWeights, match=r"model\.layers\.0\.self_attn\.k_norm\.weight"):
        tls.load_model(paths[1])


def test_a_tied_unembedding_passes_if_it_equals_the_embedding(made):
    path = made("gpt2")
    embedding = tensors_of(path)["transformer.wte.weight"]
    assert ROUTES["loaded"](with_tensors(path, {"lm_head.weight": embedding.clone()})) is None
    with_tensors(path, {"lm_head.weight": embedding + 1e-3})
    with pytest.raises(BadWeights, match=r"ties the unembedding .* set tie_word_embeddings to false"):
        tls.load_model(path)


def test_of_gemma_3n_the_text_is_read_and_its_towers_are_listed(made, folder):
    alone, tower = folder("gemma3n"), "model.vision_tower.timm_model.conv_stem.conv.weight"
    config = {"model_type": "gemma3n", "text_config": json.loads((alone / "config.json").read_text())}
    text = made("gemma3n", rename=lambda key: key.replace("model.", "model.language_model.", 1), **config)
    loaded, streamed = (analyze(given) for given in (tls.load_model(with_tensors(text, {tower: WIDE})), text))
    assert loaded.attrs["unused_weights"] == streamed.attrs["unused_weights"] == {"count": 1, "names": [tower]}
    assert_streamed_equals_loaded(streamed, loaded)
    assert loaded["D_head"].equals(analyze(tls.load_model(alone))["D_head"])
