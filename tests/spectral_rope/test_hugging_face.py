"""Hugging Face models with learned rotations: parity, the bridge's numbers, checkpointing, caches, threads, compile."""

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from conformance.spectral_models import gradients
from safetensors.torch import load_file, save_file
from spectral_saves import WAYS, largest_change
from spectral_training import trainer_of
from spectral_zoo import assert_on_its_own, greedy, move
from zoo import logits

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.spectral_rope import load_spectral, merge, to_spectral


@pytest.fixture
def model(tmp_path):
    """A model that has a name, the folder `model`."""
    zoo.hf_model("llama").save_pretrained(tmp_path / "model")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def assert_bridge_of(bridge, spectral):
    """Rounding of a bridge's other code is 1e-6; learned rotations move logits by 0.05 and more."""
    torch.testing.assert_close(logits(bridge), logits(spectral), rtol=0, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "trained"), [(True, False), (False, True)])
def test_weights_are_shared_and_frozen_or_its_own(share, trained):
    model = zoo.hf_model("llama")
    spectral = to_spectral(model, share_weights=share)
    weight, own = model.model.layers[0].mlp.up_proj.weight, spectral.model.layers[0].mlp.up_proj.weight
    assert own is not weight
    assert (own.data_ptr() == weight.data_ptr()) == share
    assert own.requires_grad == trained
    assert weight.requires_grad
    before = logits(model)
    optimizer = torch.optim.AdamW(spectral.parameters(), lr=1e-2)
    gradients(spectral)
    optimizer.step()
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(spectral), before)


@pytest.mark.slow
def test_positions_are_those_that_are_given():
    """At positions 0, 2, 4, ... a model is the one of twice the frequencies at 0, 1, 2, ..."""
    model, faster = zoo.hf_model("llama"), zoo.hf_model("llama")
    faster.model.rotary_emb.inv_freq *= 2
    faster.model.rotary_emb.original_inv_freq *= 2
    spectral, other = move(to_spectral(model, log_omega=False)), to_spectral(faster, log_omega=False)
    with torch.no_grad():
        for index, module in other.spectral.items():
            for name in ("phase", "gain", "omega"):
                getattr(module, name).copy_(getattr(spectral.spectral[index], name) * (1 + (name == "omega")))
    found = logits(spectral, position_ids=2 * torch.arange(24)[None])
    # Rounding 1e-6; positions that are not read would leave differences of order 1.
    torch.testing.assert_close(found, logits(other), rtol=0, atol=2e-5)
    assert float((found - logits(spectral)).abs().max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def test_generation_with_its_cache(name):
    spectral, tokens = move(to_spectral(zoo.hf_model(name))), zoo.prompt(batch=1, length=6)
    for cached in (True, False):
        found = spectral.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=cached, eos_token_id=None)
        assert torch.equal(found, greedy(spectral, tokens, 6))


