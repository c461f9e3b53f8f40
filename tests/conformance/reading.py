"""What is read of a model: scores, operators, rotary geometry, what heads read and write."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from attention_models import LAYER_NORM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tlspectral.algebra.rotary import in_float64
from tlspectral.heads.operators.factored import QKOperators
from tlspectral.heads.operators.verification import check_prompt, verify_scores
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until, run_until
from tlspectral.models.stream.writes import INPUT_POINTS, checked_writes, layer_reads, z_of

from .rows import Row, asked, of_heads_alone, right

NO_BIAS = ("llama", "llama3", "yarn", "mistral", "qwen3", "gemma2", "gemma3", "smollm3", "olmo2",
           "deepseek_v2", "deepseek_v2_lite", "gemma3n", "gemma4", "glm5", "llama4", "nanochat",
           *zoo.LENGTH_DEPENDENT)  # fmt: skip


# --- the self-check ---


@asked(right, forms=True, encoders=True)
def the_models_own_scores_are_reproduced(row):
    errors = verify_scores(row.model)
    assert isinstance(errors, pd.Series)
    assert errors.index.name == "layer"
    assert errors.index.tolist() == list(row.layers)
    # Measured over the zoo in float32: at most 3.9e-6. The rule allows 1e-5 + 1e-5 of scores of about 10.
    assert float(errors.max()) < 1e-5


@asked(right, every=3, encoders=True)
def what_was_compared_and_allowed_is_told(row):
    view, compared = row.view, "pattern" if row.delegated else "scores"
    assert list(row.check) == list(row.layers)
    assert all(row.check[index].record["layer"] == index for index in row.layers)
    assert all(row.check[index].record["compared"] == compared for index in row.layers)
    points = [view.hook_names(index)[point] for index in row.layers for point in (compared, "pattern")]
    seen = capture_until(view, check_prompt(view), list(dict.fromkeys(points)), last=points[-1])
    for index in row.layers:
        pattern = seen[view.hook_names(index)["pattern"]]
        if row.delegated:
            # A flat pattern would agree with any scores near 0: a row has 1/24 everywhere, or 1/8 within a window.
            assert float(pattern[..., 8:, :].amax(-1).median()) > 0.2
            continue
        largest = float(seen[view.hook_names(index)["scores"]][pattern > 0].abs().max())
        assert largest > 3  # scores near 0 would agree with anything
        assert row.check[index].record["tolerance"] == pytest.approx(1e-5 + 1e-5 * largest, rel=1e-9)


@asked(right, every=3, encoders=True)
def the_share_outside_m_is_that_of_biases(row):
    for share in (check.outside_m for check in row.check.values()):
        assert share.dtype == np.float64
        if row.name in NO_BIAS:
            assert (share == 0).all()
        elif row.name != "cohere":  # its LayerNorm has no bias
            assert ((share > 1e-4) & (share < 1)).all()
    if row.backend == "hooked":
        # Shares of about 0.1; float32 folding leaves 1e-7, and BLOOM's two forms of ALiBi differ by a row's shift.
        for layer, other in Row("bridge", row.name).check.items():
            np.testing.assert_allclose(row.check[layer].outside_m, other.outside_m, rtol=0, atol=1e-6)


# --- operators and layers ---


@asked(every=3, encoders=True)
def operators_have_their_shapes(row):
    # `qk_operators` without beartype's check of the result, which reads a random head.
    operator, layer = QKOperators(row.view)[1, 2], row.view.layer(1)
    assert (operator.layer, operator.head) == (1, 2)
    for factor in (operator.w_q, operator.w_k):
        assert factor.shape == (zoo.WIDTH, layer.d_head)
        assert factor.dtype == torch.float64
    assert operator.core().shape == (layer.d_head, layer.d_head)
    assert operator.dense().shape == (zoo.WIDTH, zoo.WIDTH)
    for part in (operator.symmetric(), operator.antisymmetric()):
        assert part.left.shape == part.right.shape == (zoo.WIDTH, 2 * layer.d_head)
    spectrum = operator.spectrum()
    assert spectrum.singular_values.shape == spectrum.eigenvalues.shape == (layer.d_head,)
    assert spectrum.symmetric_eigenvalues.shape == (min(2 * layer.d_head, zoo.WIDTH),)
    assert spectrum.eigenvalues.dtype == torch.complex128
    assert isinstance(spectrum.eigenvector_condition, float)


@asked(every=3, encoders=True)
def operators_run_over_all_heads_by_layer(row):
    found = QKOperators(row.view)
    expected = [(layer, head) for layer in row.layers for head in range(row.model.cfg.n_heads)]
    assert len(found) == len(expected)
    assert [(op.layer, op.head) for op in found] == expected
    assert [(op.layer, op.head) for op in (found[i] for i in range(len(found)))] == expected


@asked(encoders=True)
def layers_have_their_shapes_dtypes_and_kv_heads(row):
    for index in row.layers:
        layer, output = row.view.layer(index), row.view.output(index)
        heads, kv_heads, d_head = layer.n_heads, layer.n_kv_heads, layer.d_head
        assert row.view.n_heads(index) == heads
        assert layer.w_q.shape == (heads, zoo.WIDTH, d_head)
        d_value = 12 if row.latent else d_head
        assert layer.w_k.shape == (kv_heads, zoo.WIDTH, d_head)
        assert output.w_v.shape == (kv_heads, zoo.WIDTH, d_value)
        assert output.w_o.shape == (heads, d_value, zoo.WIDTH)
        assert layer.b_q.shape == (heads, d_head)
        assert layer.b_k.shape == (kv_heads, d_head)
        tensors = (layer.w_q, layer.w_k, layer.b_q, layer.b_k, output.w_v, output.w_o)
        assert {tensor.dtype for tensor in tensors} == {torch.float64}
        assert not any(tensor.requires_grad for tensor in tensors)
        repeated = layer.operator_factors()[1]
        assert repeated.shape == (heads, zoo.WIDTH, d_head)
        if layer.k_norm is None:
            for head in range(heads):
                assert torch.equal(repeated[head], layer.w_k[layer.kv_head(head)])


@asked()
def layer_norm_is_centred_and_rms_is_not(row):
    layer = row.view.layer(0)
    means = [float(w.mean(1).abs().max() / w.abs().max()) for w in (layer.w_q, layer.w_k)]
    if row.name in (*LAYER_NORM, "codegen"):
        assert layer.norm.kind == "LN"
        assert layer.effective_dimension == zoo.WIDTH - 1
        assert max(means) < 1e-15  # rounding; uncentred columns have means of 1e-2
    else:
        assert layer.norm.kind == ("none" if row.name == "olmo2" else "RMS")
        assert layer.effective_dimension == zoo.WIDTH
        assert min(means) > 1e-3


@asked(lambda row: row.backend == "bridge", encoders=True)
def hook_names_exist_and_tell_delegated_attention(row):
    for index in row.layers:
        names = row.view.hook_names(index)
        assert set(names.values()) <= set(row.model.hook_dict)
        assert ("scores" in names) == (not row.delegated)


def operator(layer):
    w_q, w_k = layer.operator_factors()
    return w_q @ w_k.mT


@asked(lambda row: row.form or row.backend == "hooked", forms=True)
def the_operator_is_that_of_the_raw_bridge(row):
    view, reference = row.view, attention_view(zoo.shared("bridge", row.name))
    if row.backend == "hooked":
        assert (row.model.cfg.normalization_type in ("LNPre", "RMSPre")) == (row.form == "folded")
    assert view.n_layers == reference.n_layers
    for index in range(reference.n_layers):
        found, expected = view.layer(index), reference.layer(index)
        m = operator(expected)
        # Folding in float32 rounds a weight by 6e-8; measured up to 1.0e-7 of max |M|. A norm folded twice or not at
        # all is off by tenths, a missing centring by 1e-2.
        torch.testing.assert_close(operator(found), m, rtol=0, atol=3e-7 * float(m.abs().max()))
        for bias in ("b_q", "b_k"):
            value = getattr(expected, bias)
            scale = float(value.abs().max())  # measured up to 1.2e-7 of it; a missing folded norm bias is all of it
            torch.testing.assert_close(getattr(found, bias), value, rtol=0, atol=3e-7 * scale)
        ov, reference_ov = (v.output(index) for v in (view, reference))
        torch.testing.assert_close(ov.w_v, reference_ov.w_v, rtol=0, atol=3e-7 * float(reference_ov.w_v.abs().max()))
        for fact in ("n_heads", "n_kv_heads", "effective_dimension", "bilinear", "alibi", "softcap", "storage_dtype"):
            assert getattr(found, fact) == getattr(expected, fact), fact
        assert found.norm.kind == expected.norm.kind
        assert found.score_scale == pytest.approx(expected.score_scale, rel=1e-6)  # float32 of a root
        assert (found.rotary is None) == (expected.rotary is None)
        if expected.rotary is not None:
            # float32 tables of cos and sin; a wrong base or a missing scaling is off by percents.
            torch.testing.assert_close(found.rotary.theta, expected.rotary.theta, rtol=1e-6, atol=1e-9)
            assert torch.equal(found.rotary.real_index, expected.rotary.real_index)
            assert torch.equal(found.rotary.imag_index, expected.rotary.imag_index)
            assert found.rotary.attention_scaling == pytest.approx(expected.rotary.attention_scaling, rel=1e-6)


@asked(lambda row: row.backend == "hooked" and not row.form)
def norms_have_weights_and_biases_drawn_at_random(row):
    """As training leaves them: a hook point in front of a gain and one behind it differ only if it is not 1."""
    norms = [module for module in row.model.modules() if type(module).__name__ in ("LayerNorm", "RMSNorm")]
    assert len(norms) >= 2 * row.view.n_layers + 1
    for norm in norms:
        # Drawn with a standard deviation of .3 (weights) and .4 (biases); the smallest over the zoo is .2.
        assert all(float(one.detach().std()) > 0.1 for one in norm.parameters())


# --- rotary geometry ---


def standard_frequencies(base, rotary_dim):
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def expected_frequencies(name, index):
    """theta of a layer from the Hugging Face config alone, and the factor on cos and sin."""
    d_head = zoo.WIDTH // zoo.HEADS
    config = zoo.hf_model(name).config
    if name in ("llama3", "yarn", "deepseek_v3"):
        inv_freq, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
        return inv_freq.double(), factor
    if name == "gemma3":
        slow = index % 2
        return standard_frequencies(10000.0 if slow else 100.0, 16) / (2.0 if slow else 1.0), 1.0
    if name == "gemma3n":
        return standard_frequencies(config.rope_parameters[config.layer_types[index]]["rope_theta"], 16), 1.0
    if name == "gemma4":  # of twelve pairs of a full layer eight rotate
        return standard_frequencies(10000.0, 24 if index else 16)[:8], 1.0
    if name == "phi3_longrope":
        parameters = config.rope_parameters
        factors = torch.tensor(parameters["short_factor"], dtype=torch.float64)
        stretch = config.max_position_embeddings / parameters["original_max_position_embeddings"]
        scaling = (1 + torch.log(torch.tensor(stretch)) / torch.log(torch.tensor(32.0))).sqrt()
        return standard_frequencies(10000.0, d_head) / factors, float(scaling)
    rotary_dim = {"neox": 4, "phi": d_head // 2, "gptj": 8, "codegen": 8, "qwen3": 16, "gemma2": 16,
                  "llama4": 16}.get(name, d_head)  # fmt: skip
    rotary_dim = 8 if name in zoo.LATENTS else rotary_dim
    base = 10000.0 if name in ("gptj", "codegen") else config.rope_parameters["rope_theta"]
    return standard_frequencies(base, rotary_dim), 1.0


@asked()
def frequencies_are_those_of_the_config(row):
    still = {"smollm3": 1, "llama4": 0}.get(row.name)
    turning = [row.rotary and index % 2 != still for index in row.layers]
    assert [row.view.layer(index).rotary is not None for index in row.layers] == turning
    if not row.read_right:
        return
    for index in (index for index in row.layers if turning[index]):
        rotary, (theta, scaling) = row.view.layer(index).rotary, expected_frequencies(row.name, index)
        # The model keeps inv_freq, or a cos and sin of it, in float32: 1e-7. Scaled RoPE differs by percents.
        torch.testing.assert_close(rotary.theta, theta, rtol=1e-6, atol=1e-9)
        assert rotary.attention_scaling == pytest.approx(scaling, rel=1e-6)
        pairs = torch.stack([rotary.real_index, rotary.imag_index])
        adjacent = row.latent or row.name in ("gptj", "codegen", "cohere", "llama4")
        apart = {"nanochat": -len(theta), "gemma4": rotary.d_head // 2}.get(row.name, 1 if adjacent else len(theta))
        assert (pairs[1] - pairs[0]).tolist() == [apart] * len(theta)
        assert rotary.d_head == row.view.layer(index).d_head


# --- what heads write, and what a layer reads ---


@asked(lambda row: row.name != "gemma3n", forms=True)  # a layer of which reads one of four streams
def heads_biases_and_mlp_sum_to_what_a_layer_adds(row):
    view, captured = row.view, row.captured
    for layer in row.layers:
        writes = checked_writes(view, layer, captured, in_float64)
        z = z_of(in_float64(row.run[layer, "z"]), writes.w_o)
        scale = writes.token_scale(z)
        with torch.no_grad():
            added = writes.written(z, scale).sum(0) + writes.of_biases(scale) + in_float64(row.run[layer, "mlp_out"])
        expected = in_float64(row.run[layer, "residual_after"] - row.run[layer, "residual"])
        # Measured: 4e-7 of the largest value. A norm behind, a bias or a multiplier that is left out moves it by 1e-2.
        torch.testing.assert_close(added, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
        some = writes.written(z[:, :, [1, 0]], scale, [1, 0])
        torch.testing.assert_close(some, writes.written(z, scale)[[1, 0]], rtol=0, atol=1e-12)  # the same products


@asked(of_heads_alone, every=3, forms=True, encoders=True)
@torch.no_grad()
def a_changed_stream_changes_queries_keys_and_values_as_the_model_has_it(row):
    layer, view = 1, row.view
    names, raw = view.hook_names(layer), view.raw(layer)
    x = in_float64(row.run[layer, "residual"])
    removed = 0.7 * x.norm(dim=-1, keepdim=True) * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    removed = removed / x.shape[-1] ** 0.5
    removed[:, 3] = 0.0

    def edit(residual, hook):
        return (in_float64(residual) - removed).to(residual)

    points = [names[point] for point in INPUT_POINTS.values()]
    found = {}
    hooks = [(names["residual"], edit)]
    hooks += [(point, lambda value, hook, point=point: found.update({point: value})) for point in points]
    run_until(view, zoo.prompt(), hooks, last=names["z"])
    for what, point in INPUT_POINTS.items():
        (reads,) = layer_reads(raw, what, in_float64)
        change = reads.change(x, removed)
        expected = in_float64(found[names[point]] - row.run[layer, point])
        expected = expected.reshape(*expected.shape[:2], -1, raw.w_q.shape[-1])
        change = change.repeat_interleave(expected.shape[2] // change.shape[2], dim=2)
        # Measured: 4e-7 of the largest change, by the model's own rounding. A frozen norm is off by a tenth.
        torch.testing.assert_close(change, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
        assert bool((change[:, 3] == 0).all()), "nothing removed is no change, to the bit"
        torch.testing.assert_close(
            reads.from_stream(x - removed) - reads.from_stream(x), change, rtol=0, atol=1e-10
        )  # float64 rounding
