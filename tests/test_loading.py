"""load_model: every source and backend, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import zoo

import tlspectral.models.loading
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loading import load_model
from tlspectral.models.loading.agreement import log_probabilities
from tlspectral.models.loading.source import find_source

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)


pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint folder per architecture, made when first asked for."""
    made = {}

    def folder(name, tokenizer=False):
        if (name, tokenizer) not in made:
            path = tmp_path_factory.mktemp("checkpoints") / (name + "-tokenized" * tokenizer)
            made[name, tokenizer] = zoo.save_folder(name, path, tokenizer=tokenizer)
        return made[name, tokenizer]

    return folder


def logits(model, tokens):
    with torch.no_grad():
        output = model(tokens)
    return getattr(output, "logits", output)


def loads(backend, name):
    return name not in zoo.READ_WRONG if backend == "bridge" else name in zoo.HOOKED_ARCHITECTURES


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for backend in BACKENDS
        for name in zoo.ARCHITECTURES + zoo.LENGTH_DEPENDENT
        if loads(backend, name)
    ],
)
def test_logits_equal_the_checkpoints(folders, backend, name):
    tokens = zoo.prompt()
    expected = logits(zoo.hf_model(name), tokens)
    model = load_model(str(folders(name)), backend=backend)
    # Measured: at most 1.5e-6; the smallest fault seen in the zoo, a rope scaling left out, is 0.4.
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-5, rtol=0)
    assert not model.training
    assert model.tokenizer is None
    assert model.tlspectral_source == {"model": str(folders(name)), "revision": None}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "phi"])
def test_tokenizer_comes_with_the_folder(folders, backend, name):
    model = load_model(folders(name, tokenizer=True), backend=backend)
    assert model.to_tokens("w5 w96 w7", prepend_bos=False).tolist() == [[5, 96, 7]]


def test_auto_is_the_bridge(folders):
    assert type(load_model(folders("llama"))).__name__ == "TransformerBridge"


@pytest.mark.parametrize("backend", BACKENDS)
def test_provenance_is_no_part_of_the_model(folders, backend):
    model = load_model(folders("gpt2"), backend=backend)
    state, hooks = set(model.state_dict()), set(model.hook_dict)
    del model.tlspectral_source
    assert set(model.state_dict()) == state
    assert set(model.hook_dict) == hooks
    assert not any("tlspectral" in key for key in state | hooks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype(folders, backend, dtype, expected):
    model = load_model(folders("llama"), backend=backend, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.cfg.dtype == expected


def test_a_half_precision_checkpoint_is_loaded_in_float32(tmp_path):
    zoo.hf_model("llama").bfloat16().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_model(tmp_path).parameters()} == {torch.float32}


def test_delegated_attention_is_eager(folders):
    """OPT's bridge leaves attention to transformers, whose other kernels never show a pattern to hooks."""
    _, cache = load_model(folders("opt")).run_with_cache(zoo.prompt())
    assert "blocks.0.attn.hook_pattern" in cache


@zoo.needs_hooked
def test_hooked_folds_norms_and_nothing_else(folders):
    model = load_model(folders("gpt2"), backend="hooked")
    assert model.cfg.normalization_type == "LNPre"
    plain = zoo.hf_model("gpt2").transformer
    torch.testing.assert_close(model.W_E, plain.wte.weight, atol=0, rtol=0)
    torch.testing.assert_close(model.b_V[0].flatten(), _folded_value_bias(plain.h[0]), atol=1e-6, rtol=1e-6)


def _folded_value_bias(block):
    weight, bias = block.attn.c_attn.weight[:, -zoo.WIDTH :], block.attn.c_attn.bias[-zoo.WIDTH :]
    return bias + block.ln_1.bias @ weight


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["yarn", "phi3_longrope", "dynamic"])
def test_hooked_refuses_rope_scaling_that_it_ignores(folders, name):
    scaling = {"phi3_longrope": "longrope"}.get(name, name)
    with pytest.raises(UnsupportedArchitecture, match=f'ignores the {scaling} rope scaling .* use backend="bridge"'):
        load_model(folders(name), backend="hooked")


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["gemma2", "smollm3", "mamba", "deepseek_v3"])
def test_hooked_refuses_what_transformer_lens_does_not_convert(folders, name):
    with pytest.raises(UnsupportedArchitecture, match=r'has no HookedTransformer of .* Use backend="bridge"'):
        load_model(folders(name), backend="hooked")


@zoo.needs_hooked
def test_hooked_refuses_a_window_that_it_ignores(tmp_path):
    model = zoo.hf_model("qwen2")
    model.config.update({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2})
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="ignores the sliding window of 64 tokens"):
        load_model(tmp_path, backend="hooked")


@zoo.needs_hooked
def test_hooked_refuses_other_logits(folders, monkeypatch):
    """What no rule names is caught by comparing with the checkpoint."""
    monkeypatch.setattr("tlspectral.models.loading.hooked._check_rope", lambda *_: None)
    with pytest.raises(UnsupportedArchitecture, match=r"does not compute what the checkpoint does \(log-prob"):
        load_model(folders("yarn"), backend="hooked")


