"""Latent attention: M and its blocks, factors of norms, heads that are known beforehand, and what is refused."""

import functools

import numpy as np
import pytest
import torch
import transformers
import zoo
from ablation_runs import recorded
from latent_reference import queries_and_keys
from positional_measurements import cut_prompt
from streamed_checkpoints import analyze, assert_streamed_equals_loaded

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.heads.detectors.rotated_keys import _fixed_queries
from tlspectral.heads.operators.verification import check_prompt, verify_scores
from tlspectral.models.attention.head_scores import rebuilt_scores
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until
from tlspectral.positional.shares import logit_shares
from tlspectral.tables.head_columns import LATENT_COLUMNS

CONTENT, ROTARY, RANK = 10, 8, 16
BLOCKS = cut_prompt(torch.tensor([1, 5, 7, 8, 9, 10, 11, 12, 20, 30, 4, 6]), 6 * [2])


def captured(view, tokens, layer=1):
    names = view.hook_names(layer)
    return capture_until(view, tokens, list(names.values()), last=names["pattern"])


@functools.cache
def table(name):
    return tls.analyze_heads(zoo.shared("bridge", name), null_draws=4, detectors=False)


# --- the score, and M ---


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.LATENTS)
def test_scores_are_those_of_the_module_written_out_in_float64(name):
    view = attention_view(zoo.shared("bridge", name))
    seen = captured(view, zoo.prompt())
    q, k, _, _ = queries_and_keys(view.model, 1, seen[view.hook_names(1)["residual"]])
    rotary = view.rotary(1)
    tables = view.rotary_tables(1, q.shape[1], seen)
    cos, sin = (table.reshape(-1, *table.shape[-2:])[0].double() for table in tables)
    if cos.shape[1] == ROTARY:  # two equal halves
        cos, sin = cos[:, : ROTARY // 2], sin[:, : ROTARY // 2]
    turn = torch.complex(cos, sin)[:, None]
    halves = name == "deepseek_v3_halves"

    def turned(x):
        x = x[..., CONTENT:]
        real, imag = x.chunk(2, -1) if halves else (x[..., 0::2], x[..., 1::2])
        return torch.complex(real, imag) * turn

    content = torch.einsum("bihd,bjhd->bhij", q[..., :CONTENT], k[..., :CONTENT])
    turning = torch.einsum("bihd,bjhd->bhij", turned(q), turned(k).conj()).real
    scale = zoo.hf_model(name).model.layers[1].self_attn.scaling
    rebuilt = rebuilt_scores(view, 1, seen).total
    # Measured: at most 4e-15 on scores of up to 20. A factor, bias or pair read wrongly moves them by tenths.
    assert rotary.n_pairs == ROTARY // 2
    torch.testing.assert_close(rebuilt, scale * (content + turning), rtol=0, atol=1e-13)
    # The bridge in float32: measured 2e-6.
    assert float(verify_scores(view.model).max()) < 1e-5


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_m_is_the_content_block_at_white_input_plus_the_rotary_block(name):
    view, model = attention_view(zoo.shared("bridge", name)), zoo.hf_model(name)
    block = model.model.layers[1]
    module, gain = block.self_attn, block.input_layernorm.weight.detach().double()
    down, up = (part.weight.detach().double() for part in (module.kv_a_proj_with_mqa, module.kv_b_proj))
    if module.q_lora_rank is None:
        w_q = module.q_proj.weight.detach().double()
    else:
        q_gain = module.q_a_layernorm.weight.detach().double()
        w_q = module.q_b_proj.weight.detach().double() @ (q_gain[:, None] * module.q_a_proj.weight.detach().double())
    w_q, down = (w_q * gain).unflatten(0, (zoo.HEADS, -1)), down * gain
    k_gain = module.kv_a_layernorm.weight.detach().double()
    up = up.unflatten(0, (zoo.HEADS, -1))
    b = RANK**0.5 / torch.linalg.matrix_norm(down[:RANK])
    for head, operator in enumerate(tls.qk_operators(view.model)[4:]):
        w_uk = up[head, :CONTENT] @ (k_gain[:, None] * down[:RANK])
        m_c, m_r = b * w_q[head, :CONTENT].T @ w_uk, w_q[head, CONTENT:].T @ down[RANK:]
        # float64 on both sides; a gain or b left out moves M by tenths of itself.
        torch.testing.assert_close(operator.dense(), m_c + m_r, rtol=0, atol=1e-12)
        row = table(name).set_index("name").loc[f"L1H{head}"]
        assert row["bilinear"] == "up_to_content_scale"
        for part, m in (("content", m_c), ("rotary", m_r)):
            eigenvalues = np.linalg.eigvals(m.numpy())
            size = np.abs(eigenvalues).sum()
            expected = [
                np.linalg.norm((m - m.T).numpy() / 2) / np.linalg.norm(m),
                np.abs(eigenvalues.imag).sum() / size,
            ]
            expected.append(np.linalg.norm(m) / np.linalg.norm(m_c + m_r))
            found = [row[f"{column}_{part}"] for column in ("dir_frac", "D_head", "norm_frac")]
            # Of a dense matrix with a null space: LAPACK leaves 1e-9 of eigenvalues that are 0.
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
    output = view.output(1)
    values = b * torch.einsum("hcr,rm->hmc", up[:, CONTENT:], k_gain[:, None] * down[:RANK])
    torch.testing.assert_close(output.w_v, values, rtol=0, atol=1e-12)
    assert torch.equal(output.w_o, module.o_proj.weight.detach().double().T.unflatten(0, (zoo.HEADS, -1)))


def test_columns_of_blocks_are_those_of_latent_attention_alone():
    names = [column.name for column in LATENT_COLUMNS]
    assert [name for name in table("deepseek_v3") if name in names] == names
    assert not {*names} & {*table("llama")}


def test_the_scale_of_the_latent_is_no_part_of_m():
    model, scaled = zoo.bridge("deepseek_v3"), zoo.bridge("deepseek_v3")
    with torch.no_grad():
        down = scaled.blocks[1].original_component.self_attn.kv_a_proj_with_mqa
        down.weight[:RANK] *= 4.0  # a power of two, so that nothing is rounded
        down.bias[:RANK] *= 4.0
    w_k, again = (attention_view(one).layer(1).operator_factors()[1] for one in (model, scaled))
    torch.testing.assert_close(w_k, again, rtol=1e-14, atol=0)
    tokens = zoo.prompt()
    with torch.no_grad():
        # The norm's eps alone tells them apart.
        torch.testing.assert_close(model(tokens), scaled(tokens), rtol=0, atol=1e-5)


def test_b_is_that_of_white_input():
    latent = attention_view(zoo.shared("bridge", "deepseek_v2")).layer(1).k_norm
    n = torch.randn(20_000, zoo.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean_square = (n @ latent.down[:, :RANK]).square().mean()
    # Sampling: 0.3 % at 20,000 tokens.
    assert float(mean_square.rsqrt()) == pytest.approx(float(latent.white_scale), rel=0.01)


# --- b of real tokens ---


def scales_in_transformers(name, tokens):
    """1/rms of the keys' latents of each layer in a run of transformers' own model."""
    model, seen = zoo.hf_model(name), []
    for block in model.model.layers:
        block.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda module, given, output: seen.append(output[..., :RANK].double().square().mean(-1))
        )
    with torch.no_grad():
        model(tokens)
    return [(mean + model.config.rms_norm_eps).rsqrt() for mean in seen]


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_measured_b_is_the_mean_over_all_tokens_but_the_first_and_weighs_the_content_block(name):
    tokens, model = zoo.prompt(), zoo.shared("bridge", name)
    found = tls.analyze_heads(
        model, null_draws=4, detectors=False, prompts=tokens, extras=["content_scale", "score_asym"]
    )
    white, view = table(name), attention_view(model)
    for layer, scale in enumerate(scales_in_transformers(name, tokens)):
        b = float(scale[:, 1:].mean())
        rows = found[found["layer"] == layer]
        # The model in float32: measured 2e-7. With the first token b differs by 2e-4 and more.
        np.testing.assert_allclose(rows["content_scale"], b, rtol=2e-6)
        assert abs(float(scale.mean()) / b - 1) > 1e-4
        w_q, w_k = view.layer(layer).operator_factors()
        w_k = torch.cat([w_k[..., :CONTENT] * (b / view.layer(layer).k_norm.white_scale), w_k[..., CONTENT:]], -1)
        residual = captured(view, tokens, layer)[view.hook_names(layer)["residual"]].double()
        n = residual * (residual.square().mean(-1, keepdim=True) + view.layer(layer).norm.eps).rsqrt()
        for head, row in enumerate(rows.itertuples()):
            m = (w_q[head] @ w_k[head].T).numpy()
            eigenvalues = np.linalg.eigvals(m)
            expected = np.abs(eigenvalues.imag).sum() / np.abs(eigenvalues).sum()
            assert row.D_head == pytest.approx(expected, rel=1e-5)
            assert row.norm_frac_rotary == pytest.approx(
                np.linalg.norm(w_q[head, :, CONTENT:] @ w_k[head, :, CONTENT:].T) / np.linalg.norm(m), rel=1e-5
            )
            scores = n @ torch.as_tensor(m) @ n.mT
            asymmetry = torch.linalg.matrix_norm(scores - scores.mT).mean() / torch.linalg.matrix_norm(scores).mean()
            assert row.score_asym == pytest.approx(float(asymmetry), rel=1e-5)
    alone = ["dir_frac_content", "D_head_content", "dir_frac_rotary", "D_head_rotary"]
    np.testing.assert_allclose(found[alone], white[alone], rtol=1e-10)
    assert (found["D_head"] - white["D_head"]).abs().min() > 1e-6


def test_the_first_token_of_a_padded_prompt_is_left_out_of_b():
    model, tokens = zoo.shared("bridge", "deepseek_v3"), zoo.prompt(1, 9)
    padded = {
        "input_ids": torch.nn.functional.pad(tokens, (3, 0)).expand(2, -1).clone(),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]),
    }
    padded["input_ids"][1, :3] = torch.tensor([11, 12, 13])
    kept = {"null_draws": 4, "detectors": False, "extras": ["content_scale"]}
    found = tls.analyze_heads(model, prompts=padded, **kept)["content_scale"].unique()
    alone = [
        tls.analyze_heads(model, prompts=ids, **kept)["content_scale"].unique()
        for ids in (tokens, padded["input_ids"][1:])
    ]
    np.testing.assert_allclose(found, (8 * alone[0] + 11 * alone[1]) / 19, rtol=1e-5)


