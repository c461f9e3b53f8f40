"""load_model: folders on both backends, names, training steps, contexts, and the forms of Falcon."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from checkpoint_folders import sharded, with_config
from transformer_lens.model_bridge.sources import build_bridge_from_module
from zoo import logits
from zoo_shapes import FALCONS

import tlspectral as tls
import tlspectral.models.loading
from tlspectral.heads.detectors import detect_heads
from tlspectral.models.loading import checks, load_model
from tlspectral.models.loading.finding import find_source
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.bridge import stated_context
from tlspectral.models.running.passes import whole_logits

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)
FAST = (
    "gpt2",
    "llama3",
    "gemma3",
    "opt",
    "bloom",
    "falcon_grouped",
    "falcon_with_bias",
    "falcon_one_norm",
    "phi3_longrope",
)

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A Llama with its tokenizer, in a folder. Not to be changed."""
    return zoo.save_folder("llama", tmp_path_factory.mktemp("tokenized") / "llama", tokenizer=True)


def loaded_cases():
    for backend in BACKENDS:
        bridges = (*zoo.RIGHT, *zoo.LENGTH_DEPENDENT, *(name for name in FALCONS if name != "falcon_alibi"))
        for name in bridges if backend == "bridge" else zoo.HOOKED_ARCHITECTURES:
            yield pytest.param(backend, name, marks=[pytest.mark.slow] * (name not in FAST))


# Of learned positions: `generate` of a HookedTransformer counts them twice.
@pytest.mark.filterwarnings("ignore:.*loses the key/value cache")
@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), loaded_cases())
def test_logits_equal_the_checkpoints(folder, backend, name):
    tokens = zoo.prompt()
    expected = logits(zoo.hf_model(name), tokens)
    model = load_model(folder(name), backend=backend)
    # Measured: at most 1.5e-6; the smallest fault seen in the zoo, a rope scaling left out, is 0.4.
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-5, rtol=0)
    assert not model.training
    assert model.tokenizer is None
    assert model.tlspectral_source == {"model": str(folder(name)), "revision": None}
    assert attention_view(model).n_ctx == zoo.CONTEXT or name not in ("gpt2", "llama3", "gemma3")
    if name == "opt" and backend == "bridge":  # leaves attention to transformers, which alone shows a pattern eagerly
        assert "blocks.0.attn.hook_pattern" in model.run_with_cache(tokens)[1]


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_with_its_tokenizer_is_loaded_in_silence(tokenized, capfd, backend):
    from transformers.utils import logging as settings

    before = settings.get_verbosity(), settings.is_progress_bar_enabled(), list(logging.root.handlers)
    model = load_model(str(tokenized), backend=backend)
    assert capfd.readouterr() == ("", "")
    assert (settings.get_verbosity(), settings.is_progress_bar_enabled(), list(logging.root.handlers)) == before
    assert not logging.root.filters
    assert model.to_tokens("w5 w96 w7", prepend_bos=False).tolist() == [[5, 96, 7]]
    state, hooks = set(model.state_dict()), set(model.hook_dict)
    del model.tlspectral_source  # no part of the model
    assert (set(model.state_dict()), set(model.hook_dict)) == (state, hooks)


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("backend", BACKENDS)
def test_types(copied, backend):
    path = copied("llama")
    zoo.hf_model("llama").bfloat16().save_pretrained(path)
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        model = load_model(path, backend=backend, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert model.cfg.dtype == expected
    assert checks.log_probabilities(model) is None  # rounding would hide what there is to compare


# Of learned positions: `generate` of a HookedTransformer counts them twice.
@pytest.mark.filterwarnings("ignore:.*loses the key/value cache")
@zoo.needs_hooked
def test_hooked_folds_norms_and_nothing_else(folder):
    import transformer_lens.loading_from_pretrained as tl_loading

    before = tl_loading.AutoConfig, tl_loading.get_official_model_name
    model = load_model(folder("gpt2"), backend="hooked")
    assert (tl_loading.AutoConfig, tl_loading.get_official_model_name) == before
    assert model.cfg.normalization_type == "LNPre"
    plain = zoo.hf_model("gpt2").transformer
    torch.testing.assert_close(model.W_E, plain.wte.weight, atol=0, rtol=0)
    block = plain.h[0]
    weight, bias = block.attn.c_attn.weight[:, -zoo.WIDTH :], block.attn.c_attn.bias[-zoo.WIDTH :]
    torch.testing.assert_close(model.b_V[0].flatten(), bias + block.ln_1.bias @ weight, atol=1e-6, rtol=1e-6)


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "pickles"])
def test_a_sharded_checkpoint(tmp_path, kind):
    sharded(tmp_path, kind)
    # The same weights and the same arithmetic: the difference was 0.
    expected = zoo.hf_model("llama")(zoo.prompt()).logits
    torch.testing.assert_close(load_model(tmp_path)(zoo.prompt()), expected, atol=1e-6, rtol=0)