@pytest.mark.parametrize("name", zoo.READ_WRONG)
def test_a_bridge_with_other_logits_is_refused(folders, name):
    with pytest.raises(
        UnsupportedArchitecture, match=r"^the bridge that TransformerLens 3\.\S+ makes of .*cohere does not"
    ):
        load_model(folders(name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_shorter_than_the_comparison(backend, tmp_path):
    shape = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert load_model(tmp_path, backend=backend).cfg.n_ctx == 8


def test_half_precision_is_not_compared(folders):
    """Rounding would hide what there is to see."""
    model = load_model(folders("llama"), dtype="bfloat16")
    assert log_probabilities(model) is None


@zoo.needs_hooked
def test_hooked_leaves_transformer_lens_as_it_was(folders):
    import logging

    import transformer_lens.loading_from_pretrained as tl_loading

    before = tl_loading.AutoConfig, tl_loading.get_official_model_name, list(logging.root.handlers)
    load_model(folders("bloom"), backend="hooked")
    with pytest.raises(UnsupportedArchitecture):
        load_model(folders("yarn"), backend="hooked")
    after = tl_loading.AutoConfig, tl_loading.get_official_model_name, list(logging.root.handlers)
    assert after == before
    assert not logging.root.filters


@pytest.mark.skipif(zoo.HAS_HOOKED, reason="TransformerLens 3 has HookedTransformer")
def test_hooked_on_transformer_lens_4(folders):
    with pytest.raises(
        ImportError, match=r'removed in TransformerLens 4: use backend="bridge", or .*transformer-lens<4'
    ):
        load_model(folders("llama"), backend="hooked")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_printed(folders, capfd, backend):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(folders("bloom"), backend=backend)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_training_checkpoints_of_a_folder(tmp_path):
    zoo.save_folder("llama", tmp_path / "step0", seed=1)
    zoo.save_folder("llama", tmp_path / "checkpoint-16", seed=2)
    zoo.save_folder("llama", tmp_path, seed=3, tokenizer=True)
    tokens = zoo.prompt()
    for step, seed, revision in [(0, 1, "step0"), (16, 2, "checkpoint-16"), (None, 3, None)]:
        model = load_model(tmp_path, checkpoint=step)
        torch.testing.assert_close(logits(model, tokens), logits(zoo.hf_model("llama", seed), tokens))
        assert model.tlspectral_source["revision"] == revision
        assert model.tokenizer is not None  # the run's own, kept beside the checkpoints
    with pytest.raises(FileNotFoundError, match="neither a folder step8 nor checkpoint-8"):
        load_model(tmp_path, checkpoint=8)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="it holds checkpoint-16, step0: choose one by checkpoint="):
        load_model(tmp_path)


def test_no_tokenizer_is_borrowed_from_a_neighbour(tmp_path):
    zoo.save_folder("llama", tmp_path, tokenizer=True)
    zoo.save_folder("gpt2", tmp_path / "other")
    assert load_model(tmp_path / "other").tokenizer is None


@pytest.mark.parametrize(
    ("name", "step", "revision"),
    [
        ("EleutherAI/pythia-70m", 512, "step512"),
        ("EleutherAI/pythia-1b-deduped", 0, "step0"),
        ("stanford-crfm/alias-gpt2-small-x21", 400, "checkpoint-400"),
        ("pythia-70m", 512, "step512"),
    ],
)
def test_training_steps_of_hub_suites(name, step, revision):
    source = find_source(name, checkpoint=step)
    assert (source.kind, source.revision) == ("hub", revision)
    assert "/" in source.location


def test_short_names_of_transformer_lens():
    assert find_source("gpt2-small").record == {"model": "gpt2", "revision": None}
    assert find_source("gpt2", revision="main").record == {"model": "gpt2", "revision": "main"}


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("./nowhere", {}, FileNotFoundError, "There is no folder or file ./nowhere"),
        ("/nowhere/at/all", {}, FileNotFoundError, "There is no folder or file"),
        ("nowhere.gguf", {}, FileNotFoundError, "There is no file nowhere.gguf"),
        ("not a name!", {}, ValueError, "neither a path on this machine nor a hub id"),
        ("nobody/nothing", {}, ValueError, "'nobody/nothing' is not a folder, a .gguf file or a cached hub model"),
        ("nobody/nothing", {"revision": "x"}, ValueError, "'nobody/nothing' at revision 'x' is not"),
        ("nobody/nothing", {"checkpoint": 3}, ValueError, "not known how nobody/nothing names its training steps"),
        ("EleutherAI/pythia-70m", {"checkpoint": 3, "revision": "step3"}, ValueError, "give one of them"),
        ("EleutherAI/pythia-70m", {"checkpoint": -1}, ValueError, "checkpoint=-1 is not a training step"),
        ("gpt2", {"backend": "tensor"}, ValueError, "backend='tensor' is none of 'auto', 'bridge', 'hooked'"),
        ("tiny-rop", {}, ValueError, "; did you mean 'tiny-rope'?"),
        ("smollm2-135", {}, ValueError, "; did you mean 'smollm2-135m'?"),
        ("smollm2", {}, ValueError, "; did you mean 'smollm2-135m'?"),
        ("tiny rope", {}, ValueError, "; did you mean 'tiny-rope'?"),
        ("tiny-rope", {"device": "abacus"}, ValueError, "device='abacus' cannot be used here, choose cpu or another"),
        ("gpt2", {"dtype": "int8"}, ValueError, "dtype='int8' is not a floating-point type"),
    ],
)
def test_wrong_arguments(name, options, error, text):
    with pytest.raises(error) as raised:
        load_model(name, **options)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_wrong_files(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json, so it is not a checkpoint folder\."):
        load_model(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"is a file but not a \.gguf file"):
        load_model(folders("llama") / "model.safetensors")
    with pytest.raises(ValueError, match="which has no revision='main'"):
        load_model(folders("llama"), revision="main")
    (tmp_path / "fake.gguf").write_bytes(b"GGML....")
    with pytest.raises(ValueError, match="does not begin as a GGUF file does"):
        load_model(tmp_path / "fake.gguf")
    with pytest.raises(ValueError, match="no revision or checkpoint to choose"):
        load_model(tmp_path / "fake.gguf", checkpoint=1)


def test_damaged_checkpoints(tmp_path):
    folder = zoo.save_folder("llama", tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadWeights, match=r"model\.safetensors cannot be read as safetensors .*; fetch it again"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"cannot be loaded: Error no file named model\.safetensors"):
        load_model(folder)

    from safetensors.torch import load, save_file

    kept = {key: value for key, value in load(whole).items() if "layers.1.self_attn.q_proj" not in key}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(
        BadWeights, match=r"lacks 1 of the weights .* model\.layers\.1\.self_attn\.q_proj\.weight; they"
    ):
        load_model(folder)


def test_weights_of_another_shape(tmp_path):
    folder = zoo.save_folder("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadWeights, match=r"do not have the shapes that its config\.json asks for"):
        load_model(folder)


def test_other_kinds_of_models(folders, tmp_path):
    import transformers

    with pytest.raises(UnsupportedArchitecture, match=r"not a causal language model \(model type bert\)"):
        load_model(folders("bert"))
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedArchitecture, match=r"encoder-decoder model \(model type t5\)"):
        load_model(tmp_path / "t5")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UnsupportedArchitecture, match="transformers does not load"):
        load_model(tmp_path / "odd")