def test_a_measured_b_is_refused_of_files_of_one_token_and_beside_another(tmp_path):
    path, model = zoo.save_folder("deepseek_v3", tmp_path), zoo.shared("bridge", "deepseek_v3")
    with pytest.raises(ValueError, match=r"content_scale needs the model's activations, .*give a loaded model"):
        tls.analyze_heads(path, detectors=False, extras=["content_scale"])
    with pytest.raises(ValueError, match="content_scale leaves out the first token of each prompt"):
        tls.analyze_heads(model, detectors=False, extras=["content_scale"], prompts=torch.tensor([[5]]))
    measured = tls.analyze_heads(model, null_draws=4, detectors=False, extras=["content_scale"])
    with pytest.raises(ValueError, match="different settings: extra content_scale, which changes M, is False in a"):
        tls.compare_heads(table("deepseek_v3"), measured)


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_layers_are_read_from_files_too(name, tmp_path):
    path = zoo.save_folder(name, tmp_path)
    assert_streamed_equals_loaded(analyze(path), analyze(tls.load_model(path)))


def test_of_files_a_layer_without_its_own_indexer_is_refused(tmp_path):
    path = zoo.save_folder("glm5_selecting", tmp_path)
    assert_streamed_equals_loaded(analyze(path, heads="L0"), analyze(tls.load_model(path), heads="L0"))
    with pytest.raises(UnsupportedArchitecture, match=r"layer 1: .* do not agree on self_attn.indexer"):
        analyze(path)


