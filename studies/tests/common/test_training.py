"""The random-map task against its definition, the plain model against TransformerLens, trainer, files, packaging."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
import zoo
from safetensors.torch import load_file
from tlspectral_studies.common import (
    AttentionOnlyTransformer,
    RandomMapTask,
    TrainingSettings,
    TransformerConfig,
    evaluate,
    train,
)
from tlspectral_studies.common.random_map import follows_a_copy, token_losses
from tlspectral_studies.common.saved_training import SavedTraining, saved_model, saved_steps
from tlspectral_studies.common.trainer import begin_training, training_steps
from tlspectral_studies.fingerprint import packaged_models as package
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typer.testing import CliRunner
from zoo import generator

from tlspectral.errors import BadWeights, IncompatibleCheckpoint
from tlspectral.models.loading.packaged import read_packaged

POSITIONS = ("rotary", "standard")
SMALL = TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16)
SMALL_TASK = RandomMapTask(vocabulary=8, length=16)
SHORT = TrainingSettings(steps=30, batch_size=8, warmup_steps=5, evaluate_every=10, evaluation_sequences=16)


def model(positions="rotary", seed=0, **changes):
    return AttentionOnlyTransformer(replace(SMALL, positional_embedding_type=positions, **changes), seed=seed).eval()


def sample_tokens(n_sequences=4, seed=0):
    return SMALL_TASK.sample(n_sequences, generator(seed)).tokens


def test_a_batch_is_the_documented_draw():
    """Maps, first tokens, places of noise, noise tokens, in this order from one generator."""
    task, stream = RandomMapTask(vocabulary=7, length=30, noise=0.3), generator(5)
    maps = torch.randint(0, 7, (6, 7), generator=stream)
    tokens = [torch.randint(0, 7, (6,), generator=stream)]
    is_noise = torch.rand(6, 29, generator=stream) < 0.3
    noise = torch.randint(0, 7, (6, 29), generator=stream)
    for t in range(29):
        tokens.append(torch.where(is_noise[:, t], noise[:, t], maps[torch.arange(6), tokens[-1]]))
    batch = task.sample(6, generator(5))
    assert torch.equal(batch.tokens, torch.stack(tokens, dim=1))
    for row in range(6):
        for t in range(29):
            met = int(batch.tokens[row, t]) in batch.tokens[row, :t].tolist()
            assert bool(batch.predictable[row, t]) == (met and not bool(is_noise[row, t]))
    assert torch.equal(batch.noise, is_noise)


def jittered(module, seed=0):
    """Biases and gains off 0 and 1, so that none can be left out unseen."""
    stream = generator(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".W_" not in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream)
    return module


@pytest.mark.parametrize("positions", POSITIONS)
def test_attention_is_causal(positions):
    built, tokens = jittered(model(positions)), sample_tokens()
    before, (_, layers) = built(tokens), built.with_attention(tokens)
    assert len(layers) == 2
    for scores, pattern in layers:
        assert pattern.shape == (4, 2, 16, 16)
        torch.testing.assert_close(scores.softmax(-1), pattern)
        assert not pattern.triu(1).any()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 8
    after = built(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


@pytest.mark.parametrize(("positions", "adjacent"), [("rotary", True), ("rotary", False), ("standard", True)])
def test_loss_and_gradient_of_a_step_are_those_of_explicit_attention(positions, adjacent):
    built, tokens = jittered(model(positions, rotary_adjacent_pairs=adjacent, unembed_bias=True)), sample_tokens()
    with torch.no_grad():
        for block in built.layers:
            block.attn.W_Q *= 10  # uneven attention: the largest pattern entries are above 0.9 at late queries
    explicit, layers = built.with_attention(tokens)
    assert layers[0].pattern[:, :, 8:].max() > 0.9
    losses = [token_losses(logits, tokens).mean() for logits in (built(tokens), explicit)]
    found, expected = (torch.autograd.grad(loss, list(built.parameters())) for loss in losses)
    # Measured: 0. With a mask that lets the next key through the loss differs by 4e-3 to 9e-2.
    torch.testing.assert_close(*losses, atol=2e-6, rtol=0)
    largest = max(float(value.abs().max()) for value in expected)
    for one, other in zip(found, expected, strict=True):
        # Measured: 1e-6 of the largest entry. The gradient of b_K vanishes, as the softmax does not see it.
        torch.testing.assert_close(one, other, atol=5e-6 * largest, rtol=0)


@pytest.mark.parametrize("positions", POSITIONS)
def test_the_model_by_a_second_hand(positions):
    """The same computation with torch's own layers, in float64, one head at a time."""
    built = jittered(model(positions)).double()
    tokens, state = sample_tokens(), built.state_dict()
    x = F.embedding(tokens, state["embed.W_E"])
    if positions == "standard":
        x = x + state["pos_embed.W_pos"]
    theta = torch.tensor([10000 ** (-2 * t / 8) for t in range(4)])
    for layer in range(2):
        at = {name.split(".", 2)[2]: value for name, value in state.items() if name.startswith(f"blocks.{layer}.")}
        n = F.layer_norm(x, (16,), at["ln1.w"], at["ln1.b"])
        for head in range(2):
            q, k, v = (n @ at[f"attn.W_{role}"][head] + at[f"attn.b_{role}"][head] for role in "QKV")
            if positions == "rotary":
                angle = torch.arange(16)[:, None] * theta
                turn = torch.polar(torch.ones_like(angle), angle)
                pair = [torch.view_as_complex(part.unflatten(-1, (4, 2)).contiguous()) * turn for part in (q, k)]
                q, k = (torch.view_as_real(part).flatten(-2) for part in pair)
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + z @ at["attn.W_O"][head]
        x = x + at["attn.b_O"]
    expected = F.layer_norm(x, (16,), state["ln_final.w"], state["ln_final.b"]) @ state["unembed.W_U"]
    # Measured: 1e-6, from the float32 angles; 1e-15 without positions.
    torch.testing.assert_close(built(tokens), expected, atol=1e-5 if positions == "rotary" else 1e-12, rtol=0)


