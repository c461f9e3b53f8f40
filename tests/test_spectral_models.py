"""Spectral models of every rotary architecture: the base to the bit at the start, eq. 2 later, the base untouched."""

import copy
import functools
import importlib

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from tlspectral.attention import attention_view
from tlspectral.errors import BadHead, EditNotHonored, ScoreMismatch, UnsupportedArchitecture
from tlspectral.spectral_rope import SpectralModel, merge, to_spectral
from tlspectral.spectral_rope import model as spectral_model

needs_hooked = pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
NO_ROPE = ("gpt2", "opt", "gptneo", "bloom")
NORMED = ("qwen3", "gemma3")
BRIDGES = tuple(name for name in zoo.ARCHITECTURES + zoo.LENGTH_DEPENDENT if name not in NO_ROPE)
HOOKED = tuple(name for name in zoo.HOOKED_ARCHITECTURES if name not in NO_ROPE)
MODELS = [("bridge", name) for name in BRIDGES]
MODELS += [pytest.param("hooked", name, marks=needs_hooked) for name in HOOKED]
every_model = pytest.mark.parametrize(("backend", "name"), MODELS)
# Grouped keys at hook_q; at hook_rot_q; delegated attention; a partial rotation with biases; the other backend.
SOME = [("bridge", "llama"), ("bridge", "qwen3"), ("bridge", "gptj"), ("bridge", "neox")]
SOME += [pytest.param("hooked", name, marks=needs_hooked) for name in ("qwen2", "qwen3")]
some_models = pytest.mark.parametrize(("backend", "name"), SOME)


@functools.cache
def base(backend, name):
    """A model that no test changes."""
    return getattr(zoo, backend)(name)


def logits(model, tokens=None, **options):
    with torch.no_grad():
        return model(zoo.prompt() if tokens is None else tokens, return_type="logits", **options)