def test_sound_weights_are_not_searched(folder, monkeypatch):
    """A pass over the weights of a large model takes seconds."""
    searched = []
    monkeypatch.setattr(checks.torch, "isfinite", lambda value: searched.append(value) or torch.ones(1).bool())
    load_model(folder("llama"))
    assert not [value for value in searched if value.ndim == 2 and value.shape[0] == zoo.VOCABULARY]


# --- names and steps ---


@pytest.mark.slow
@pytest.mark.tl4
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
    assert load_model(tmp_path / "step0").tokenizer is None  # none is borrowed from a neighbour
    with pytest.raises(FileNotFoundError, match="neither a folder step8 nor checkpoint-8"):
        load_model(tmp_path, checkpoint=8)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="it holds checkpoint-16, step0: choose one by checkpoint="):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "step", "location", "revision"),
    [
        ("EleutherAI/pythia-1b-deduped", 0, "EleutherAI/pythia-1b-deduped", "step0"),
        ("stanford-crfm/alias-gpt2-small-x21", 400, "stanford-crfm/alias-gpt2-small-x21", "checkpoint-400"),
        ("pythia-70m", 512, "EleutherAI/pythia-70m", "step512"),
        ("gpt2-small", None, "gpt2", None),
    ],
)
def test_names_of_transformer_lens_and_steps_of_hub_suites(name, step, location, revision):
    source = find_source(name, checkpoint=step)
    assert (source.kind, source.location, source.revision) == ("hub", location, revision)
    assert source.record == {"model": location, "revision": revision}
    assert find_source("gpt2", revision="main").record == {"model": "gpt2", "revision": "main"}


def test_a_broken_tokenizer_is_left_out_with_a_warning(tmp_path):
    path = zoo.save_folder("llama", tmp_path, tokenizer=True)
    (path / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="is loaded without its tokenizer: it cannot be read: "):
        assert load_model(path).tokenizer is None


@pytest.mark.slow  # a process of its own
def test_a_packaged_model_loads_nothing_that_reads_the_files_of_others():
    roads = ("adapters", "building", "checks", "damage", "finding", "gguf", "hooked", "hub", "pretrained", "roads",
             "weight_files")  # fmt: skip
    modules = ["tlspectral.spectral_rope", *(f"tlspectral.models.loading.{road}" for road in roads)]
    code = f"import sys, tlspectral as t; t.load_model('tiny-rope'); print([m for m in {modules} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(tlspectral.models.loading.__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- contexts ---


def test_the_context_of_a_bridge_is_that_of_the_config():
    """TransformerLens has a default of its own for some architectures."""
    for name in ("gptj", "mpt", "neox"):
        assert attention_view(zoo.shared("bridge", name)).n_ctx == zoo.CONTEXT
    assert stated_context(zoo.hf_model("gemma3_with_eyes").config) == zoo.CONTEXT
    model = zoo.shared("bridge", "bloom")  # states none
    assert stated_context(model.original_model.config) is None
    assert attention_view(model).n_ctx == model.cfg.n_ctx