@zoo.needs_hooked
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_seed_gives_transformer_lens_initial_weights(positions):
    from transformer_lens import HookedTransformer

    config = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_vocab": 8, "n_ctx": 16, "attn_only": True}
    hooked = HookedTransformer(config | {"positional_embedding_type": positions, "seed": 3, "device": "cpu"})
    theirs = dict(hooked.named_parameters())
    ours = dict(model(positions, seed=3).named_parameters())
    assert set(theirs) - set(ours) == {"unembed.b_U"}
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


REFUSED = {
    "vocabulary": (lambda: RandomMapTask(vocabulary=1), "random-map task needs"),
    "length": (lambda: RandomMapTask(length=1), "random-map task needs"),
    "noise": (lambda: RandomMapTask(noise=1.5), "random-map task needs"),
    "negative noise": (lambda: RandomMapTask(noise=-0.1), "random-map task needs"),
    "a long text": (lambda: model()(torch.zeros(1, 17, dtype=torch.int64)), "17 tokens .* n_ctx=16"),
    "positions": (lambda: replace(SMALL, positional_embedding_type="alibi"), "neither 'rotary' nor 'standard'"),
    "half a pair": (lambda: replace(SMALL, d_head=7), "d_head=7 is odd"),
    "more tokens": (lambda: train(SMALL, RandomMapTask(vocabulary=9, length=16), SHORT), "d_vocab=8 and n_ctx=16"),
    "longer texts": (lambda: train(SMALL, RandomMapTask(vocabulary=8, length=17), SHORT), "d_vocab=8 and n_ctx=16"),
    "a step beyond": (lambda: train(SMALL, SMALL_TASK, SHORT, keep_steps=[0, 31]), r"\[31\]; .* from 0 to 30"),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_losses_are_cross_entropy_and_keys_that_follow_a_copy_are_found():
    tokens, logits = sample_tokens(), torch.randn(4, 16, 8, generator=generator())
    expected = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(token_losses(logits, tokens), expected)
    found = follows_a_copy(tokens)
    for row, query, key in itertools.product(range(4), range(16), range(16)):
        expected = 1 <= key < query and tokens[row, key - 1] == tokens[row, query]
        assert bool(found[row, query, key]) == bool(expected)


def test_evaluation_finds_the_best_heads():
    """Against loops over a model that attends unevenly."""
    built, batch = jittered(model()), SMALL_TASK.sample(5, generator())
    found = evaluate(built, batch)
    with torch.no_grad():
        logits, layers = built.with_attention(batch.tokens)
    losses = token_losses(logits, batch.tokens)
    assert found["loss"] == pytest.approx(losses.mean().item())
    assert found["loss_predictable"] == pytest.approx(losses[batch.predictable].mean().item())
    follows = follows_a_copy(batch.tokens)
    heads = [layer.pattern[:, head] for layer in layers for head in range(2)]
    queries = range(4, 16)
    previous = [np.mean([one[row, p, p - 1] for row in range(5) for p in queries]) for one in heads]
    induction = [np.mean([(one[row, p] * follows[row, p]).sum() for row in range(5) for p in queries]) for one in heads]
    assert found["prev_best"] == pytest.approx(max(previous), abs=1e-6)
    assert found["ind_best"] == pytest.approx(max(induction), abs=1e-6)


@pytest.fixture(scope="module")
def run():
    return train(SMALL, SMALL_TASK, SHORT, keep_steps=[0, 30])


def test_the_loss_falls(run):
    assert run.history["step"].tolist() == [0, 10, 20, 30]
    for step, expected in ((0, AttentionOnlyTransformer(SMALL)), (30, run.model)):
        kept = run.checkpoints[step]
        assert all(torch.equal(kept[name], value) for name, value in expected.state_dict().items())
    # Measured: 2.37 to 1.99, of which ln 8 = 2.08 is what knowing nothing costs.
    assert run.history["loss"].iloc[-1] < run.history["loss"].iloc[0] - 0.1


def test_a_seed_decides_the_training_however_often_it_is_evaluated(run, capfd):
    before = torch.get_rng_state()
    often = train(SMALL, SMALL_TASK, replace(SHORT, evaluate_every=7))
    other = train(SMALL, SMALL_TASK, replace(SHORT, seed=1, steps=1))
    assert torch.equal(torch.get_rng_state(), before)
    weights, same = run.model.state_dict(), often.model.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert often.history["step"].tolist() == [0, 7, 14, 21, 28, 30]
    assert often.history.iloc[-1].equals(run.history.iloc[-1])
    assert other.history["loss"].iloc[0] != run.history["loss"].iloc[0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_training_on_another_device_is_the_same_training(device):
    with sdpa_kernel(SDPBackend.MATH):  # each device has kernels of its own, which round otherwise
        here, there = (train(SMALL, SMALL_TASK, SHORT, keep_steps=[30], device=place) for place in ("cpu", device))
    assert str(there.model.embed.W_E.device) == device
    assert here.history.equals(there.history)
    weights = here.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in there.checkpoints[30].items())


@pytest.mark.parametrize("weight", [0.0, 2.5])
def test_a_step_is_adamw_on_the_mean_loss_and_a_penalty(weight, run):
    """Two steps by hand; under warm-up the first has learning rate 0. Without a penalty the gradient is clipped."""
    clip = 1.0 if weight else 1e-3
    settings = replace(SHORT, steps=2, warmup_steps=2, decay_share=0.0, clip=clip)
    penalty = (lambda model: model.layers[0].attn.W_Q.square().sum()) if weight else None
    built, stream = AttentionOnlyTransformer(SMALL, seed=0), generator(10_000)
    optimizer = torch.optim.AdamW(built.parameters(), lr=2e-3, weight_decay=0.01)
    for rate in (0.0, 1e-3):
        tokens = SMALL_TASK.sample(8, stream).tokens
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(built(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        (loss + weight * penalty(built) if penalty else loss).backward()
        nn.utils.clip_grad_norm_(built.parameters(), clip)
        optimizer.step()
    found = train(SMALL, SMALL_TASK, settings, penalty=penalty, penalty_weight=weight)
    for name, value in built.state_dict().items():
        # Steps are of size 1e-3. Measured: the penalty moves W_Q by 1e-4 and more.
        torch.testing.assert_close(found.model.state_dict()[name], value, atol=1e-6, rtol=0)
    if penalty:
        assert found.history["penalty"].iloc[-1] == pytest.approx(penalty(found.model).item())


def test_the_learning_rate_warms_up_stays_and_falls_along_a_cosine():
    settings = TrainingSettings(steps=100, learning_rate=1.0, warmup_steps=10, decay_share=0.4)
    rates = [settings.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(10)])
    assert set(rates[10:61]) == {1.0}
    assert rates[80] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[60:]))
    assert rates[99] < 0.01
    flat = TrainingSettings(steps=100, learning_rate=1.0, warmup_steps=0, decay_share=0.0)
    assert {flat.learning_rate_at(step) for step in range(100)} == {1.0}


