"""Checkpoints that cannot be read layer by layer are refused, and the message says what was found."""

import json

import pytest
import zoo
from streamed_checkpoints import analyze

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_architectures_without_the_operator_are_refused(folder, name):
    with pytest.raises(UnsupportedArchitecture):
        analyze(folder(name))


def test_a_refusal_says_which_tensors_there_are(folder):
    with pytest.raises(UnsupportedArchitecture) as refused:
        analyze(folder("mamba"))
    assert "its model type is mamba" in str(refused.value)
    assert "backbone.layers.N.mixer.x_proj.weight" in str(refused.value)
    with pytest.raises(
        UnsupportedArchitecture, match=r"deepseek_v3.*model\.layers\.N\.self_attn\.q_a_proj\.weight.*pass a loaded"
    ):
        analyze(folder("deepseek_v3"))


def test_a_form_that_the_bridge_cannot_hold_is_refused(folder, monkeypatch):
    """TransformerLens by itself splits Falcon's grouped keys in the wrong places."""
    monkeypatch.setattr("tlspectral.models.loading.building.correct_packed", lambda adapter, config: None)
    with pytest.raises(UnsupportedArchitecture, match="layer 0: the bridge of TransformerLens cannot hold this falcon"):
        analyze(folder("falcon_grouped"))
    with pytest.raises(UnsupportedArchitecture, match=r"^the bridge of TransformerLens cannot hold this falcon"):
        tls.load_model(folder("falcon_grouped"))


def test_a_softcap_that_transformers_ignores_is_refused_loaded_and_streamed(folder):
    path = folder("gemma3_with_softcap")
    with pytest.raises(UnsupportedArchitecture, match="Gemma 3 with attn_logit_softcapping"):
        analyze(path)
    with pytest.raises(UnsupportedArchitecture, match="does not compute what the checkpoint does"):
        tls.load_model(path)


def test_code_from_a_checkpoint_is_never_run(copied):
    path = copied("llama")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(UnsupportedArchitecture, match=r"config\.json is not understood.*model\.layers\.N\.self_attn"):
        analyze(path)