@pytest.mark.slow
def test_copies_files_and_threads():
    spectral = move(to_spectral(zoo.hf_model("llama")))
    expected = logits(spectral)
    assert_on_its_own(copy.deepcopy(spectral), spectral)
    file = io.BytesIO()
    torch.save(spectral, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), expected)
    prompts = [zoo.prompt(length=length, seed=length) for length in (24, 17, 9, 5)]
    wanted = [logits(spectral, prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(map(torch.equal, pool.map(lambda prompt: logits(spectral, prompt), prompts), wanted))


def hooks_of(model):
    """Hooks on every module: what torch.compile has to trace besides the model."""
    return {
        name: (list(module._forward_hooks.values()), list(module._forward_pre_hooks.values()))
        for name, module in model.named_modules()
    }


@pytest.mark.slow
@pytest.mark.parametrize("asked_for", [False, True])
def test_checkpointing_leaves_no_hook_but_the_one_that_the_user_asked_for(asked_for):
    spectral = to_spectral(zoo.hf_model("llama"))
    if asked_for:
        spectral.enable_input_require_grads()
    before = hooks_of(spectral)
    for _ in range(2):  # switched on twice it has one hook still
        spectral.gradient_checkpointing_enable()
    assert spectral(input_ids=zoo.prompt()).logits.requires_grad
    assert asked_for or hooks_of(spectral) != before
    spectral.gradient_checkpointing_disable()
    assert hooks_of(spectral) == before


COMPILED = """
import torch, zoo
from spectral_zoo import move
from tlspectral.spectral_rope import to_spectral
for model in [zoo.hf_model("llama"), *([zoo.hooked("llama")] if zoo.HAS_HOOKED else [])]:
    spectral = move(to_spectral(model))
    if hasattr(spectral, "gradient_checkpointing_enable"):
        spectral.gradient_checkpointing_enable()
        spectral.gradient_checkpointing_disable()
    with torch.no_grad():
        compiled = torch.compile(spectral, fullgraph=True, backend="aot_eager")
        found, expected = (getattr(run(zoo.prompt()), "logits", run(zoo.prompt())) for run in (compiled, spectral))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # rounding of fused operations, 1e-6
"""


@pytest.mark.slow
def test_compiled_they_are_one_graph():
    """In another process: the shape checks of tests cannot be compiled."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "tests" / "support"), str(root)])
    subprocess.run([sys.executable, "-c", COMPILED], check=True, env={**os.environ, "PYTHONPATH": paths})


def trained(model, folder, resume=None):
    trainer_of(model, folder, max_steps=4, save_steps=2).train(resume_from_checkpoint=resume)
    return model.eval()


@pytest.mark.slow
def test_trainer_saves_resumes_and_the_folder_is_read_back(model, tmp_path):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spectral = trained(to_spectral(model), tmp_path / "run")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(logits(spectral), logits(model))
    resumed = trained(to_spectral(model), tmp_path / "again", resume=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(logits(resumed), logits(spectral))
    back = load_spectral(model, tmp_path / "run" / "checkpoint-4")
    assert torch.equal(logits(back), logits(spectral))
    loaded = tls.load_model(tmp_path / "run", checkpoint=4)
    assert loaded.tlspectral_source["base"]["model"] == str(tmp_path / "model")
    for index, module in spectral.spectral.items():
        assert torch.equal(loaded.spectral[index].omega_by_head(), module.omega_by_head())
    assert_bridge_of(loaded, spectral)


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_the_object_itself_is_loaded_for_analysis(share):
    spectral = move(to_spectral(zoo.hf_model("llama"), share_weights=share))
    before = {name: value.clone() for name, value in spectral.state_dict().items()}
    bridge = tls.load_model(spectral)
    assert_bridge_of(bridge, spectral)
    tls.verify_scores(bridge, prompts=zoo.prompt())
    assert all(torch.equal(value, before[name]) for name, value in spectral.state_dict().items())
    assert tls.load_model(bridge) is bridge


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("olmoe", marks=pytest.mark.slow)])
def test_weights_that_train_are_saved_resumed_and_the_best_is_loaded(tmp_path, name):
    """Of experts, transformers stores other names than those that a Trainer gives to the model."""
    spectral = trained(to_spectral(zoo.hf_model(name), share_weights=False), tmp_path / "run")
    assert_bridge_of(tls.load_model(tmp_path / "run" / "checkpoint-4"), spectral)
    if name == "llama":  # experts that are read from a file round in another way than their copies, and are refused
        base = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "run" / "checkpoint-4" / "base", attn_implementation="eager"
        )
        assert torch.equal(logits(load_spectral(base.eval(), tmp_path / "run" / "checkpoint-4")), logits(spectral))
    resumed = to_spectral(zoo.hf_model(name), share_weights=False)
    resumed = trained(resumed, tmp_path / "again", resume=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(logits(resumed), logits(spectral))
    with pytest.raises(RuntimeError, match=r"other weights .* its weights are in the folder `base`"):
        to_spectral(zoo.hf_model(name)).load_state_dict(
            load_file(tmp_path / "run" / "checkpoint-4" / "spectral_parameters.safetensors")
        )


@pytest.mark.slow
def test_the_best_of_a_run_is_loaded_at_its_end(tmp_path):
    model = to_spectral(zoo.hf_model("llama"), share_weights=False)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_of(model, tmp_path, max_steps=3, **options)
    trainer.evaluate = lambda **named: {"eval_loss": float(trainer.state.global_step)}  # the first one is the best
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert_bridge_of(tls.load_model(tmp_path / "checkpoint-1"), model.eval())
    assert float((logits(tls.load_model(tmp_path / "checkpoint-3")) - logits(model)).abs().max()) > 0.01


def test_a_trainer_resumes_on_no_other_base_and_with_no_other_choice(model, tmp_path):
    trained(to_spectral(model, frequencies=[0, 1]), tmp_path / "run")
    for other, options, said in (
        (zoo.hf_model("llama", seed=1), {"frequencies": [0, 1]}, "learned on other weights"),
        (model, {"frequencies": [0, 2]}, r"0\.query_mask: other heads= or frequencies="),
    ):
        with pytest.raises(RuntimeError, match=said):
            trained(to_spectral(other, **options), tmp_path / "again", resume=str(tmp_path / "run" / "checkpoint-2"))


# --- a save never destroys ---


def held(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def plain(at, kind):
    """A folder with a model that is no base of a spectral one."""
    (at / "other").mkdir()
    if kind == "shards":
        zoo.hf_model("llama", seed=1).save_pretrained(at / "other", max_shard_size="20KB")
        return
    file = {"pickle": "pytorch_model.bin", "gguf": "some.gguf", "adapter": "adapter_model.bin", "config": "config.json"}
    (at / "other" / file[kind]).write_bytes(b"not looked into")


WHERE = {  # a name of the folder that is saved to, and what is said of it
    "base": ("model", "model is the folder of the base"),
    "relative": ("../{work}/model/.", "is the folder of the base"),
    "link": ("link", "link is the folder of the base"),
    "link-to-another": ("linked", r"linked holds another model \(config.json\)"),
    **{
        kind: ("other", rf"other holds another model \({file}\)")
        for kind, file in (
            ("shards", "config.json"), ("pickle", "pytorch_model.bin"), ("gguf", "some.gguf"),
            ("adapter", "adapter_model.bin"), ("config", "config.json"),
        )
    },
}  # fmt: skip


@pytest.mark.fast(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("share", [True, False])
def test_a_save_refuses_the_folder_of_a_model(model, tmp_path, monkeypatch, where, share):
    monkeypatch.chdir(tmp_path)
    folder, said = WHERE[where]
    if folder == "other":
        plain(tmp_path, where)
    if where == "link":
        Path("link").symlink_to("model")
    if where == "link-to-another":
        zoo.save_folder("llama", "another", seed=1)
        Path("linked").symlink_to("another")
    before, spectral = held(tmp_path), to_spectral(model, share_weights=share)
    with pytest.raises(FileExistsError, match=said):
        spectral.save_pretrained(folder.format(work=tmp_path.name))
    assert held(tmp_path) == before


@pytest.mark.slow
def test_a_model_that_was_saved_over_spectral_parameters_is_not_replaced(model, tmp_path):
    for share in (True, False):
        to_spectral(model, share_weights=share).save_pretrained(tmp_path / "run")
        to_spectral(model, share_weights=share).save_pretrained(tmp_path / "run")
    zoo.save_folder("llama", tmp_path / "run", seed=1)
    before = held(tmp_path)
    with pytest.raises(FileExistsError, match=r"run holds another model \(config.json\)"):
        to_spectral(model).save_pretrained(tmp_path / "run")
    assert held(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_weights_that_took_the_place_of_the_parameters_stay(model, tmp_path, share):
    to_spectral(model).save_pretrained(tmp_path / "run")
    save_file({"w": torch.ones(1)}, tmp_path / "run" / "model.safetensors")
    before = held(tmp_path)
    with pytest.raises(FileExistsError, match=r"run holds another model \(model.safetensors\)"):
        to_spectral(model, share_weights=share).save_pretrained(tmp_path / "run")
    assert held(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("named", [["..", "mine.txt/../mine.txt", 3, "\0"], "mine.txt", 5])
def test_a_config_that_was_edited_takes_away_no_other_file(model, tmp_path, named):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    to_spectral(model).save_pretrained(tmp_path / "run")
    path = tmp_path / "run" / "spectral_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": named}))
    before = held(tmp_path / "model")
    to_spectral(model).save_pretrained(tmp_path / "run")
    assert held(tmp_path / "model") == before
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


def test_a_second_stage_in_the_folder_of_the_first_is_refused(tmp_path):
    plain_trainer = trainer_of(zoo.hf_model("llama"), tmp_path / "run", max_steps=1, save_strategy="no")
    plain_trainer.train()
    plain_trainer.save_model()
    before = held(tmp_path)
    spectral = to_spectral(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run"))
    trainer = trainer_of(spectral, tmp_path / "run", max_steps=1, save_strategy="no")
    trainer.train()
    with pytest.raises(FileExistsError, match="is the folder of the base"):
        trainer.save_model()
    assert held(tmp_path) == before
    trainer.save_model(str(tmp_path / "second"))
    trainer.save_model(str(tmp_path / "second"))  # again, over what the Trainer has put beside
    assert_bridge_of(tls.load_model(tmp_path / "second"), spectral.eval())


@pytest.mark.slow
def test_a_base_inside_of_the_folder_stays(tmp_path):
    """The weights of a first stage are the base of a second one that is saved to the same folder."""
    first = move(to_spectral(zoo.hf_model("llama"), share_weights=False))
    first.save_pretrained(tmp_path / "run")
    base = held(tmp_path / "run" / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    second = move(to_spectral(model), seed=1)
    second.save_pretrained(tmp_path / "run")
    assert held(tmp_path / "run" / "base") == base
    assert_bridge_of(tls.load_model(tmp_path / "run"), second)
    with torch.no_grad():
        second.model.embed_tokens.weight.mul_(2.0)
    with pytest.raises(FileExistsError, match="base is the folder of the base"):
        second.save_pretrained(tmp_path / "run")
    assert held(tmp_path / "run" / "base") == base


@pytest.mark.slow
def test_a_folder_base_of_the_users_own_stays(model, tmp_path):
    zoo.save_folder("llama", tmp_path / "run" / "base", seed=1)
    before = held(tmp_path / "run" / "base")
    with pytest.raises(FileExistsError, match="base would be replaced by this save, and no earlier save"):
        to_spectral(model, share_weights=False).save_pretrained(tmp_path / "run")
    to_spectral(model).save_pretrained(tmp_path / "run")
    to_spectral(model).save_pretrained(tmp_path / "run")
    assert held(tmp_path / "run" / "base") == before


@pytest.mark.slow
@pytest.mark.parametrize("named", [".", "../run", "../other"])
def test_a_base_that_is_spectral_itself_is_refused(model, tmp_path, named):
    for folder in ("run", "other"):
        to_spectral(model).save_pretrained(tmp_path / folder)
    path = tmp_path / "run" / "spectral_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": named}))
    with pytest.raises(IncompatibleCheckpoint, match="as the base, which holds spectral parameters and no base"):
        tls.load_model(tmp_path / "run")


@pytest.mark.slow
def test_a_base_that_is_a_folder_is_found_from_anywhere(tmp_path, monkeypatch):
    """Saved under relative names from one working directory, loaded from another, and after both were moved."""
    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    zoo.hf_model("llama").save_pretrained("model")
    spectral = move(to_spectral(transformers.AutoModelForCausalLM.from_pretrained("model")))
    spectral.save_pretrained("runs/learned")
    config = json.loads(Path("runs/learned/spectral_config.json").read_text())
    assert config["base_model_name_or_path"] == "../../model"
    monkeypatch.chdir(tmp_path / "elsewhere")
    for place in ("work", "moved"):
        loaded = tls.load_model(tmp_path / place / "runs" / "learned")
        assert loaded.tlspectral_source["base"]["model"] == str(tmp_path / place / "model")
        assert_bridge_of(loaded, spectral)
        if place == "work":
            (tmp_path / "work").rename(tmp_path / "moved")
    (tmp_path / "moved" / "model").rename(tmp_path / "moved" / "renamed")
    with pytest.raises(FileNotFoundError) as error:
        tls.load_model(tmp_path / "moved" / "runs" / "learned")
    assert str(tmp_path / "moved" / "runs" / "learned") in str(error.value)
    assert str(tmp_path / "moved" / "model") in str(error.value)


@pytest.mark.slow
def test_a_folder_loads_where_only_load_model_was_imported(model, tmp_path):
    to_spectral(model).save_pretrained(tmp_path / "s")
    code = f"from tlspectral import load_model; print(type(load_model({str(tmp_path / 's')!r})).__name__)"
    environment = {**os.environ, "PYTHONPATH": str(Path(tls.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "SpectralModel"


def test_parameters_and_config_of_two_saves_are_refused(model, tmp_path):
    for seed in (0, 1):
        move(to_spectral(zoo.hf_model("llama", seed)), seed=seed).save_pretrained(tmp_path / str(seed))
    (tmp_path / "0" / "spectral_config.json").write_bytes((tmp_path / "1" / "spectral_config.json").read_bytes())
    with pytest.raises(IncompatibleCheckpoint, match="come from two different saves"):
        tls.load_model(tmp_path / "0")


@pytest.mark.slow
def test_the_tokenizer_of_the_base_is_kept_with_its_weights(tmp_path):
    zoo.save_folder("llama", tmp_path / "model", tokenizer=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    to_spectral(model, share_weights=False).save_pretrained(tmp_path / "run")
    shutil.rmtree(tmp_path / "model")
    assert tls.load_model(tmp_path / "run").tokenizer.encode("w3 w4")[-2:] == [3, 4]


@pytest.mark.slow
def test_the_base_of_an_earlier_save_is_not_used(model, tmp_path):
    """Weights that were trained are saved beside; a later save to the folder names another base."""
    trained_too = move(to_spectral(model, share_weights=False))
    with torch.no_grad():
        trained_too.model.embed_tokens.weight.mul_(2.0)
    trained_too.save_pretrained(tmp_path / "learned")
    spectral = move(to_spectral(model))
    spectral.save_pretrained(tmp_path / "learned")
    assert_bridge_of(tls.load_model(tmp_path / "learned"), spectral)
    assert float((logits(trained_too) - logits(spectral)).abs().max()) > 0.05


@pytest.mark.parametrize("share", [True, False])
def test_a_full_disk_names_the_file_and_leaves_the_folder_as_it_was(model, tmp_path, file_size_limit, share):
    spectral = move(to_spectral(model, share_weights=share))
    spectral.save_pretrained(tmp_path / "learned")
    before = held(tmp_path / "learned")
    move(spectral, seed=1)
    # The spectral parameters fit into 10,000 bytes, the weights do not.
    file = "learned/model.safetensors" if share else "learned/base"
    with file_size_limit(1000 if share else 10_000), pytest.raises(OSError, match=str(tmp_path / file)):
        spectral.save_pretrained(tmp_path / "learned")
    assert held(tmp_path / "learned") == before


@pytest.mark.fast(1)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.run.__name__ if way.run.__name__ != "<lambda>" else None)
def test_a_save_and_a_load_change_nothing_or_are_refused(way, tmp_path):
    if way.refused is None:
        # Rounding between a bridge and a HookedTransformer is 2e-6, and 0 elsewhere; other weights give 0.1 and more.
        assert largest_change(way, tmp_path) < 3e-5
        return
    with pytest.raises((IncompatibleCheckpoint, OSError), match=way.refused):
        way.run(tmp_path)


# --- merging: a config holds frequencies that all layers share ---


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize("name", ["yarn", "neox", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_shared_frequencies_go_into_the_config(name, tmp_path):
    model = zoo.hf_model(name)
    only = ("log_omega_shift",) if name == "neox" else ("log_omega_shift", "gain", "phase")
    spectral = move(to_spectral(model, scope="model"), only=only)
    tokens = zoo.prompt(length=40)  # beyond lengths at which some rotary modules switch
    merged = merge(spectral)
    assert type(merged) is type(model)
    merged.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert plain.state_dict().keys() == model.state_dict().keys()
    # Rounding of frequencies and weights, 5e-6; the effect of the frequencies is tenths.
    torch.testing.assert_close(logits(plain, tokens), logits(spectral, tokens), rtol=0, atol=5e-5)
    assert float((logits(plain, tokens) - logits(model, tokens)).abs().max()) > 0.05


@pytest.mark.slow
@torch.no_grad()
def test_gain_and_phase_alone_leave_the_config():
    model = zoo.hf_model("llama")
    spectral = move(to_spectral(model), only=("gain", "phase"))
    merged = merge(spectral)
    assert merged.config.rope_parameters == model.config.rope_parameters
    # Rounding of W_Q, 2e-6.
    torch.testing.assert_close(logits(merged, zoo.prompt()), logits(spectral, zoo.prompt()), rtol=0, atol=2e-5)
