"""A SpectralHookedTransformer in a folder: the same bits come back, and a save replaces no other model."""

import json
import os

import pytest
import torch
import transformers
import zoo
from page_code import blocks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spectral_zoo import config, logits, move

import tlspectral as tls
from tlspectral.errors import BadWeights
from tlspectral.spectral_rope import (
    SpectralHookedTransformer,
    load_spectral,
    parameter_groups,
    save_spectral,
    to_spectral,
)
from tlspectral.spectral_rope.spectral_file import FORMAT

pytestmark = zoo.needs_hooked


def spectral_of(changes=None, seed=0, **options):
    return move(SpectralHookedTransformer(config(seed=seed, **(changes or {})), **options), seed=seed).eval()


def held(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same(loaded, model):
    """All that computes is equal to the bit; IGNORE is -inf in any type."""
    own, found = (
        {name: value for name, value in [*each.state_dict().items(), *each.named_buffers()] if "IGNORE" not in name}
        for each in (model, loaded)
    )
    assert found.keys() == own.keys()
    for name, value in own.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert {**vars(loaded.cfg)} == {**vars(model.cfg)}
    assert torch.equal(logits(loaded), logits(model))


OPTIONS = {
    "usual": ({}, {}),
    "model": ({"n_key_value_heads": None}, {"scope": "model", "log_omega": True}),
    "some": ({"use_qk_norm": True}, {"heads": [(1, 2), (1, 3)], "frequencies": [0, 2]}),
    "group": ({"rotary_adjacent_pairs": True, "rotary_dim": 4}, {"scope": "group", "shared_phase": True}),
    "attention": ({"attn_only": True, "act_fn": None}, {"scope": "layer"}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "float64": ({"dtype": torch.float64}, {}),
    "lengths": ({"use_dynamic_ntk_rope": True, "train_seq_length": 16}, {}),
}


@pytest.mark.parametrize(
    "chosen", ["model", "some", *zoo.also_slow("usual", "group", "attention", "bfloat16", "float64", "lengths")]
)
def test_what_was_saved_comes_back(tmp_path, chosen):
    changes, options = OPTIONS[chosen]
    model = spectral_of(changes, **options)
    model.save_pretrained(tmp_path / "run")
    before = torch.random.get_rng_state()
    loaded = tls.load_model(tmp_path / "run")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert type(loaded) is SpectralHookedTransformer
    assert loaded.tlspectral_source == {"model": str(tmp_path / "run"), "revision": None}
    assert_same(loaded, model)
    for index, module in model.spectral.items():
        for name in ("scope", "log_omega", "shared_phase", "everywhere"):
            assert getattr(loaded.spectral[index], name) == getattr(module, name)
    assert sum(map(torch.numel, loaded.parameters())) == sum(map(torch.numel, model.parameters()))  # tied ones once


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_type_than_it_was_made_in_comes_back(tmp_path, dtype):
    model = spectral_of().to(dtype, print_details=False)
    model.save_pretrained(tmp_path)
    assert_same(tls.load_model(tmp_path), model)


def test_the_head_table_is_the_same_and_training_goes_on(tmp_path):
    model = spectral_of()
    model.save_pretrained(tmp_path)
    loaded = tls.load_model(tmp_path)
    tables = [tls.analyze_heads(each, null_draws=10, detectors=False) for each in (loaded, model)]
    assert tables[0].equals(tables[1])
    assert tables[0].attrs["weights_sha256"] == tables[1].attrs["weights_sha256"]
    for each in (loaded, model):
        optimizer = torch.optim.AdamW(parameter_groups(each, lr=1e-2))
        each(zoo.prompt(), return_type="loss").backward()
        optimizer.step()
    assert_same(loaded, model)


def test_from_pretrained_loads_a_save_too(tmp_path):
    model = spectral_of()
    model.save_pretrained(tmp_path / "run")
    assert_same(SpectralHookedTransformer.from_pretrained(tmp_path / "run", device="cpu"), model)
    assert SpectralHookedTransformer.from_pretrained(str(tmp_path / "run"), dtype="float64").cfg.dtype == torch.float64
    with pytest.raises(TypeError, match="fold_ln"):
        SpectralHookedTransformer.from_pretrained(tmp_path / "run", fold_ln=False)
    with pytest.raises(ValueError, match="elsewhere not found"):  # of TransformerLens
        SpectralHookedTransformer.from_pretrained("elsewhere")
    spectral_parameters(tmp_path / "other")  # of another class
    with pytest.raises(ValueError, match="other not found"):
        SpectralHookedTransformer.from_pretrained(str(tmp_path / "other"))


def test_rotary_tables_that_a_long_run_made_longer_change_nothing(tmp_path, monkeypatch):
    from transformer_lens.components.abstract_attention import AbstractAttention

    monkeypatch.setattr(AbstractAttention, "ROTARY_INITIAL_CACHE_SIZE", 32)
    model, long = spectral_of(), zoo.prompt(batch=1, length=60)
    model.save_pretrained(tmp_path)
    expected = logits(model, long)
    assert len(model.blocks[0].attn.rotary_sin) == 64
    model.save_pretrained(tmp_path)
    loaded = tls.load_model(tmp_path)
    assert len(loaded.blocks[0].attn.rotary_sin) == 32
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(loaded, long), expected)


def with_tokenizer(folder):
    zoo.save_folder("llama", folder, tokenizer=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return SpectralHookedTransformer(config(), tokenizer).eval()


def test_a_tokenizer_is_saved_and_found_again(tmp_path):
    model = with_tokenizer(tmp_path / "other")
    model.save_pretrained(tmp_path / "run")
    model.save_pretrained(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    loaded = tls.load_model(tmp_path / "moved")
    assert torch.equal(loaded.to_tokens("w3 w4"), model.to_tokens("w3 w4"))
    assert loaded.to_tokens("w3 w4")[0, -2:].tolist() == [3, 4]
    assert_same(loaded, model)
    model.tokenizer = None
    model.save_pretrained(tmp_path / "moved")
    assert sorted(os.listdir(tmp_path / "moved")) == ["model.safetensors", "spectral_config.json"]
    assert tls.load_model(tmp_path / "moved").tokenizer is None


def test_the_name_of_a_tokenizer_is_kept_and_not_fetched(tmp_path):
    model = spectral_of()
    model.cfg.tokenizer_name = "nobody/nothing"
    model.save_pretrained(tmp_path)
    assert tls.load_model(tmp_path).cfg.tokenizer_name == "nobody/nothing"


# --- a save never destroys ---


def test_an_earlier_save_is_replaced_and_other_files_stay(tmp_path):
    spectral_of().save_pretrained(tmp_path)
    (tmp_path / "log.txt").write_text("mine")
    model = spectral_of(seed=1)
    save_spectral(model, tmp_path / "spectral.safetensors")
    model.save_pretrained(tmp_path)
    assert_same(tls.load_model(tmp_path), model)
    names = ["log.txt", "model.safetensors", "spectral.safetensors", "spectral_config.json"]
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.slow
def test_a_save_that_is_interrupted_leaves_the_earlier_or_the_new_model(tmp_path, monkeypatch):
    earlier, model = spectral_of(), spectral_of()
    with torch.no_grad():
        model.unembed.W_U.mul_(2.0)
    replace, expected = os.replace, [logits(earlier), logits(model)]
    for at in range(3):  # one step, as the weights alone are replaced
        earlier.save_pretrained(tmp_path)
        calls = []

        def stopped(*given, at=at, calls=calls):
            calls.append(given)
            if len(calls) > at:
                raise KeyboardInterrupt
            replace(*given)

        monkeypatch.setattr(os, "replace", stopped)
        if at == 0:
            with pytest.raises(KeyboardInterrupt):
                model.save_pretrained(tmp_path)
        else:
            model.save_pretrained(tmp_path)
        monkeypatch.undo()
        assert torch.equal(logits(tls.load_model(tmp_path)), expected[min(at, 1)])
        assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "spectral_config.json"]


def test_the_file_is_the_model(tmp_path):
    """Its config is in it: the file of another save in the folder, or the file alone, is that other model."""
    model = spectral_of()
    model.save_pretrained(tmp_path / "one")
    model.cfg.use_attn_result = True
    model.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "one" / "model.safetensors")
    assert_same(tls.load_model(tmp_path / "one"), model)
    assert_same(tls.load_model(tmp_path / "one" / "model.safetensors"), model)
    (tmp_path / "one" / "spectral_config.json").unlink()
    assert_same(tls.load_model(tmp_path / "one"), model)
    model.save_pretrained(tmp_path / "one")


def plain(at):
    zoo.save_folder("llama", at)


def shards(at):
    zoo.hf_model("llama").save_pretrained(at, max_shard_size="20KB")


def spectral_parameters(at):
    to_spectral(zoo.hf_model("llama")).save_pretrained(at)


def spectral_and_weights(at):
    to_spectral(zoo.hf_model("llama"), share_weights=False).save_pretrained(at)


def of_another_version(at):
    at.mkdir()
    save_file({"w": torch.ones(1)}, at / "model.safetensors", {"format": "tlspectral.spectral_hooked_transformer.1"})


def file_of_spectral_parameters(at):
    at.mkdir()
    save_spectral(to_spectral(zoo.shared("bridge", "llama")), at / "model.safetensors")


def file(name, content="not looked into"):
    def write(at):
        at.mkdir()
        (at / name).write_text(content)

    return write


OTHERS = {
    "plain": (plain, r"holds another model \(config.json\)"),
    "shards": (shards, r"holds another model \(config.json\)"),
    "spectral parameters": (spectral_parameters, "holds another model"),
    "their file": (file_of_spectral_parameters, r"holds another model \(model.safetensors\)"),
    "foreign weights": (file("model.safetensors"), r"holds another model \(model.safetensors\)"),
    "pickle": (file("pytorch_model.bin"), r"holds another model \(pytorch_model.bin\)"),
    "gguf": (file("some.gguf"), r"holds another model \(some.gguf\)"),
    "spectral parameters beside weights": (spectral_and_weights, r"holds another model \(spectral_config.json\)"),
    "foreign config": (file("spectral_config.json", "{}"), r"holds another model \(spectral_config.json\)"),
    "no config": (file("spectral_config.json", "[" * 100_000), r"holds another model \(spectral_config.json\)"),
    "more layers": (lambda at: spectral_of({"n_layers": 3}).save_pretrained(at), "another model .model.safetensors"),
    "wider": (lambda at: spectral_of({"d_mlp": 48}).save_pretrained(at), "holds another model .model.safetensors"),
    "other heads": (
        lambda at: spectral_of(heads=[(0, 0), (0, 1)]).save_pretrained(at), "another model .model.safetensors",
    ),
    "another version": (of_another_version, r"holds another model \(model.safetensors\)"),
    "a file": (lambda at: at.write_text("mine"), "run"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_a_save_refuses_the_folder_of_another_model(tmp_path, what):
    make, said = OTHERS[what]
    make(tmp_path / "run")
    before = held(tmp_path)
    with pytest.raises(FileExistsError, match=said):
        spectral_of().save_pretrained(tmp_path / "run")
    assert held(tmp_path) == before


def test_files_of_a_tokenizer_that_no_save_wrote_stay(tmp_path):
    model = with_tokenizer(tmp_path / "other")
    file("tokenizer.json")(tmp_path / "run")
    before = held(tmp_path)
    with pytest.raises(FileExistsError, match=r"tokenizer.json would be replaced by this save, and no earlier"):
        model.save_pretrained(tmp_path / "run")
    assert held(tmp_path) == before


def test_other_saves_refuse_its_folder(tmp_path):
    model = spectral_of()
    model.save_pretrained(tmp_path)
    before = held(tmp_path)
    for share in (True, False):
        with pytest.raises(FileExistsError, match=r"holds another model \((model.safetensors|spectral_config.json)\)"):
            to_spectral(zoo.hf_model("llama"), share_weights=share).save_pretrained(tmp_path)
    with pytest.raises(FileExistsError, match="is not a file of spectral parameters"):
        save_spectral(model, tmp_path / "model.safetensors")
    assert held(tmp_path) == before


@pytest.mark.parametrize(("size", "named"), [(20, "model.safetensors"), (20_000, "model.safetensors")])
def test_a_full_disk_names_the_file_and_leaves_the_folder_as_it_was(tmp_path, file_size_limit, size, named):
    spectral_of().save_pretrained(tmp_path)
    before, model = held(tmp_path), spectral_of(seed=1)
    with file_size_limit(size), pytest.raises(OSError, match=str(tmp_path / named)):
        model.save_pretrained(tmp_path)
    assert held(tmp_path) == before


def test_a_full_disk_at_the_tokenizer_names_the_folder(tmp_path, file_size_limit):
    model = with_tokenizer(tmp_path / "other")
    with file_size_limit(100), pytest.raises(OSError, match=str(tmp_path / "run")):
        model.save_pretrained(tmp_path / "run")
    assert held(tmp_path / "run") == {}


# --- what cannot come back is not saved ---


def with_nan(model):
    with torch.no_grad():
        model.blocks[1].mlp.W_in[0, 0] = float("nan")


UNSAVED = {
    "nan": (with_nan, BadWeights, "blocks.1.mlp.W_in has values that are not finite"),
    "function": (lambda model: setattr(model.cfg, "act_fn", torch.relu), ValueError, "cfg.act_fn is <"),
    "another field": (lambda model: setattr(model.cfg, "learned", 3), ValueError, "argument 'learned'"),
    "tuple": (lambda model: setattr(model.cfg, "attn_types", ("global",) * 2), ValueError, "cfg.attn_types is"),
    "probe": (
        lambda model: setattr(model, "probe", torch.nn.Linear(2, 2)), ValueError, r"unknown \['probe.bias', 'probe.w",
    ),
    "resized": (
        lambda model: setattr(model.unembed, "W_U", torch.nn.Parameter(torch.zeros(32, 98))), ValueError,
        r"unembed.W_U: .*\[32, 98\].*\[32, 97\]",
    ),
    "no layer": (lambda model: model.blocks.pop(1), ValueError, r"missing \['blocks.1"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAVED)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, what):
    change, error, said = UNSAVED[what]
    model = spectral_of()
    model.save_pretrained(tmp_path)
    before = held(tmp_path)
    change(model)
    with pytest.raises(error, match=said):
        model.save_pretrained(tmp_path)
    assert held(tmp_path) == before


def test_one_file_has_all_tensors_and_the_config(tmp_path):
    model = spectral_of(scope="model")
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "spectral_config.json").read_text())
    assert stored == {"format": FORMAT, "model": "SpectralHookedTransformer", "files": ["model.safetensors"]}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        record = json.loads(opened.metadata()["spectral"])
        assert record["hooked_transformer"]["dtype"] == "float32"
        assert not {"device", "n_devices"} & record["hooked_transformer"].keys()
        assert record["scope"] == "model"
        assert {name for name, _ in model.named_parameters()} <= set(opened.keys())
    # It serves as a file of weights too.
    other = SpectralHookedTransformer(config(), scope="model")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert torch.equal(logits(other), logits(model))


def test_tied_weights_and_views_come_back(tmp_path):
    model = spectral_of()
    model.unembed.W_U = torch.nn.Parameter(model.embed.W_E.detach().T)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(tls.load_model(tmp_path)), logits(model))


def test_a_file_of_spectral_parameters_of_the_loaded_model_fits_its_weights(tmp_path):
    model = spectral_of()
    model.save_pretrained(tmp_path / "run")
    save_spectral(tls.load_model(tmp_path / "run"), tmp_path / "spectral.safetensors")
    plain_weights = {name: value for name, value in model.state_dict().items() if not name.startswith("spectral.")}
    from transformer_lens import HookedTransformer

    base = HookedTransformer(config())
    base.load_state_dict(plain_weights)
    assert torch.equal(logits(load_spectral(base, tmp_path / "spectral.safetensors")), logits(model))


def test_the_recipe_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tls, "analyze_heads", lambda model: tables.append(type(model)))
    tables: list = []
    (code,) = [block for block in blocks("docs/training.md") if "SpectralHookedTransformer(config)" in block]
    names = {"tls": tls, "torch": torch, "parameter_groups": parameter_groups, "batches": [zoo.prompt()]}
    exec(compile(code, "training.md", "exec"), names)
    assert tables == [SpectralHookedTransformer]