# --- a training that is saved ---


def trained(training, until, done=0):
    for step in training_steps(training, SMALL_TASK, SHORT, done=done):
        if step == until:
            return training
    raise AssertionError


def same(one, other):
    assert set(one) == set(other)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(("positions", "stop"), [("rotary", 0), ("standard", 3)])
def test_a_training_goes_on_to_the_same_bits(tmp_path, positions, stop):
    config = replace(SMALL, positional_embedding_type=positions)
    whole = trained(begin_training(config, SHORT), 8)
    saved = SavedTraining(tmp_path / "run", {"seed": 0})
    assert saved.resume(begin_training(config, SHORT)) is None
    saved.save(trained(begin_training(config, SHORT), stop), stop, {"loss": [0.1, float("inf")]})
    resumed = begin_training(config, SHORT)
    assert saved.resume(resumed) == (stop, {"loss": [0.1, float("inf")]})
    trained(resumed, 8, done=stop)
    same(resumed.model.state_dict(), whole.model.state_dict())
    moments = [training.optimizer.state_dict()["state"] for training in (resumed, whole)]
    for index, values in moments[1].items():
        same(moments[0][index], values)
    assert torch.equal(resumed.stream.get_state(), whole.stream.get_state())


def test_the_files_of_a_saved_training(tmp_path):
    saved = SavedTraining(tmp_path, {"seed": 0})
    training = begin_training(SMALL, SHORT)
    saved.save(training, 0, {})
    saved.save(trained(training, 2), 2, {})
    assert list(saved_steps(tmp_path)) == [0, 2]
    assert saved_steps(tmp_path / "nothing") == {}
    file = tmp_path / "step2.safetensors"
    for weights in (load_file(file), saved_model(file).state_dict()):
        same(weights, training.model.state_dict())


