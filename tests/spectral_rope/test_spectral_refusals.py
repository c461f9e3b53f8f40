"""What spectral rotary positions refuse: choices, models and files that do not fit, each by name."""

import functools
import importlib
import inspect
import json

import pytest
import torch
import zoo
from ablation_runs import NO_ROPE
from safetensors import safe_open
from safetensors.torch import load, save_file
from spectral_modules import module
from spectral_zoo import base, move

from tlspectral import load_model
from tlspectral.errors import (
    BadHead,
    BadWeights,
    EditNotHonored,
    IncompatibleCheckpoint,
    ScoreMismatch,
    TlspectralError,
    UnsupportedArchitecture,
)
from tlspectral.heads.operators.verification import verify_scores
from tlspectral.models.reading import attention_view
from tlspectral.spectral_rope import (
    SpectralHookedTransformer,
    load_spectral,
    merge,
    omega_shift,
    parameter_groups,
    save_spectral,
    to_spectral,
)
from tlspectral.spectral_rope import model as spectral_model
from tlspectral.spectral_rope import module as spectral_module


def spectral(name="llama", **options):
    return to_spectral(base("bridge", name), **options)


def with_omega_moved(parameter):
    changed = spectral(log_omega=parameter != "omega")
    with torch.no_grad():
        getattr(changed.spectral["1"], parameter)[1, 2] += 1e-3
    return changed


def verified_with_nan():
    changed = spectral()
    with torch.no_grad():
        changed.spectral["1"].gain[2, 1] = float("nan")
    verify_scores(changed)


def merged_object(name, scope, only):
    return merge(move(to_spectral(zoo.hf_model(name), scope=scope), only=only))


def groups_of_a_frozen_model():
    frozen = spectral()
    frozen.spectral.requires_grad_(False)
    return parameter_groups(frozen, 1e-3)


def unchecked(call):
    """A function without the type checks of tests, which come first."""
    return inspect.unwrap(call)


def unknown_scope():
    unchecked(spectral_module._check_shape)(4, 4, 2, "heads", 0.0)


def text_as_seed():
    layers = unchecked(spectral_model.spectral_layers)
    view = attention_view(base("bridge", "llama"))
    return layers(view, scope="head", heads=None, frequencies=None, seed="1")


def turned(heads, side):
    return module()(torch.zeros(1, 2, heads, 8), torch.arange(2), side)