# --- heads that are known beforehand ---


def planted(change):
    """DeepSeek V3 of which one module of the first layer is changed."""
    model = zoo.bridge("deepseek_v3")
    with torch.no_grad():
        change(model.blocks[0].original_component.self_attn)
    verify_scores(model)
    return model


def first_layer(frame):
    return frame[frame["layer"] == 0]


def no_rotary_keys(module):
    module.kv_a_proj_with_mqa.weight[RANK:] = 0
    module.kv_a_proj_with_mqa.bias[RANK:] = 0


def constant_queries_and_rotary_keys(module):
    """Queries and the keys that rotate are those of the biases, and no key has content."""
    module.q_a_proj.weight[:] = 0
    module.kv_a_proj_with_mqa.weight[RANK:] = 0
    module.kv_b_proj.weight.unflatten(0, (zoo.HEADS, -1))[:, :CONTENT] = 0


@pytest.mark.tl4
@pytest.mark.slow
def test_a_head_without_rotary_block_is_purely_symbolic():
    model = planted(no_rotary_keys)
    shares = first_layer(logit_shares(model, BLOCKS))
    # Exactly: the logit does not know its position. Other heads have shares of tenths.
    assert (shares["content"] == 1).all()
    assert (shares[["position", "interaction"]] == 0).all(axis=None)
    found = first_layer(tls.positional_symbolic(model, BLOCKS, mode="key"))
    assert (found["exclusion_index"] == 0).all()
    assert (found["s_sym"] - 1).abs().max() < 1e-12
    row = first_layer(tls.analyze_heads(model, null_draws=4, detectors=False)).iloc[0]
    assert row["norm_frac_rotary"] == 0
    assert row["norm_frac_content"] == pytest.approx(1, abs=1e-14)
    assert np.isnan(row["dir_frac_rotary"])