def test_the_state_of_another_training_is_refused(tmp_path):
    SavedTraining(tmp_path, {"seed": 0}).save(begin_training(SMALL, SHORT), 0, {})
    with pytest.raises(IncompatibleCheckpoint, match="is the state of another training"):
        SavedTraining(tmp_path, {"seed": 1}).resume(begin_training(SMALL, SHORT))
    with pytest.raises(IncompatibleCheckpoint, match="is the state of another training"):
        SavedTraining(tmp_path, {"seed": 0}).resume(begin_training(replace(SMALL, rotary_base=100), SHORT))


@pytest.mark.parametrize("name", ["state", "step0"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    saved = SavedTraining(tmp_path, {})
    saved.save(begin_training(SMALL, SHORT), 0, {})
    file = tmp_path / f"{name}.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-5] ^= 1
    file.write_bytes({"cut": data[:-5], "flipped": data, "foreign": b"weights"}[damage])
    if name == "state":
        with pytest.raises(IncompatibleCheckpoint, match=f"remove {tmp_path}, and the training starts"):
            saved.resume(begin_training(SMALL, SHORT))
    else:
        with pytest.raises(BadWeights, match=r"step0\.safetensors"):
            saved_model(file)


# --- packaging ---


RECIPE = package.Recipe(SMALL, SMALL_TASK, replace(SHORT, steps=2))


@pytest.mark.slow
def test_a_checkpoint_is_weights_and_their_record(tmp_path, monkeypatch):
    path = package.make_checkpoint("tiny-test", tmp_path / "made", recipe=RECIPE)
    record, weights = read_packaged("tiny-test", path.parent)
    trained = train(SMALL, SMALL_TASK, RECIPE.training)
    assert all(torch.equal(value, weights[name]) for name, value in trained.model.state_dict().items())
    assert TransformerConfig(**record["config"]) == SMALL
    assert (record["task"], record["training"]) == (vars(SMALL_TASK), vars(RECIPE.training))
    assert record["metrics"]["logit_difference"] < 1e-5
    assert len(record["metrics"]["heads"]) == 4
    assert [row["step"] for row in record["history"]] == [0, 2]
    monkeypatch.setitem(package.RECIPES, "tiny-test", RECIPE)
    app = typer.Typer()
    app.command()(package.main)
    done = CliRunner().invoke(app, ["tiny-test", "-o", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    for file in path.parent.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    wrong = CliRunner().invoke(app, ["tiny-alibi", "-o", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "no packaged checkpoint" in wrong.output.replace("\n", " ")


def test_a_model_that_transformer_lens_computes_otherwise_is_not_written(tmp_path, monkeypatch):
    built = package.bridge_from_weights

    def other_scale(config, weights, *place):
        return built(config, {name: 1.5 * value for name, value in weights.items()}, *place)

    monkeypatch.setattr(package, "bridge_from_weights", other_scale)
    with pytest.raises(RuntimeError, match="TransformerLens' logits differ by"):
        package.make_checkpoint("tiny-test", tmp_path, recipe=RECIPE)
    assert not list(tmp_path.iterdir())