@pytest.mark.filterwarnings("ignore:.*loses the key/value cache")
def test_the_shorter_of_two_stated_lengths_is_the_context(tmp_path):
    """MPT has positions for `max_seq_len` tokens, whatever `max_position_embeddings` its config holds beside it."""
    model = zoo.hf_model("mpt")
    model.config.max_seq_len, model.config.max_position_embeddings = 64, 2048
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert attention_view(loaded).n_ctx == 64
    assert detect_heads(loaded, n_sequences=4).attrs["segment_length"] == 31  # [BOS, r, r] of 63 tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_shorter_than_the_comparison(backend, tmp_path):
    shape = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert load_model(tmp_path, backend=backend).cfg.n_ctx == 8


@zoo.needs_hooked
def test_a_hooked_transformer_has_the_context_of_the_config_and_2048_tokens_at_most(copied):
    path = copied("qwen3")
    model = load_model(path, backend="hooked")
    assert attention_view(model).n_ctx == zoo.CONTEXT
    assert detect_heads(model, n_sequences=2).attrs["segment_length"] == (zoo.CONTEXT - 1) // 2
    assert load_model(with_config(path, max_position_embeddings=4096), backend="hooked").cfg.n_ctx == 2048


def test_a_prompt_longer_than_the_positions_is_refused_in_words():
    """Before, a tensor of another size or an index out of range was what one saw."""
    model = zoo.shared("bridge", "mpt")
    tokens = zoo.prompt(length=zoo.CONTEXT + 1)
    with pytest.raises(ValueError, match=f"prompt 0 has {zoo.CONTEXT + 1} tokens, and the model's context is"):
        tls.verify_scores(model, tokens)
    with pytest.raises(ValueError, match=rf"the prompt has {zoo.CONTEXT + 1} tokens, and the model has positions for"):
        whole_logits(attention_view(model), tokens)


# --- Falcon ---


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("name", ["falcon_grouped", "falcon_with_bias", "falcon_one_norm"])
def test_queries_keys_and_values_of_falcon_are_cut_as_the_config_says(folder, name):
    model = load_model(folder(name))
    raw = attention_view(model).raw(0)
    n_kv_heads, d_head = FALCONS[name]().num_kv_heads, raw.w_q.shape[-1]
    # The rows of the packed projection, one key/value head after the other: its queries, its key, its value.
    packed = zoo.hf_model(name).transformer.h[0].self_attention.query_key_value
    groups = packed.weight.detach().unflatten(0, (n_kv_heads, -1, d_head))
    assert torch.equal(raw.w_q, groups[:, :-2].flatten(0, 1).mT)
    assert torch.equal(raw.w_k, groups[:, -2].mT)
    assert torch.equal(raw.w_v, groups[:, -1].mT)
    model.enable_compatibility_mode(disable_warnings=True)
    assert float(tls.verify_scores(model).max()) < 1e-5  # measured 3.6e-6 at scores of 8


@pytest.mark.parametrize("name", ["falcon_grouped", "falcon_one_norm"])
def test_transformer_lens_by_itself_does_not_hold_them(name):
    """When it does, the correction of `tlspectral.models.loading.building` can go."""
    model = zoo.hf_model(name)
    with pytest.raises((RuntimeError, AttributeError)):
        build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)


def test_transformers_adds_falcons_alibi_twice_where_scores_are_seen():
    """Why ALiBi is refused: the same weights compute something else under eager attention."""

    def difference(name):
        eager = zoo.hf_model(name)
        config = FALCONS[name]()
        config._attn_implementation = "sdpa"
        fused = type(eager)(config).eval()
        fused.load_state_dict(eager.state_dict())
        return float((logits(eager, zoo.prompt()) - logits(fused, zoo.prompt())).abs().max())

    assert difference("falcon") < 1e-6  # measured 2e-7: the two ways agree where there is no ALiBi
    assert difference("falcon_alibi") > 1e-2