NOISE = "standard deviation"
SHIFT = ("log_omega_shift",)
REFUSED = {
    # heads, pairs and scopes of a module
    "noise": (lambda: module(phase_noise=-1.0), ValueError, NOISE),
    "noise that is no number": (lambda: module(phase_noise=float("nan")), ValueError, NOISE),
    "noise without end": (lambda: module(phase_noise=float("inf")), ValueError, NOISE),
    "noise of a model": (lambda: spectral(phase_noise=float("inf")), ValueError, f"layer 0: .*{NOISE}"),
    "noise that is text": (lambda: unchecked(spectral_module._check_shape)(4, 4, 2, "head", "1"), ValueError, NOISE),
    "seed that is text": (text_as_seed, ValueError, "seed= must be a whole number, found '1'"),
    "seed of a module": (lambda: unchecked(spectral_module.checked_seed)(0.5), ValueError, "whole number, found 0.5"),
    "head": (lambda: module(heads=[4]), ValueError, "head 4 does not exist: heads are 0 to 3"),
    "negative head": (lambda: module(heads=[-5]), ValueError, "head -5 does not exist: heads are 0 to 3, or -4 to"),
    "no head": (lambda: module(heads=[]), ValueError, "no head is chosen"),
    "torn group": (lambda: module(heads=[0, 1, 3]), ValueError, r"\[2, 3\] share key/value head 1, .* only \[3\]"),
    "no pair": (lambda: module(frequencies=[]), ValueError, "no frequency is chosen"),
    "pair": (lambda: module(frequencies=[4]), ValueError, r"frequencies are 0 to 3, found \[4\]"),
    "negative pair": (lambda: module(frequencies=[-1]), ValueError, "frequencies are 0 to 3"),
    "half a pair": (lambda: module(frequencies=[0.5]), ValueError, "indices of pairs or a boolean mask"),
    "short mask": (lambda: module(frequencies=[True, False]), ValueError, "2 entries for 4 rotary pairs"),
    "empty mask": (lambda: module(frequencies=[False] * 4), ValueError, "no frequency is chosen"),
    "scope": (unknown_scope, ValueError, "scope must be one of .*; not 'heads'"),
    "keys that do not divide": (lambda: module((8, 8, 4, 3)), ValueError, "4 query heads cannot share 3"),
    "no pairs at all": (lambda: module((8, 0, 4, 2)), ValueError, "no rotary pairs"),
    "queries of keys": (lambda: turned(2, "query"), ValueError, "query tensor of 2 heads"),
    "queries of another model": (lambda: turned(3, "query"), ValueError, "query tensor of 3 heads"),
    "keys of another model": (lambda: turned(3, "key"), ValueError, "key tensor of 3 heads; .* rotates 2 or 4"),
    # of a model
    "layer": (lambda: spectral(heads=[(2, 0)]), BadHead, "L2H0 does not exist"),
    "head of a layer": (lambda: spectral(heads=[(0, 4)]), BadHead, "L0H4 does not exist"),
    "no head of any layer": (lambda: spectral(heads=[]), ValueError, "no head is chosen"),
    "group of a layer": (lambda: spectral(heads=[(0, 0), (0, 1), (1, 2)]), ValueError, "layer 1: .* share key/value"),
    "pair of a layer": (lambda: spectral(frequencies=[6]), ValueError, "layer 0: frequencies are 0 to 5"),
    "turned back": (lambda: spectral("nanochat"), UnsupportedArchitecture, "layer 0: .* the negative angle.*another"),
    "still pairs": (lambda: spectral("gemma4"), UnsupportedArchitecture, "layer 1: it rotates 8 of 12 pairs"),
    "one omega for two bases": (lambda: spectral("gemma3", scope="model"), ValueError, "layers 0 and 1 have different"),
    "layer that does not turn": (
        lambda: spectral("smollm3", heads=[(0, 0), (0, 1), (1, 0), (1, 1)]),
        UnsupportedArchitecture,
        "layer 1 has no rotary positions",
    ),
    **{
        f"no rotary positions, {name}": (
            functools.partial(spectral, name), UnsupportedArchitecture, "none of the 2 layers has rotary",
        )
        for name in NO_ROPE
    },
    "not finite": (verified_with_nan, BadWeights, "layer 1, spectral gain"),
    "spectral again": (lambda: to_spectral(spectral()), ValueError, "spectral already"),
    "positions not given": (
        lambda: to_spectral(zoo.hf_model("gptj")), UnsupportedArchitecture,
        "not given position_ids and position_emb|in two calls",  # from transformers 5.24 on the latter
    ),
    **{
        f"{name}, another function": (
            lambda name=name: to_spectral(zoo.hf_model(name)), UnsupportedArchitecture, "does not compute",
        )
        for name in zoo.READ_WRONG
    },
    # merging
    "omega moved": (lambda: merge(with_omega_moved("omega")), ValueError, r"layer 1: .*most in head 2, pair 2"),
    "log omega moved": (lambda: merge(with_omega_moved(*SHIFT)), ValueError, r"layer 1: .*most in head 2, pair 2"),
    "gain behind a norm": (lambda: merge(move(spectral("qwen3"), only=("gain",))), TlspectralError, "a query norm"),
    "phase behind a norm": (lambda: merge(move(spectral("qwen3"), only=("phase",))), TlspectralError, "a query norm"),
    "merge of a plain model": (lambda: merge(base("bridge", "llama")), TypeError, "not a spectral model"),
    "config, by layer": (lambda: merged_object("llama", "layer", SHIFT), ValueError, "layer 1 has frequencies of its"),
    "config, by head": (lambda: merged_object("llama", "head", SHIFT), ValueError, "layer 0 .* or its heads have"),
    "config of two bases": (lambda: merged_object("gemma3", "layer", SHIFT), ValueError, "frequencies of its own"),
    "config, norm": (lambda: merged_object("qwen3", "model", ("phase",)), UnsupportedArchitecture, "a query norm"),
    # rates, the meter
    "rates of a plain model": (lambda: parameter_groups(base("bridge", "llama"), 1e-3), ValueError, "to_spectral"),
    "rates of a frozen one": (groups_of_a_frozen_model, ValueError, "no spectral parameter .* asks for a gradient"),
    "negative rate": (lambda: parameter_groups(spectral(), -1e-3), ValueError, "lr= must be .*found -0.001"),
    "no rate": (lambda: parameter_groups(spectral(), float("nan")), ValueError, "a finite number from 0 up; found nan"),
    "rate of weights": (
        lambda: parameter_groups(spectral(), 1e-3, weights_lr=float("inf")), ValueError, "weights_lr= .*found inf",
    ),
    "rate that is text": (
        lambda: unchecked(parameter_groups)(spectral(), "1e-3"), ValueError, "learning rate.*found '1e-3'",
    ),
    "meter of a plain model": (lambda: omega_shift(zoo.hf_model("llama"), 10), TypeError, "not a spectral model"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what):
    call, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        call()


@zoo.needs_hooked
def test_a_hooked_transformer_has_to_turn_and_is_spectral_already():
    from spectral_zoo import config

    with pytest.raises(UnsupportedArchitecture, match="none of the 2 layers"):
        SpectralHookedTransformer(config(positional_embedding_type="standard", rotary_dim=None))
    with pytest.raises(ValueError, match="spectral already"):
        to_spectral(SpectralHookedTransformer(config()))


# --- what the library itself would have done wrong ---


def test_a_hook_point_that_never_fires_is_refused(monkeypatch):
    monkeypatch.setattr(spectral_model, "place", lambda view, layers: None)
    with pytest.raises(EditNotHonored, match="layer 0: the model does not use a query"):
        spectral("neox")


def test_a_start_that_is_not_the_model_is_refused(monkeypatch):
    def off(*given, **options):
        layers = build(*given, **options)
        with torch.no_grad():
            layers["1"].gain[0, 0] += 1e-3
        return layers

    build = spectral_model.spectral_layers
    monkeypatch.setattr(spectral_model, "spectral_layers", off)
    with pytest.raises(ScoreMismatch, match="at the start differ"):
        spectral()


def test_inference_mode_is_named_and_not_the_model():
    for model in (base("bridge", "llama"), zoo.hf_model("llama")):
        with torch.inference_mode(), pytest.raises(ValueError, match=r"^to_spectral needs gradients, .*inference_mode"):
            to_spectral(model)


def test_a_merge_that_does_not_reach_the_model_is_refused(monkeypatch):
    merging = importlib.import_module("tlspectral.spectral_rope.merge")  # as an attribute this is the function
    monkeypatch.setattr(merging, "with_gain_and_phase", lambda weight, geometry: weight)
    with pytest.raises(UnsupportedArchitecture, match="merged model's logits differ"):
        merge(move(spectral(), only=("phase",)))


# --- files ---


@pytest.fixture
def path(tmp_path):
    """A file of the spectral parameters of `llama`, as they start."""
    save_spectral(spectral(log_omega=False), tmp_path / "spectral.safetensors")
    return tmp_path / "spectral.safetensors"


def refused(path, said, model=None):
    with pytest.raises(IncompatibleCheckpoint, match=said):
        load_spectral(model or base("bridge", "llama"), path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "spectral.safetensors"
    with pytest.raises(FileNotFoundError):
        load_spectral(base("bridge", "llama"), path)
    path.write_bytes(b"not safetensors at all")
    refused(path, "not a safetensors file")
    save_file({"w": torch.zeros(1)}, path)
    refused(path, "format None")
    with pytest.raises(TypeError, match="not a spectral model"):
        save_spectral(base("bridge", "llama"), path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        save_spectral(spectral(), tmp_path / "none" / "spectral.safetensors")


CHANGED = {  # tensors and record of a file, and what is said of it
    "not finite": (lambda held, _: held["1.omega"].fill_(torch.inf), r"1\.omega has values that are not finite"),
    "another gain": (lambda held, _: held["1.gain"].mul_(1.0001), "does not hold what was saved"),
    "other base": (lambda held, _: held["1.theta"].pow_(1.01), "does not hold what was saved"),
    "missing": (lambda held, _: held.pop("1.phase"), "does not hold what was saved"),
    "unknown": (lambda held, _: held.update({"1.x": torch.zeros(1)}), "does not hold what was saved"),
    "no identity": (lambda held, _: held.pop("base"), "does not hold what was saved"),
    "other heads": (lambda _, record: record.update(heads=[[0, 0], [0, 1]]), "does not hold what was saved"),
}  # fmt: skip


@pytest.mark.fast(1)
@pytest.mark.parametrize("what", CHANGED)
def test_files_that_were_changed_are_refused(path, what):
    change, said = CHANGED[what]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors, record = load(path.read_bytes()), json.loads(metadata["spectral"])
    change(tensors, record)
    save_file(tensors, path, metadata={**metadata, "spectral": json.dumps(record)})
    refused(path, said)


def test_a_half_written_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, "is not a safetensors file")


@pytest.mark.parametrize(
    ("number", "said"), [("2", "an earlier version of tlspectral .*: load it with"), ("4", "a newer version .*: upgr")]
)
def test_a_file_of_another_version_is_refused(path, number, said):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load(path.read_bytes()), path, metadata={**metadata, "format": f"tlspectral.spectral_rope.{number}"})
    refused(path, said)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        load_model(path.parent)


@pytest.mark.parametrize("swap", [lambda model, path: (path, model), lambda model, path: (model, None)])
def test_what_is_no_path_is_refused_with_the_order(path, swap):
    model, given = swap(base("bridge", "llama"), path)
    with pytest.raises(TypeError, match=rf"takes the model first.*found {type(model).__name__}, then .*e"):
        inspect.unwrap(load_spectral)(model, given)


@pytest.mark.slow
def test_other_files_are_not_replaced(path):
    (path.parent / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a file of spectral parameters, so it is not replaced"):
        save_spectral(spectral(), path.parent / "notes.txt")
    zoo.save_folder("llama", path.parent / "model")
    held = (path.parent / "model" / "model.safetensors").read_bytes()
    for name, said in (("model.safetensors", "is not replaced"), ("pytorch_model.bin", "would be read as its weights")):
        with pytest.raises(FileExistsError, match=said):
            save_spectral(spectral(), path.parent / "model" / name)
    assert (path.parent / "model" / "model.safetensors").read_bytes() == held
    save_spectral(spectral(), path.parent / "model" / "spectral.safetensors")


def test_a_file_of_a_bridge_whose_parts_were_changed_is_refused(path):
    """A bridge runs parts of a packed projection in its place, which stays as it was, and is what the digest knows."""
    save_spectral(spectral("neox"), path)
    changed = zoo.bridge("neox")
    with torch.no_grad():
        changed.blocks[0].attn.q.weight.mul_(1.5)
    refused(path, "to another model: log-probabilities .* are off by", changed)


def test_a_file_of_a_model_whose_weights_changed_says_so(path):
    changed = to_spectral(zoo.bridge("llama"), share_weights=False)
    with torch.no_grad():
        changed.blocks[1].mlp.out.weight.mul_(1.3)
    with pytest.warns(UserWarning, match="have changed since it was made.* holds spectral parameters alone"):
        save_spectral(changed, path)


def with_config(**changes):
    """A Llama of another shape."""
    config = zoo.hf_model("llama").config
    for name, value in changes.items():
        setattr(config, name, value)
    return type(zoo.hf_model("llama"))(config).eval()


OTHER_MODELS = {
    "no rotation": (lambda: base("bridge", "gpt2"), "does not fit this model: none of the 2 layers"),
    "other inverse frequencies": (lambda: base("bridge", "llama3"), "other inverse frequencies"),
    "other weights": (lambda: zoo.bridge("llama", seed=1), "other weights"),
    "fewer layers": (lambda: with_config(num_hidden_layers=1), "does not fit this model: L1H0 does not exist"),
    "more layers": (lambda: with_config(num_hidden_layers=3), "other weights"),
    "more keys": (lambda: with_config(num_key_value_heads=4), r"omega"),
    "narrower heads": (lambda: with_config(head_dim=8), "other inverse frequencies"),
    "fewer tokens": (lambda: with_config(vocab_size=20), "other weights"),
    "fewer tokens, on another backend": (lambda: zoo_hooked(vocab_size=20), "to another model: .* off by inf"),
}  # fmt: skip


def zoo_hooked(**changes):
    return load_model(with_config(**changes), backend="hooked")


@pytest.mark.fast(2)
@pytest.mark.parametrize("what", [what for what in OTHER_MODELS if zoo.HAS_HOOKED or "backend" not in what])
def test_a_file_of_another_model_is_refused(path, what):
    make, said = OTHER_MODELS[what]
    refused(path, said, make())
