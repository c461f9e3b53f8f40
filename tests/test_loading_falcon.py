"""Falcon in all its forms: read as Hugging Face computes it, or refused."""

import pytest
import torch
import zoo
from transformer_lens.model_bridge.sources import build_bridge_from_module
from zoo_shapes import FALCONS

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.attention import attention_view

READ = tuple(name for name in FALCONS if name != "falcon_alibi")
NEWER = tuple(name for name in READ if name != "falcon")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("falcons")
    return {name: tls.load_model(zoo.save_folder(name, folder / name)) for name in READ}


@pytest.mark.parametrize("name", READ)
def test_the_bridge_computes_what_the_checkpoint_does(loaded, name):
    tokens = zoo.prompt()
    with torch.no_grad():
        expected = zoo.hf_model(name)(tokens).logits
        found = loaded[name](tokens)
    # Measured: at most 5e-7. Queries and keys cut from the wrong rows move logits by tenths.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float(tls.verify_scores(loaded[name]).max()) < 1e-5  # measured 3.6e-6 at scores of 8


@pytest.mark.parametrize("name", NEWER)
def test_keys_are_grouped_as_the_config_says(loaded, name):
    layer = attention_view(loaded[name]).layer(0)
    assert layer.n_kv_heads == FALCONS[name][0]().num_kv_heads
    # The rows of the packed projection, one key/value head after the other: its queries, its key, its value.
    packed = zoo.hf_model(name).transformer.h[0].self_attention.query_key_value.weight.detach()
    groups = packed.unflatten(0, (layer.n_kv_heads, -1, layer.d_head))
    raw = attention_view(loaded[name]).raw(0)
    assert torch.equal(raw.w_q, groups[:, :-2].flatten(0, 1).mT)
    assert torch.equal(raw.w_k, groups[:, -2].mT)
    assert torch.equal(raw.w_v, groups[:, -1].mT)


@pytest.mark.parametrize("name", NEWER)
def test_processed_weights_pass_too(name, tmp_path):
    model = tls.load_model(zoo.save_folder(name, tmp_path))
    model.enable_compatibility_mode(disable_warnings=True)
    assert float(tls.verify_scores(model).max()) < 1e-5


@pytest.mark.parametrize("name", ["falcon_grouped", "falcon_one_norm"])
def test_transformer_lens_by_itself_does_not_hold_them(name):
    """When it does, the correction of `tlspectral.models.loading.building` can go."""
    model = zoo.hf_model(name)
    with pytest.raises((RuntimeError, AttributeError)):
        build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)


def test_alibi_is_refused(tmp_path):
    model = tls.load_model(zoo.save_folder("falcon_alibi", tmp_path))
    with pytest.raises(UnsupportedArchitecture, match=r"layer 0: Falcon with ALiBi; .* adds the bias twice"):
        tls.analyze_heads(model, show_progress=False)


def test_transformers_adds_falcons_alibi_twice_where_scores_are_seen():
    """Why ALiBi is refused: the same weights compute something else under eager attention."""

    def difference(name):
        eager = zoo.hf_model(name)
        config = FALCONS[name][0]()
        config._attn_implementation = "sdpa"
        fused = type(eager)(config).eval()
        fused.load_state_dict(eager.state_dict())
        with torch.no_grad():
            return float((eager(zoo.prompt()).logits - fused(zoo.prompt()).logits).abs().max())

    assert difference("falcon") < 1e-6  # measured 2e-7: the two ways agree where there is no ALiBi
    assert difference("falcon_alibi") > 1e-2