@pytest.mark.tl4
@pytest.mark.slow
def test_a_head_of_constant_queries_and_rotary_keys_is_purely_positional():
    model = planted(constant_queries_and_rotary_keys)
    shares = first_layer(logit_shares(model, BLOCKS))
    # Rounding: keys are equal up to float32. Content shows as tenths.
    assert (shares["position"] > 1 - 1e-10).all()
    found = first_layer(tls.positional_symbolic(model, BLOCKS, mode="key"))
    assert (found["exclusion_index"] > 1 - 1e-10).all()
    assert (found["s_pos"] - 1).abs().max() < 1e-6


def test_a_rotary_block_carries_content_too():
    model = planted(lambda module: module.kv_b_proj.weight.unflatten(0, (zoo.HEADS, -1))[:, :CONTENT].zero_())
    shares = first_layer(logit_shares(model, BLOCKS))
    assert (shares["content"] > 0.05).all()  # measured .15 to .7: M_c = 0 alone makes no head positional


# --- the null of keys ---


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_the_null_with_the_frame_of_the_latent_itself_is_the_head(name):
    view = attention_view(zoo.shared("bridge", name))
    seen = captured(view, zoo.prompt())
    pattern = seen[view.hook_names(1)["pattern"]]
    fixed, observed = _fixed_queries(view, 1, seen, pattern)
    frame = torch.linalg.solve_triangular(fixed.core[0].double(), view.layer(1).k_norm.down, upper=True, left=False)
    # float32: measured 4e-7. Keys or the factor b of other directions move the pattern by tenths.
    torch.testing.assert_close(fixed.pattern(frame.float()).double(), observed, rtol=0, atol=5e-6)


# --- keys that an indexer picks ---


def test_scores_of_picked_keys_are_read_and_positions_are_not():
    model = zoo.shared("bridge", "glm5_selecting")
    view = attention_view(model)
    seen = captured(view, check_prompt(view))
    assert int((seen[view.hook_names(1)["pattern"]][..., -1, :] > 0).sum(-1).max()) == 8
    for layer, head in ((0, 1), (1, 2)):
        with tls.ablate(model, (layer, head), "symmetric"):
            pattern = recorded(model, ("pattern",), layers=[layer])[layer, "pattern"]
        assert int((pattern > 0).sum(-1).max()) == 8
    with pytest.raises(ValueError, match=r"12 tokens, but an indexer of this model lets a query see 8 keys"):
        tls.positional_symbolic(model, BLOCKS, mode="key")


# --- what is refused ---


@pytest.mark.parametrize(
    "measured",
    [
        lambda model: tls.qk_attribution(model, zoo.prompt(1), "L1H0", 10, 5),
        lambda model: tls.to_spectral(model),
    ],
)
def test_what_needs_queries_and_keys_of_their_own_is_refused_by_family_and_layer(measured):
    with pytest.raises(UnsupportedArchitecture, match=r"layer [01]: latent attention \(DeepseekV3Attention\); "):
        measured(zoo.shared("bridge", "deepseek_v3"))


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("rank", "whose"), [("kv_lora_rank", "the keys'"), ("q_lora_rank", "queries'")])
def test_a_latent_of_rank_0_is_refused(rank, whose, tmp_path):
    config = zoo.hf_model("deepseek_v3").config
    setattr(config, rank, 0)
    config.save_pretrained(tmp_path)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    words = f"layer 0: norm of {whose} latent: the latent has rank 0, so no head can be read from it"
    with pytest.raises(UnsupportedArchitecture, match=words):
        tls.analyze_heads(tls.load_model(tmp_path))
    with pytest.raises(UnsupportedArchitecture, match=words):
        tls.analyze_heads(tmp_path, detectors=False)


def test_a_norm_that_m_does_not_hold_is_refused():
    model = zoo.bridge("deepseek_v3")
    model.blocks[1].original_component.self_attn.kv_a_layernorm = torch.nn.LayerNorm(RANK)
    with pytest.raises(UnsupportedArchitecture, match="layer 1, norm of the keys' latent: found a LN norm with bias"):
        attention_view(model).layer(1)