def move(spectral, *, only=("omega", "log_omega_shift", "phase", "gain"), seed=0, size=0.2):
    """Some spectral parameters displaced by a seeded draw, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in spectral.spectral.named_parameters():
            if name.rsplit(".", 1)[-1] in only:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return spectral


def moved(backend, name, **options):
    return move(to_spectral(base(backend, name), **options))


def train(spectral, steps=2, **options):
    optimizer = torch.optim.AdamW(list(spectral.spectral_parameters()), lr=1e-2, **options)
    for step in range(steps):
        loss = spectral(zoo.prompt(seed=step), return_type="loss")
        optimizer.zero_grad()
        loss.backward(inputs=list(spectral.spectral_parameters()))
        optimizer.step()


def same_to_the_bit(one, other):
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def everything_about(model):
    """What has to be as before, other than numbers: hooks, flags, gradients, names."""
    points = {id(point): point for point in model.hook_dict.values()}
    return {
        "hooks": {
            at: (len(p.fwd_hooks), list(p._forward_hooks), list(p._forward_pre_hooks)) for at, p in points.items()
        },
        "modules": {at: (len(m._forward_hooks), len(m._forward_pre_hooks)) for at, m in enumerate(model.modules())},
        "training": [module.training for module in model.modules()],
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": {name: parameter.grad is None for name, parameter in model.named_parameters()},
        "parameters": {name: id(parameter) for name, parameter in model.named_parameters()},
        "attributes": sorted(vars(model)),
    }


# --- the start ---


@every_model
@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "layer", "log_omega": True}, {"scope": "group", "shared_phase": True}],
    ids=["head", "layer-log", "group-shared"],
)
def test_start_is_the_model_itself_to_the_bit(backend, name, options):
    model = base(backend, name)
    tokens = zoo.prompt(length=40)  # beyond the length at which some rotary modules switch
    spectral = to_spectral(model, **options)
    assert torch.equal(logits(spectral, tokens), logits(model, tokens))


@every_model
def test_every_parameter_has_a_gradient_at_the_start(backend, name):
    model = base(backend, name)
    view = attention_view(model)
    spectral = to_spectral(model)
    loss = spectral(zoo.prompt(), return_type="loss")
    loss.backward(inputs=list(spectral.spectral_parameters()))
    rotary = [index for index in range(view.n_layers) if view.rotary(index) is not None]
    assert [int(index) for index in spectral.spectral] == rotary
    for module in spectral.spectral.values():
        for parameter in (module.omega, module.phase, module.gain):
            # Rounding is 1e-9 and the smallest seen 1e-6, of a pair that hardly turns.
            assert float(parameter.grad.abs().amax()) > 1e-5
            assert bool((parameter.grad != 0).all())


@some_models
def test_a_shared_phase_has_a_gradient_of_rounding_alone(backend, name):
    spectral = to_spectral(base(backend, name), shared_phase=True)
    spectral(zoo.prompt(), return_type="loss").backward(inputs=list(spectral.spectral_parameters()))
    for module in spectral.spectral.values():
        assert float(module.phase.grad.abs().max()) < 1e-5 * float(module.omega.grad.abs().max())
    before = logits(spectral)
    move(spectral, only=("phase",))
    # Rounding of logits of order 1: 1e-6; on the query alone the same phases move them by tenths.
    torch.testing.assert_close(logits(spectral), before, rtol=0, atol=2e-5)


def test_the_inverse_frequencies_are_the_models_own():
    for name in ("llama3", "yarn", "gemma3"):
        model = base("bridge", name)
        view = attention_view(model)
        for index, module in to_spectral(model).spectral.items():
            own = view.rotary(int(index)).theta
            assert torch.equal(module.theta, own.float())
            assert torch.equal(module.omega, own.float().expand_as(module.omega))


# --- the definition ---


def equation_2_scores(view, index, q, k, geometry):
    """Scaled and capped scores of A (x exp(i (m Omega + Phi))) in complex numpy, from q and k before any rotation."""
    raw, own = view.raw(index), view.rotary(index)

    def normed(x, norm):
        return x if norm is None else norm.normalized(x) * norm.gain.detach().double()

    q, k = normed(q.double(), raw.q_norm).numpy(), normed(k.double(), raw.k_norm).numpy()
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    re, im = own.real_index.numpy(), own.imag_index.numpy()
    still = np.setdiff1d(np.arange(q.shape[-1]), np.concatenate([re, im]))
    angle = np.arange(q.shape[1])[:, None, None] * geometry.theta.numpy()
    z_q = geometry.gain.numpy() * (q[..., re] + 1j * q[..., im]) * np.exp(1j * (angle + geometry.phase.numpy()))
    z_k = (k[..., re] + 1j * k[..., im]) * np.exp(1j * angle)
    scores = own.attention_scaling**2 * np.einsum("bqht,bkht->bhqk", z_q, z_k.conj()).real
    scores += np.einsum("bqhc,bkhc->bhqk", q[..., still], k[..., still])
    scores = raw.score_scale * scores
    return scores if raw.softcap is None else raw.softcap * np.tanh(scores / raw.softcap)


@every_model
def test_moved_parameters_are_equation_2(backend, name):
    if name == "cohere" and zoo.HAS_HOOKED:
        pytest.skip("TransformerLens 3.9 pairs the wrong coordinates in Cohere's bridge")
    spectral = moved(backend, name)
    view = attention_view(base(backend, name))
    for index in map(int, spectral.spectral):
        names = view.hook_names(index)
        compared = "scores" if "scores" in names else "pattern"
        with torch.no_grad():
            _, cache = spectral.run_with_cache(
                zoo.prompt(), names_filter=[names[at] for at in ("query", "key", compared)]
            )
        ours = equation_2_scores(
            view, index, cache[names["query"]], cache[names["key"]], spectral.spectral_geometry(index)
        )
        theirs = cache[names[compared]].double().numpy()
        if compared == "pattern":
            seen = np.tril(np.ones(ours.shape[-2:], dtype=bool))
            weights = np.exp(np.where(seen, ours, -np.inf) - ours.max())
            ours = weights / weights.sum(-1, keepdims=True)
        seen = np.broadcast_to(np.tril(np.ones(ours.shape[-2:], dtype=bool)), ours.shape) & (theirs > -1e30)
        # float32 noise of scores up to 20, with the model's own tables: measured 1e-5; without the spectral part, with
        # the phase on the other side or with a gain on both, off by units.
        assert np.abs(ours - theirs)[seen].max() < 4e-5, index
        assert not np.array_equal(ours, theirs)


@some_models
def test_left_padding_changes_nothing(backend, name):
    spectral = moved(backend, name)
    tokens = zoo.prompt(length=12)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), tokens], dim=1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(tokens)], dim=1)
    found = logits(spectral, padded, attention_mask=mask)[:, 5:]
    # Rounding 1e-6; the effect of the spectral parameters themselves is above 0.1.
    torch.testing.assert_close(found, logits(spectral, tokens), rtol=0, atol=2e-5)
    assert float((logits(spectral, tokens) - logits(base(backend, name), tokens)).abs().max()) > 0.05


# --- the model that it was made from ---


@some_models
def test_the_base_is_untouched_before_during_and_after_training(backend, name):
    model = getattr(zoo, backend)(name).train()
    before = logits(model)  # first: transformers puts hooks of its own on a model's modules when it first runs
    about = everything_about(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    spectral = to_spectral(model)
    assert everything_about(model) == about
    with spectral.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: x)]):
        logits(spectral)
        assert torch.equal(logits(model), before)
    train(spectral)
    assert everything_about(model) == about
    assert same_to_the_bit(model.state_dict(), state)
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(spectral), before)
    assert spectral.base is model


@some_models
def test_names_and_numbers_of_parameters_are_the_bases_and_the_spectral_ones(backend, name):
    model = base(backend, name)
    spectral = to_spectral(model)
    own = [f"spectral.{index}.{part}" for index in range(2) for part in ("omega", "phase", "gain")]
    assert sorted(dict(spectral.named_parameters())) == sorted([*dict(model.named_parameters()), *own])
    assert sorted(spectral.state_dict()) == sorted([*model.state_dict(), *own])
    assert len(list(spectral.parameters())) == len(list(model.parameters())) + 6
    assert [id(p) for p in spectral.spectral_parameters()] == [
        id(p) for key, p in spectral.named_parameters() if key.startswith("spectral.")
    ]
    kept = torch.nn.Sequential(spectral).state_dict()
    assert {f"0.{key}" for key in own} <= set(kept)


@some_models
def test_state_dict_round_trip(backend, name):
    spectral = moved(backend, name)
    other = to_spectral(getattr(zoo, backend)(name))
    other.load_state_dict(spectral.state_dict())
    assert torch.equal(logits(other), logits(spectral))
    with pytest.raises(RuntimeError, match=r"0\.omega"):
        other.load_state_dict({key: value for key, value in spectral.state_dict().items() if key != "spectral.0.omega"})


@some_models
def test_a_copy_is_on_its_own(backend, name):
    spectral = moved(backend, name)
    before = logits(spectral)
    other = copy.deepcopy(spectral)
    assert torch.equal(logits(other), before)
    move(other, seed=1)
    assert torch.equal(logits(spectral), before)
    assert not torch.equal(logits(other), before)


# --- use ---


@some_models
def test_every_way_to_run_it_gives_the_same(backend, name):
    spectral = moved(backend, name)
    expected = logits(spectral)
    assert not torch.equal(expected, logits(spectral.base))
    with torch.no_grad():
        assert torch.equal(spectral(zoo.prompt()), expected)
        assert torch.equal(spectral.run_with_hooks(zoo.prompt()), expected)
        found, cache = spectral.run_with_cache(zoo.prompt())
        assert torch.equal(found, expected)
        with spectral.hooks() as inside:
            assert inside is spectral
            assert torch.equal(inside(zoo.prompt()), expected)
        own = spectral.base.run_with_cache(zoo.prompt())[1]
    assert torch.equal(cache["blocks.0.attn.hook_q"], own["blocks.0.attn.hook_q"])
    assert not torch.equal(cache["blocks.0.attn.hook_pattern"], own["blocks.0.attn.hook_pattern"])
    assert spectral.cfg is spectral.base.cfg
    assert spectral.tokenizer is None
    assert attention_view(spectral).backend == backend
    assert torch.equal(spectral.W_U, spectral.base.W_U)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = spectral.no_such_name


@some_models
@pytest.mark.parametrize("when", ["context", "permanent", "run"])
def test_hooks_of_others_come_first(backend, name, when):
    """An edit of the query acts on what the base makes and is turned with it, whenever the hook was added."""
    spectral = moved(backend, name)
    query = f"blocks.0.attn.hook_{'rot_q' if name in NORMED else 'q'}"
    seen = {}

    def keep(what):
        def hook(x, hook):
            seen[what] = x.clone()

        return hook

    def double(x, hook):
        return 2 * x

    pattern = "blocks.0.attn.hook_pattern"
    spectral.base.run_with_hooks(zoo.prompt(), fwd_hooks=[(query, keep("base"))])
    hooks = [(query, double), (query, keep("query")), (pattern, keep("pattern"))]
    if when == "run":
        spectral.run_with_hooks(zoo.prompt(), fwd_hooks=hooks)
    elif when == "context":
        with spectral.hooks(fwd_hooks=hooks):
            logits(spectral)
    else:
        points = {point: spectral.hook_dict[point] for point, _ in hooks}
        for point, hook in hooks:
            points[point].add_hook(hook, is_permanent=True)
        logits(spectral)
        for point in points.values():
            point.remove_hooks(including_permanent=True)
    assert torch.equal(seen["query"], 2 * seen["base"])
    if name in ("neox", "gptj"):
        return  # a gain does not reach the columns that do not turn
    with torch.no_grad():
        spectral.spectral["0"].gain.mul_(2)
        spectral.run_with_hooks(zoo.prompt(), fwd_hooks=[(pattern, keep("gain"))])
    assert torch.equal(seen["pattern"], seen["gain"])  # doubling is exact, and commutes with the rotations


@some_models
def test_a_failed_run_leaves_nothing_behind(backend, name):
    spectral = moved(backend, name)
    about, expected = everything_about(spectral.base), logits(spectral)

    def fail(x, hook):
        raise ArithmeticError("from a hook")

    for run in (spectral, spectral.run_with_cache, functools.partial(spectral.run_with_hooks, fwd_hooks=[])):
        with pytest.raises(ArithmeticError), spectral.hooks(fwd_hooks=[("blocks.1.attn.hook_k", fail)]):
            run(zoo.prompt())
        assert everything_about(spectral.base) == about
    assert torch.equal(logits(spectral), expected)


@some_models
def test_a_run_inside_a_run_is_turned_once(backend, name):
    spectral = moved(backend, name)
    expected, found, depth = logits(spectral), [], []

    def run_again(x, hook):
        if not depth:
            depth.append(1)
            found.append(logits(spectral))

    with spectral.hooks(fwd_hooks=[("blocks.1.attn.hook_k", run_again)]):
        outer = logits(spectral)
    assert torch.equal(found[0], expected)
    assert torch.equal(outer, expected)


@some_models
def test_a_reset_of_hooks_inside_a_run_leaves_it_on(backend, name):
    spectral = moved(backend, name)
    expected = logits(spectral)
    reset = [("blocks.0.hook_resid_pre", lambda x, hook: spectral.reset_hooks())]
    with torch.no_grad():
        assert torch.equal(spectral.run_with_hooks(zoo.prompt(), fwd_hooks=reset), expected)


def test_taking_the_rotation_off_while_it_runs_is_noticed():
    spectral = moved("bridge", "llama")

    def take_off(x, hook):
        spectral.hook_dict["blocks.1.attn.hook_q"].remove_hooks(including_permanent=True)

    with pytest.raises(EditNotHonored, match=r"blocks\.1\.attn\.hook_q"):
        spectral.run_with_hooks(zoo.prompt(), fwd_hooks=[("blocks.0.hook_resid_pre", take_off)])


@some_models
def test_to_moves_the_spectral_parameters_too(backend, name):
    model = getattr(zoo, backend)(name)
    spectral = to_spectral(model)
    assert spectral.to(torch.float64) is spectral
    assert {parameter.dtype for parameter in spectral.parameters()} == {torch.float64}
    found = logits(spectral)
    assert found.dtype == torch.float64
    assert torch.equal(found, logits(model))
    move(spectral)
    assert not torch.equal(logits(spectral), found)
    assert {parameter.dtype for parameter in spectral.float().parameters()} == {torch.float32}


def test_half_precision_keeps_parity_and_float32_frequencies():
    model = zoo.bridge("llama").to(torch.bfloat16)
    spectral = to_spectral(model)
    assert {parameter.dtype for parameter in spectral.spectral_parameters()} == {torch.float32}
    assert torch.equal(logits(spectral), logits(model))


def test_training_flag_is_the_bases():
    model = zoo.bridge("llama").train()
    assert to_spectral(model).training
    assert not to_spectral(model.eval()).training


# --- key/value caches ---


CACHED = [("bridge", name) for name in ("llama", "qwen3", "gemma3", "neox", "mistral")]
CACHED += [pytest.param("hooked", name, marks=needs_hooked) for name in ("qwen2", "qwen3", "neox")]


@pytest.mark.parametrize(("backend", "name"), CACHED)
def test_a_cache_handed_over_gives_the_same_logits(backend, name):
    spectral = moved(backend, name)
    tokens = zoo.prompt(length=20)
    first, rest = tokens[:, :13], tokens[:, 13:]
    ways = (spectral, spectral.run_with_hooks, lambda *given, **named: spectral.run_with_cache(*given, **named)[0])
    for run in ways:
        with torch.no_grad():
            if backend == "hooked":
                from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

                cache = TransformerLensKeyValueCache.init_cache(spectral.cfg, first.device, len(first))
                spectral(first, past_kv_cache=cache, attention_mask=torch.ones_like(first))
                found = run(rest, past_kv_cache=cache, attention_mask=torch.ones_like(rest))
            else:
                from transformers import DynamicCache

                cache = DynamicCache(config=spectral.original_model.config)
                spectral(first, past_key_values=cache, use_cache=True)
                found = run(rest, past_key_values=cache, use_cache=True)
        # Rounding 1e-6; positions that start again at 0 move some logit by tenths.
        torch.testing.assert_close(found, logits(spectral, tokens)[:, 13:], rtol=0, atol=5e-5)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=needs_hooked)])
def test_generation_is_without_a_cache(backend):
    spectral = moved(backend, "llama")
    tokens = zoo.prompt(batch=1, length=6)
    for how in (spectral.generate, lambda *a, **k: list(spectral.generate_stream(*a, **k))):
        with pytest.raises(EditNotHonored, match="use_past_kv_cache=False"):
            how(tokens, max_new_tokens=3)
    with pytest.raises(EditNotHonored, match="hf_generate"):
        spectral.hf_generate(tokens)
    found = spectral.generate(
        tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False, use_past_kv_cache=False, verbose=False
    )
    expected = tokens
    for _ in range(4):
        expected = torch.cat([expected, logits(spectral, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)


def test_positions_of_the_callers_own_are_refused():
    spectral = moved("bridge", "llama")
    with pytest.raises(EditNotHonored, match="position_ids"):
        spectral(zoo.prompt(), position_ids=torch.arange(24)[None])
    with pytest.raises(EditNotHonored, match="tuple"):
        spectral(zoo.prompt(), past_key_values=((),))


# --- choices ---


@pytest.mark.parametrize(("scope", "rows"), [("head", (2, 4)), ("group", (2, 2)), ("layer", (1, 1)), ("model", (1, 1))])
def test_scopes(scope, rows):
    spectral = to_spectral(base("bridge", "llama"), scope=scope)
    for module in spectral.spectral.values():
        assert (len(module.omega), len(module.phase), len(module.gain)) == (rows[0], rows[1], rows[1])
    expected = 3 if scope == "model" else 6
    assert len(list(spectral.spectral_parameters())) == expected
    assert len(list(spectral.parameters())) == len(list(spectral.base.parameters())) + expected
    move(spectral)
    same = torch.equal(spectral.spectral["0"].omega_by_head(), spectral.spectral["1"].omega_by_head())
    assert same == (scope == "model")
    train(spectral)
    assert same == torch.equal(spectral.spectral["0"].gain_by_head(), spectral.spectral["1"].gain_by_head())


def test_one_omega_for_layers_that_turn_differently_is_refused():
    with pytest.raises(ValueError, match="layers 0 and 1 have different inverse frequencies"):
        to_spectral(base("bridge", "gemma3"), scope="model")


@some_models
def test_other_heads_and_pairs_stay_geometric(backend, name):
    """Also after training steps with weight decay, which moves parameters that have no gradient."""
    view = attention_view(base(backend, name))
    group = view.n_heads(1) // len(view.raw(1).w_k)
    heads = [(1, head) for head in range(view.n_heads(1) - group, view.n_heads(1))]
    spectral = to_spectral(base(backend, name), heads=heads, frequencies=[0])
    assert list(spectral.spectral) == ["1"]
    train(spectral, weight_decay=0.5)
    assert torch.equal(spectral.spectral_geometry(0).theta, view.rotary(0).theta)
    assert spectral.spectral_geometry(0).gain is None
    geometry = spectral.spectral_geometry(1)
    chosen = torch.zeros_like(geometry.theta, dtype=torch.bool)
    chosen[-group:, 0] = True
    assert torch.equal(geometry.theta != view.rotary(1).theta, chosen)
    assert torch.equal(geometry.gain != 1, chosen)
    assert torch.equal(geometry.phase != 0, chosen)
    with torch.no_grad():
        own, found = (
            model.run_with_cache(zoo.prompt())[1]["blocks.1.attn.hook_pattern"] for model in (spectral.base, spectral)
        )
    differs = (own != found).any(0).any(-1).any(-1)
    assert torch.equal(differs, chosen.any(1))


def test_heads_are_pairs_or_a_table():
    table = pd.DataFrame({"layer": [0, 0], "head": [2, 3], "score": [0.5, 0.4]})
    for heads in (table, [(0, 3), (0, 2), (0, 3)], iter([(0, 2), (0, 3)])):
        spectral = to_spectral(base("bridge", "llama"), heads=heads)
        assert spectral.spectral["0"].query_mask.any(1).tolist() == [False, False, True, True]


def test_frequencies_may_be_an_iterator():
    spectral = to_spectral(base("bridge", "llama"), frequencies=iter([1, 2]))
    for module in spectral.spectral.values():
        assert module.query_mask[0].nonzero().flatten().tolist() == [1, 2]


def test_layers_without_rotary_positions_have_no_module():
    spectral = to_spectral(base("bridge", "smollm3"))
    assert list(spectral.spectral) == ["0", "2"]
    assert spectral.spectral_geometry(1) is None
    with pytest.raises(UnsupportedArchitecture, match="layer 1 has no rotary positions"):
        to_spectral(base("bridge", "smollm3"), heads=[(0, 0), (0, 1), (1, 0), (1, 1)])


def test_noise_differs_between_layers_and_not_between_calls():
    one, two = (to_spectral(base("bridge", "llama"), phase_noise=1e-3) for _ in range(2))
    assert same_to_the_bit(dict(one.spectral.named_parameters()), dict(two.spectral.named_parameters()))
    assert not torch.equal(one.spectral["0"].phase, one.spectral["1"].phase)
    assert not torch.equal(
        to_spectral(base("bridge", "llama"), phase_noise=1e-3, seed=1).spectral["0"].phase, one.spectral["0"].phase
    )
    assert not torch.equal(logits(one), logits(one.base))


def test_geometry_is_the_parameters_by_head():
    spectral = moved("bridge", "yarn")
    own, found = attention_view(base("bridge", "yarn")).rotary(0), spectral.spectral_geometry(0)
    module = spectral.spectral["0"]
    assert torch.equal(found.theta, own.theta + module.shift_by_head())
    assert torch.equal(found.gain, module.gain.detach().double())
    assert torch.equal(found.phase, module.phase.detach().double())
    assert found.attention_scaling == own.attention_scaling != 1
    assert torch.equal(found.real_index, own.real_index)
    fresh = to_spectral(base("bridge", "yarn")).spectral_geometry(0)
    assert torch.equal(fresh.theta, own.theta.expand(4, -1))


# --- refusals ---


@pytest.mark.parametrize("name", NO_ROPE)
def test_a_model_without_rotary_positions_is_refused(name):
    with pytest.raises(UnsupportedArchitecture, match="none of the 2 layers has rotary positions"):
        to_spectral(base("bridge", name))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"heads": [(2, 0)]}, BadHead, "L2H0 does not exist"),
        ({"heads": [(0, 4)]}, BadHead, "L0H4 does not exist"),
        ({"heads": []}, ValueError, "no head is chosen"),
        ({"heads": [(0, 0), (0, 1), (1, 2)]}, ValueError, r"layer 1: heads \[2, 3\] share key/value head 1"),
        ({"frequencies": [6]}, ValueError, "layer 0: frequencies are 0 to 5"),
        ({"phase_noise": -1.0}, ValueError, "standard deviation"),
    ],
)
def test_choices_that_do_not_fit_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        to_spectral(base("bridge", "llama"), **options)


def test_a_spectral_model_is_not_made_spectral_again():
    with pytest.raises(ValueError, match="spectral already"):
        to_spectral(to_spectral(base("bridge", "llama")))


def test_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="neither a TransformerBridge nor a HookedTransformer"):
        to_spectral(torch.nn.Linear(2, 2))


def test_a_hook_point_that_never_fires_is_refused(monkeypatch):
    """NeoX's bridge has the hook points after its rotation, and never uses them."""
    monkeypatch.setattr(spectral_model, "sites_of", sites_after_the_rotation)
    with pytest.raises(EditNotHonored, match="layer 0: the model does not use a query"):
        to_spectral(base("bridge", "neox"))


