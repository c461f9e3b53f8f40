"""Tensors in files that a checkpoint's index or config.json does not mean: refused or listed, loaded and streamed."""

import json
import shutil

import pytest
import torch
import zoo
from checkpoint_folders import sharded, tensors_of, with_config, with_tensors
from safetensors.torch import load_file, save_file
from streamed_checkpoints import analyze, assert_streamed_equals_loaded, opened

import tlspectral as tls
from tlspectral.errors import BadWeights, UnsupportedArchitecture

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


@every_route
def test_a_tied_unembedding_passes_if_it_equals_the_embedding(made, unused_in):
    path = made("gpt2")
    embedding = tensors_of(path)["transformer.wte.weight"]
    assert unused_in(with_tensors(path, {"lm_head.weight": embedding.clone()})) is None
    with_tensors(path, {"lm_head.weight": embedding + 1e-3})
    with pytest.raises(BadWeights, match=r"ties the unembedding .* set tie_word_embeddings to false"):
        unused_in(path)


@pytest.mark.slow
@pytest.mark.tl4
def test_of_gemma_3n_the_text_is_read_and_its_towers_are_listed(made, folder):
    alone, tower = folder("gemma3n"), "model.vision_tower.timm_model.conv_stem.conv.weight"
    config = {"model_type": "gemma3n", "text_config": json.loads((alone / "config.json").read_text())}
    text = made("gemma3n", rename=lambda key: key.replace("model.", "model.language_model.", 1), **config)
    loaded, streamed = (analyze(given) for given in (tls.load_model(with_tensors(text, {tower: WIDE})), text))
    assert loaded.attrs["unused_weights"] == streamed.attrs["unused_weights"] == {"count": 1, "names": [tower]}
    assert_streamed_equals_loaded(streamed, loaded)
    assert loaded["D_head"].equals(analyze(tls.load_model(alone))["D_head"])


# --- shards ---

KEY = "model.layers.0.self_attn.k_proj.weight"
NORM = "model.norm.weight"


def held_in(file):
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def with_held(file, tensors):
    save_file(tensors, file, {"format": "pt"}) if file.suffix == ".safetensors" else torch.save(tensors, file)


class Shards:
    """A checkpoint in many files: the index, and two of the files, of which one holds KEY and the other NORM."""

    def __init__(self, path, kind="safetensors"):
        self.path, self.index = path, sharded(path, kind)
        files = json.loads(self.index.read_text())["weight_map"]
        self.own, self.other = path / files[KEY], path / files[NORM]
        assert self.own != self.other
        self.value = held_in(self.own)[KEY]

    def put(self, file, **tensors):
        """Add tensors to a file by their names, and take out those that are None."""
        held = held_in(file) | tensors
        with_held(file, {name: value for name, value in held.items() if value is not None})

    def without_name(self, name):
        content = json.loads(self.index.read_text())
        del content["weight_map"][name]
        self.index.write_text(json.dumps(content))

    @property
    def both(self):
        """An error that names the tensor and both files."""
        return rf"(?=.*{KEY})(?=.*{self.own.name})(?=.*{self.other.name})"


@pytest.mark.parametrize(
    ("kind", "unused_in"),
    [("safetensors", ROUTES["loaded"]), ("safetensors", ROUTES["streamed"]), ("pickles", ROUTES["loaded"])],
)
@pytest.mark.parametrize("name", [KEY, NORM])
def test_another_copy_of_a_tensor_in_a_further_shard_is_refused(tmp_path, kind, unused_in, name):
    # transformers takes the copy of the last file, whatever the index says: logits were off by 5.
    shards = Shards(tmp_path, kind)
    own, further = (shards.own, shards.other) if name == KEY else (shards.other, shards.own)
    shards.put(further, **{name: held_in(own)[name] + 1e-3})
    with pytest.raises(BadWeights, match=rf"{own.name} and {further.name} .* both hold {name}"):
        unused_in(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@every_route
def test_an_equal_copy_passes_and_one_of_another_type_does_not(tmp_path, unused_in, dtype):
    shards = Shards(tmp_path)
    shards.put(shards.other, **{KEY: shards.value.clone().to(dtype)})
    if dtype is torch.float32:
        assert unused_in(tmp_path) is None
    else:
        with pytest.raises(BadWeights, match=shards.both):
            unused_in(tmp_path)


@every_route
def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path, unused_in):
    shards = Shards(tmp_path)
    shards.put(shards.own, **{KEY: None})
    shards.put(shards.other, **{KEY: shards.value})
    with pytest.raises(BadWeights, match=shards.both):
        unused_in(tmp_path)


