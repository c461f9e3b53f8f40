"""Files that load_model must not open, and weights that are no numbers: what is wrong is named."""

import json

import pytest
import torch
import zoo
from safetensors.torch import load, save_file

import tlspectral as tls
from tlspectral.errors import BadWeights
from tlspectral.models.loading import agreement

BACKENDS = ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)]


def sharded(path, kind):
    """A checkpoint in many files, with its index."""
    zoo.hf_model("llama").save_pretrained(path, max_shard_size="16KB")
    index = path / "model.safetensors.index.json"
    if kind == "pickles":
        for file in path.glob("*.safetensors"):
            torch.save(load(file.read_bytes()), file.with_suffix(".bin"))
            file.unlink()
        text = index.read_text().replace(".safetensors", ".bin")
        index.unlink()
        index = path / "pytorch_model.bin.index.json"
        index.write_text(text)
    return index


@pytest.mark.parametrize("kind", ["safetensors", "pickles"])
def test_a_sharded_checkpoint_is_loaded(tmp_path, kind):
    sharded(tmp_path, kind)
    # The same weights and the same arithmetic: the difference was 0.
    torch.testing.assert_close(
        tls.load_model(tmp_path)(zoo.prompt()), zoo.hf_model("llama")(zoo.prompt()).logits, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("kind", ["safetensors", "pickles"])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, kind):
    index = sharded(tmp_path / "model", kind)
    content = json.loads(index.read_text())
    file = content["weight_map"]["model.norm.weight"]
    (tmp_path / "model" / file).rename(tmp_path / file)
    content["weight_map"] = {name: f"../{at}" if at == file else at for name, at in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(BadWeights, match=rf"names \.\./{file}, which is no .* file beside it; only these are opened"):
        tls.load_model(tmp_path / "model")


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_named(tmp_path, text):
    sharded(tmp_path, "safetensors").write_text(text)
    with pytest.raises(BadWeights, match=r"model\.safetensors\.index\.json is no index of safetensors files"):
        tls.load_model(tmp_path)


ROADS = {
    "loaded": tls.load_model,
    "streamed": lambda path: tls.analyze_heads(path, detectors=False, null_draws=2, show_progress=False),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"weights \(gptq\), .*; load the model that they were made from\.$"),
        ({"quant_method": "awq", "bits": 4}, r"weights \(awq\), .*; load the model that they were made from\.$"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"weights \(bitsandbytes\), .*without quantization_config; if .* model\.dequantize\(\)",
        ),
        ({"load_in_8bit": True}, r"weights \(bitsandbytes\), which cannot be folded"),
    ],
)
def test_quantised_weights_are_refused_with_what_to_do(copied, road, settings, text):
    path = copied("llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(BadWeights, match=text):
        ROADS[road](path)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", ["qweight", "SCB"])
def test_quantised_weights_that_the_config_does_not_tell_of_are_refused(copied, road, kind):
    """Packed ones in place of the weights, as GPTQ wrote them beside an own file of settings, or scales beside them."""
    path = copied("llama")
    tensors, name = load((path / "model.safetensors").read_bytes()), "model.layers.1.self_attn.q_proj"
    if kind == "qweight":
        del tensors[f"{name}.weight"]
    tensors[f"{name}.{kind}"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        BadWeights, match=rf"stores quantised weights \({name}\.{kind} .*config\.json does not say so; load"
    ):
        ROADS[road](path)


def poisoned(path, name, value):
    file = path / "model.safetensors"
    tensors = load(file.read_bytes())
    tensors[name].view(-1)[3] = value
    save_file(tensors, file, {"format": "pt"})
    return path


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(copied, backend, dtype, value):
    name = "model.layers.1.self_attn.k_proj.weight"
    path = poisoned(copied("llama"), name, value)
    with pytest.raises(BadWeights, match=rf"{name} of .*: 1 of \d+ values are NaN or infinite; load the checkpoint"):
        tls.load_model(path, backend=backend, dtype=dtype)


def test_sound_weights_are_not_searched(folder, monkeypatch):
    """A pass over the weights of a large model takes seconds."""
    searched = []
    monkeypatch.setattr(agreement.torch, "isfinite", lambda value: searched.append(value) or torch.ones(1).bool())
    tls.load_model(folder("llama"))
    assert not [value for value in searched if value.ndim == 2 and value.shape[0] == zoo.VOCABULARY]


def test_log_probabilities_that_are_no_numbers_are_not_blamed_on_the_bridge(copied, monkeypatch):
    import transformers

    path = copied("llama")
    broken = transformers.LlamaForCausalLM.forward

    def forward(self, *arguments, **options):
        output = broken(self, *arguments, **options)
        output.logits = output.logits * torch.nan
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(BadWeights, match="are NaN although all of its weights are numbers, in transformers' own model"):
        tls.load_model(path)