def sites_after_the_rotation(view, layers):
    from tlspectral.spectral_rope.placement import Site

    names = [(index, side, f"blocks.{index}.attn.hook_rot_{side[0]}") for index in layers for side in ("query", "key")]
    return [Site(index, side, name, view.model.hook_dict[name], layers[index]) for index, side, name in names]


def test_a_start_that_is_not_the_model_is_refused(monkeypatch):
    def off(*given, **options):
        layers = build(*given, **options)
        with torch.no_grad():
            layers["1"].gain[0, 0] += 1e-3
        return layers

    build = spectral_model.spectral_layers
    monkeypatch.setattr(spectral_model, "spectral_layers", off)
    with pytest.raises(ScoreMismatch, match="at the start differ"):
        to_spectral(base("bridge", "llama"))


def test_the_proof_is_not_seen_by_hooks_on_the_model():
    model, calls = zoo.bridge("llama"), []
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: calls.append(1))]):
        to_spectral(model)
    assert not calls


# --- merging ---


MERGED = [("bridge", name) for name in BRIDGES if name not in NORMED]
MERGED += [pytest.param("hooked", name, marks=needs_hooked) for name in HOOKED if name not in NORMED]


@pytest.mark.parametrize(("backend", "name"), MERGED)
def test_gain_and_phase_fold_into_the_query_weights(backend, name):
    spectral = move(to_spectral(base(backend, name)), only=("gain", "phase"))
    before = logits(spectral.base)
    merged = merge(spectral)
    assert type(merged) is type(spectral.base)
    assert not isinstance(merged, SpectralModel)
    found, expected = logits(merged), logits(spectral)
    # Rounding of W_Q in float32: 2e-6 of the largest logit; the effect of gain and phase is a tenth of it and more.
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) < 2e-5 * scale
    assert float((expected - before).abs().max()) > 0.02 * scale
    assert torch.equal(logits(spectral.base), before)
    assert torch.equal(logits(spectral), expected)