@pytest.mark.slow
@pytest.mark.tl4
def test_a_tensor_that_the_index_does_not_name_is_one_model_on_both_roads(tmp_path):
    # transformers loads it; the files' road reads it from where it is.
    shards = Shards(tmp_path)
    shards.without_name(KEY)
    loaded, streamed = (analyze(given) for given in (tls.load_model(tmp_path), tmp_path))
    assert_streamed_equals_loaded(streamed, loaded)
    shards.put(shards.other, **{KEY: shards.value + 1})  # two copies, of which the index names none
    for unused_in in ROUTES.values():
        with pytest.raises(BadWeights, match=rf"{KEY}.*names neither"):
            unused_in(tmp_path)


@pytest.mark.parametrize(
    ("alias", "streamed"),
    [
        (KEY.removeprefix("model."), UnsupportedArchitecture),  # a second stack of layers
        (f"model.{KEY}", UnsupportedArchitecture),
        (NORM.removeprefix("model."), BadWeights),
        ("model.lm_head.weight", BadWeights),
    ],
)
def test_two_names_of_one_parameter_are_refused(made, alias, streamed):
    path = made("llama")
    held = tensors_of(path)
    meant = next(name for name in held if f".{name}".endswith(f".{alias.removeprefix('model.')}"))
    with_tensors(path, {alias: held[meant] + 1})
    with pytest.raises(BadWeights, match=rf"(?=.* {alias})(?=.* {meant}).*loads both into"):
        tls.load_model(path)
    with pytest.raises(streamed, match=r"loads both into|2 stacks of attention"):
        ROUTES["streamed"](path)


def test_experts_under_two_prefixes_are_refused(made):
    """Tensors that are packed into one parameter are many names of it; each of them still has one name."""
    path = made("olmoe")
    name = next(name for name in tensors_of(path) if ".experts.0." in name)
    assert ROUTES["loaded"](path) is None
    with_tensors(path, {name.removeprefix("model."): tensors_of(path)[name] + 1})
    with pytest.raises(BadWeights, match="loads both into"):
        tls.load_model(path)


def test_shards_of_a_hub_model_are_compared_when_they_are_opened(hub, tmp_path):
    shards = Shards(tmp_path / "made")
    files = json.loads(shards.index.read_text())["weight_map"]
    opened = shards.path / files["model.layers.1.self_attn.q_proj.weight"]
    assert opened != shards.own
    with_held(opened, held_in(opened) | {KEY: shards.value + 1})
    hub.publish("maker/model", shards.path)
    with pytest.raises(BadWeights, match=rf"{shards.own.name} and {opened.name} .*both hold {KEY}"):
        analyze("maker/model")


@pytest.mark.slow
@pytest.mark.tl4
def test_links_to_shards_and_a_pickle_beside_them_are_the_shards(tmp_path):
    shards = Shards(tmp_path / "made")
    expected = analyze(shards.path)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in shards.path.iterdir():
        (linked / file.name).symlink_to(file)
    torch.save({KEY: shards.value + 1}, linked / "pytorch_model.bin")  # transformers takes safetensors first
    loaded, streamed = (analyze(given) for given in (tls.load_model(linked), linked))
    assert_streamed_equals_loaded(streamed, loaded)
    assert streamed["D_head"].equals(expected["D_head"])
    shutil.copy(shards.other, shards.path / "unlisted.safetensors")  # a file that the index does not name
    assert analyze(shards.path)["D_head"].equals(expected["D_head"])


# --- what a load refuses, read from files ---


@every_route
def test_an_embedding_of_other_rows_than_the_vocabulary_is_refused(made, unused_in):
    path = made("llama", vocab_size=zoo.VOCABULARY - 1)
    with pytest.raises(BadWeights, match="asks for"):
        unused_in(path)


@pytest.mark.slow
@pytest.mark.tl4
def test_an_empty_quantization_config_is_none(made):
    path = made("qwen2", quantization_config={})
    loaded, streamed = (analyze(given) for given in (tls.load_model(path), path))
    assert_streamed_equals_loaded(streamed, loaded)
    given = zoo.hf_model("qwen2")
    given.config.quantization_config = {}
    tls.load_model(given)
    assert given.config.quantization_config == {}  # the caller's
