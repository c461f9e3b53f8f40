"""Ablations of long prompts, whose scores pass strip by strip, equal those of whole matrices."""

import dataclasses

import pytest
import torch
import zoo
from ablation_runs import left_padded
from native_models import native
from squares import Squares

import tlspectral as tls
from tlspectral.models.reading import attention_view
from tlspectral.models.running.long_prompts import strips_of, whole_hooks, why_whole
from tlspectral.tables import measurement
from tlspectral.tables.progress import without_bars
from tlspectral.tasks.metrics import next_token_loss

PARTS = {
    "symmetric": tls.parts.Symmetric(),
    "antisymmetric": tls.parts.Antisymmetric(include_bias=True),
    "static": tls.parts.Antisymmetric(static=True),
    "phase": tls.parts.RopePhase(frequencies=[0, 1]),
    "band": tls.parts.Band([0]),
    "mode": tls.parts.Mode(0),
    "long_range": tls.parts.LongRange(3, sinks=2),
    "output": tls.parts.Output("zero"),
    "at": tls.parts.Symmetric(at=17),
    "sinks_at": tls.parts.LongRange(2, at=[15, 20]),
}
HEADS = ["L0H1", "L1H0", "L1H2"]


def run(model, part, tokens, **given):
    with tls.ablate(model, HEADS, part), torch.no_grad():
        assert not whole_hooks(attention_view(model)) or isinstance(part, OfWhole)
        return model(tokens, **given)


FAMILIES = ["llama", *zoo.also_slow("gemma2", "qwen3", "olmo2", "mistral", "neox", "gptj", "opt", "gptneo", "llama4")]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_parts(name, part):
    model, tokens = zoo.shared("bridge", name), zoo.prompt(2, 23)
    if name in ("opt", "gptneo", "llama4") and part in ("phase", "band"):
        return  # layers without rotary positions
    whole = run(model, PARTS[part], tokens)
    with strips_of(5):
        found = run(model, PARTS[part], tokens)
    # Measured: 2e-6, smaller float32 products; the parts move logits by 1e-2 and more.
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert (model(tokens) - whole).abs().max() > 1e-4