@pytest.mark.parametrize("only", ["omega", "log_omega_shift"])
def test_a_frequency_that_moved_is_not_folded(only):
    spectral = to_spectral(base("bridge", "llama"), log_omega=only != "omega")
    with torch.no_grad():
        getattr(spectral.spectral["1"], only)[1, 2] += 1e-3
    with pytest.raises(ValueError, match=r"layer 1: omega has moved \(most in head 2, pair 2"):
        merge(spectral)


def test_nothing_folds_through_a_query_norm():
    spectral = to_spectral(base("bridge", "qwen3"))
    assert torch.equal(logits(merge(spectral)), logits(spectral))
    for only in ("gain", "phase"):
        with pytest.raises(UnsupportedArchitecture, match="layer 0: a query norm"):
            merge(move(to_spectral(base("bridge", "qwen3")), only=(only,)))


def test_an_ordinary_model_is_not_merged():
    with pytest.raises(TypeError, match="not a spectral model"):
        merge(base("bridge", "llama"))


def test_a_merge_that_does_not_reach_the_model_is_refused(monkeypatch):
    module = importlib.import_module("tlspectral.spectral_rope.merge")  # as an attribute this is the function
    monkeypatch.setattr(module, "with_gain_and_phase", lambda weight, geometry: weight)
    with pytest.raises(UnsupportedArchitecture, match="merged model's logits differ"):
        merge(move(to_spectral(base("bridge", "llama")), only=("phase",)))