def test_quantised_weights(tmp_path):
    folder = zoo.save_folder("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadWeights, match=r"stores quantised weights \(gptq\)"):
        load_model(folder)


def test_a_broken_tokenizer_is_left_out_with_a_warning(tmp_path):
    folder = zoo.save_folder("llama", tmp_path, tokenizer=True)
    (folder / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="is loaded without its tokenizer: it cannot be read: "):
        model = load_model(folder)
    assert model.tokenizer is None


def test_a_packaged_model_loads_nothing_that_reads_the_files_of_others():
    roads = (
        "adapters",
        "building",
        "from_object",
        "gguf",
        "hooked",
        "hub",
        "pretrained",
        "unused_weights",
        "weight_files",
    )
    modules = [f"tlspectral.models.loading.{road}" for road in roads]
    code = f"import sys, tlspectral as t; t.load_model('tiny-rope'); print([m for m in {modules} if m in sys.modules])"
    assert _python(code) == "[]"


def test_cached_hub_model_needs_no_network(tmp_path):
    """A hub id whose files lie in the cache, by branch and by training step, with its tokenizer, and no network."""
    commits = {"main": ("a" * 40, 1), "step8": ("b" * 40, 2)}
    repository = tmp_path / "hub" / "models--zoo--pythia-tiny"
    (repository / "refs").mkdir(parents=True)
    for branch, (commit, seed) in commits.items():
        (repository / "refs" / branch).write_text(commit)
        zoo.save_folder("llama", repository / "snapshots" / commit, seed=seed, tokenizer=True)
    code = f"""
import socket, sys
sys.path.insert(0, {str(Path(zoo.__file__).parent)!r})
def refuse(*_, **__): raise AssertionError("a connection was attempted")
socket.socket.connect = socket.getaddrinfo = refuse
import torch, zoo
from tlspectral.models.loading import load_model
tokens = zoo.prompt()
with torch.no_grad():
    for backend in {BACKENDS!r}:
        for options, seed in (({{}}, 1), ({{"checkpoint": 8}}, 2), ({{"revision": "step8"}}, 2)):
            model = load_model("zoo/pythia-tiny", backend=backend, **options)
            torch.testing.assert_close(model(tokens), zoo.hf_model("llama", seed)(tokens).logits, atol=1e-5, rtol=0)
            assert model.to_tokens("w5 w6", prepend_bos=False).tolist() == [[5, 6]]
            print(*model.tlspectral_source.values())
"""
    said = _python(code, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="0").splitlines()
    main, step = (f"zoo/pythia-tiny {name} {commit}" for name, commit in (("None", "a" * 40), ("step8", "b" * 40)))
    assert said == [main, step, step] * len(BACKENDS)


def _python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(tlspectral.models.loading.__file__).parents[2]), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