@pytest.mark.parametrize("part", ["long_range", "symmetric"])
def test_left_padding(part):
    model = zoo.shared("bridge", "llama")
    _, padded, mask = left_padded()
    whole = run(model, PARTS[part], padded, attention_mask=mask)
    with strips_of(5):
        found = run(model, PARTS[part], padded, attention_mask=mask)
    torch.testing.assert_close(found[:, 5:], whole[:, 5:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_values_and_tables_inside_a_context(name):
    model, tokens = zoo.shared("bridge", name), zoo.prompt(3, 23)
    task = tls.tasks.language(tokens)

    def measure():
        with tls.ablate(model, HEADS, "rope_phase"), tls.ablate(model, "L1H3", tls.parts.LongRange(4)):
            return tls.evaluate(model, task).per_sequence, tls.detect_heads(model, prompts=tokens)["prev"].to_numpy()

    (loss, table), intact = measure(), tls.evaluate(model, task).per_sequence
    with strips_of(5):
        found_loss, found_table = measure()
    # Measured: 3e-7; the ablation moves losses by 1e-2.
    assert found_loss == pytest.approx(loss, abs=1e-5)
    assert found_table == pytest.approx(table, abs=1e-6)
    assert abs(intact - loss).max() > 1e-3


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OfWhole(tls.parts.Symmetric):
    """A user's part, which counts positions from the first query and key that it gets."""

    name = "of_whole"

    def of(self, scores, pairs):
        whole = super().of(scores, pairs)
        assert whole.shape[-2:] == (23, 23)
        return whole * (torch.arange(23) % 2)


def test_a_users_part_gets_whole_prompts():
    model, tokens = zoo.shared("bridge", "llama"), zoo.prompt(2, 23)
    whole = run(model, OfWhole(), tokens)
    with strips_of(5):
        assert torch.equal(run(model, OfWhole(), tokens), whole)


def test_contexts_of_parts_act_together():
    """A part that takes strips, and a user's part that takes whole matrices."""
    model, tokens = zoo.shared("bridge", "llama"), zoo.prompt(2, 23)

    def both(other):
        with tls.ablate(model, "L0H1", tls.parts.LongRange(3)), tls.ablate(model, "L1H2", other), torch.no_grad():
            return model(tokens), bool(whole_hooks(attention_view(model)))

    for other in (OfWhole(), tls.parts.Symmetric()):
        (whole, _), alone = both(other), run(model, tls.parts.LongRange(3), tokens)
        with strips_of(5):
            found, by_itself = both(other)
        assert by_itself == isinstance(other, OfWhole)
        # Measured: 7e-7; either part alone differs by 1e-2.
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)
        assert (alone - whole).abs().max() > 1e-3


@pytest.mark.parametrize("feature", ["rotary", "softcap"])
@pytest.mark.parametrize("part", ["long_range", "symmetric"])
def test_models_that_the_library_of_bridges_builds(part, feature):
    """In TransformerLens 4 they use an edited pattern, in 3.9 not."""
    model, tokens = native(feature), zoo.prompt(2, 23) % 40
    whole = run(model, PARTS[part], tokens)
    with strips_of(5):
        found = run(model, PARTS[part], tokens)
    # Measured: 2e-6; the part moves logits by 1.
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("part", ["symmetric", "long_range"])
def test_gradients_of_an_ablation_of_scores_are_refused(part):
    model = zoo.shared("bridge", "llama")
    said = rf"{part}: a prompt of 23 tokens has no gradients .* torch\.no_grad"
    with strips_of(5), tls.ablate(model, HEADS, PARTS[part]), pytest.raises(ValueError, match=said):
        model(zoo.prompt(1, 23))


def test_sweeps_over_parts_of_scores_and_edges_are_refused_by_length():
    model, task = zoo.shared("bridge", "llama"), tls.tasks.language(zoo.prompt(3, 23))
    with strips_of(5):
        with pytest.raises(ValueError, match=r"parts of scores.* 23 tokens.*evaluate the task inside tls\.ablate"):
            tls.ablation_sweep(model, "symmetric", heads="L0H1", task=task)
        with pytest.raises(ValueError, match=r"an edge is cut in attention of all .* 23 tokens.* give shorter"):
            tls.edge_effects(model, ["L1H0.q"], senders=["L0H1"], task=task)
        with pytest.raises(ValueError, match=r"a sweep over bands needs .* 23 tokens.*evaluate the task inside tls"):
            tls.hooks.band_effects(model, "L0H1", task=task)
    whole = tls.ablation_sweep(model, tls.parts.LongRange(3), heads=HEADS, task=task)
    with strips_of(5):
        found = tls.ablation_sweep(model, tls.parts.LongRange(3), heads=HEADS, task=task)
    # Measured: 3e-7, smaller float32 products.
    assert found["delta"].to_numpy() == pytest.approx(whole["delta"].to_numpy(), abs=1e-5)
    assert whole["delta"].abs().max() > 1e-3


@pytest.fixture
def said(monkeypatch, capsys):
    """What is written of the cost of a call, of which each pass counts as long."""
    monkeypatch.setattr(measurement, "EVERY", 0.0)

    def read(call):
        capsys.readouterr()
        call()
        return [
            line.split(" passes")[0] for line in capsys.readouterr().err.splitlines() if "passes of the model" in line
        ]

    return read


def test_a_sweep_of_long_prompts_says_its_cost_before_it_starts(said, tmp_path):
    model, task = zoo.shared("bridge", "llama"), tls.tasks.language(zoo.prompt(3, 23))
    part = tls.parts.LongRange(3)

    def sweep(**options):
        return said(lambda: tls.ablation_sweep(model, part, task=task, **options))

    assert sweep() == []  # short prompts
    with strips_of(5):
        # Of two layers: four heads of the first run both layers, four of the second one.
        assert sweep() == ["sweep long_range: 6"]
        assert sweep(heads=["L0H1", "L1H0"], folder=tmp_path) == ["sweep long_range: 2"]  # 1.5
        assert sweep(heads=["L0H1", "L1H0"], folder=tmp_path) == []  # everything is kept
        assert sweep(heads={"both": ["L0H1", "L1H0"], "late": ["L1H0"]}) == ["sweep long_range: 2"]  # 1.5
        with without_bars():
            assert sweep() == []


def test_prices_of_caches_of_long_prompts_say_their_cost(said):
    model, rows = zoo.shared("bridge", "llama"), zoo.prompt(3, 23)

    def price(**options):
        return said(lambda: tls.cache_prices(model, rows, windows=[3, 5], sinks=1, draws=3, **options))

    assert price() == []
    with strips_of(5):
        assert price() == ["cache prices: 6"]  # two windows, two groups of each layer, of which the later run half
        assert price(groups={"one": ["L1KV0"]}) == ["cache prices: 2"]  # two windows, the set and the one other


def measurements(model, length):
    """Calls on prompts of so many tokens, of which none needs a matrix of all queries and keys."""
    tokens = zoo.prompt(2, length)
    task, apart, heads = tls.tasks.language(tokens), zoo.prompt(2, length, seed=5), ["L0H1", "L1H0"]

    def ablated(part):
        with tls.ablate(model, heads, part), torch.no_grad():
            return model(tokens)

    def swept(part, **options):
        return tls.ablation_sweep(model, part, heads=heads, task=task, **options)

    return {
        "evaluate": lambda: tls.evaluate(model, task),
        "ablate": lambda: ablated(tls.parts.LongRange(9, sinks=1)),
        "ablate scores": lambda: ablated("symmetric"),
        "output": lambda: swept(tls.parts.Output("zero")),
        "mean": lambda: swept(tls.parts.Output("mean")),
        "long_range": lambda: swept(tls.parts.LongRange(9, sinks=1), control="random", draws=1),
        "at": lambda: swept(tls.parts.Output("zero"), at=[length - 9]),
        "at early": lambda: swept(tls.parts.Output("zero"), at=[2]),
        "prices": lambda: tls.cache_prices(model, tokens, windows=[9], draws=1),
        "chosen": lambda: tls.cache_prices(model, tokens, windows=[9], draws=1, groups=False, chosen_on=apart),
        "heads inside": lambda: with_tables(model, tokens),
    }


def with_tables(model, tokens):
    with tls.ablate(model, "L0H1", tls.parts.LongRange(9)):
        return tls.detect_heads(model, prompts=tokens)


LONG = 300  # more than the 256 queries for which chance levels are computed at a time


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("llama", "evaluate long_range"), *zoo.also_slow(*((name, "") for name in ("llama", "gptj", "gemma2", "bloom")))],
)
def test_no_matrix_of_all_queries_and_keys_is_made(name, chosen):
    model = zoo.bridge(name, positions=512)
    wanted = chosen.split() or measurements(model, 23)
    for what in wanted:
        measurements(model, 23)[what]()  # what is checked once per model
    with strips_of(32):
        for what in wanted:
            with Squares(LONG) as squares:
                measurements(model, LONG)[what]()
            assert (what, squares.found) == (what, [])
    with Squares(LONG) as squares:
        measurements(model, LONG)["evaluate"]()
    assert squares.found  # the model's own attention makes some


@pytest.mark.parametrize(
    "what",
    ["evaluate", "long_range", "prices", *zoo.also_slow("ablate", "at", "mean", "chosen", "heads inside", "cut")],
)
def test_the_first_measurement_of_a_model_can_be_of_long_prompts(what):
    """A short pass shows once per model that it runs by strips; hooks of the measurement must not act in it."""
    model = zoo.bridge("llama")
    task = tls.Task(zoo.prompt(2, 41), next_token_loss, predict=slice(30, -1), higher_is_better=False)
    call = (lambda: tls.evaluate(model, task)) if what == "cut" else measurements(model, 41)[what]
    with strips_of(7):
        call()
        assert not whole_hooks(attention_view(model))
        assert why_whole(attention_view(model)) is None


def test_copies_that_join_at_later_layers_have_masks_of_their_own_rows():
    """Replays of several layers in one batch, of which the first layer computes some rows."""
    model, task = zoo.shared("bridge", "gemma2"), tls.tasks.language(zoo.prompt(3, 23))
    part = tls.parts.LongRange(3)
    whole = tls.ablation_sweep(model, part, task=task)
    with strips_of(5):
        found = tls.ablation_sweep(model, part, task=task)
    assert (found.attrs["strip"], whole.attrs.get("strip")) == (5, None)
    # Measured: 4e-7, smaller float32 products; effects are 1e-3 and more.
    assert found["delta"].to_numpy() == pytest.approx(whole["delta"].to_numpy(), abs=1e-5)
