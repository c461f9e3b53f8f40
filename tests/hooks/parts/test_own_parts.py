"""Parts of one's own of every kind (scores, mask, z), in contexts, sweeps, the screen and edges."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import ROUTES, SCORES, ablated, intact, logits, rows_are_ablated_runs, some_models
from edge_recomputation import edge_of, furthest, recomputed
from zoo import shared

import tlspectral as tls
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.parts import LongRange, Output, Part, QueryKeyPart
from tlspectral.models.reading import attention_view
from tlspectral.models.stream.writes import z_of

HEADS = [(0, 1), (1, 2)]


class Half(Part):
    """Half of what a head writes."""

    name = "half"
    acts_on = "z"

    def of(self, z, heads, run):
        return z / 2


@dataclass(frozen=True, eq=False, repr=False)
class Added(Part):
    """A vector on top of z, times the number of the head."""

    name = "added"
    acts_on = "z"
    vector: torch.Tensor

    def of(self, z, heads, run):
        assert z.shape[2] == len(heads)
        return z + self.vector * (1 + torch.tensor(heads)[:, None])


class Sink(Part):
    """Attention to the first token, but of that token itself."""

    name = "sink"
    acts_on = "mask"

    def beyond(self, visible, own):
        hidden = torch.zeros_like(visible)
        hidden[..., 1:, 0] = True
        return hidden


class Whole(Part):
    """The whole score, without a base class that knows of scores."""

    name = "whole"

    def of(self, scores, pairs):
        assert pairs is None
        return scores.whole()


def kind(**members):
    """A part of a class with these members."""
    return type("Own", (Part,), {"name": "own", **members})()


KINDS = {"z": Half(), "mask": Sink(), "scores": Whole()}
every_kind = pytest.mark.parametrize("acts_on", KINDS)


def task(**named):
    return tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1, **named)


def width(model):
    return attention_view(model).raw(0).w_o.shape[1]


def plain_z(model, changed, heads=HEADS, tokens=None):
    """Logits of a plain run in which z of some heads is `changed(z, head)`."""
    view = attention_view(model)

    def put(layer, z, hook):
        by_head = z_of(z, view.raw(layer).w_o).clone()
        for at, head in heads:
            if at == layer:
                by_head[:, :, head] = changed(by_head[:, :, head], head)
        return by_head.reshape(z.shape)

    hooks = [(view.hook_names(layer)["z"], functools.partial(put, layer)) for layer in {at for at, _ in heads}]
    with model.hooks(fwd_hooks=hooks):
        return logits(model, tokens)


# --- against plain hooks ---


@pytest.mark.parametrize(("backend", "name"), [*ROUTES, ("bridge", "bert"), ("bridge", "deepseek_v3")])
def test_a_z_of_ones_own_is_a_plain_hook_to_the_bit(backend, name):
    model, vector = shared(backend, name), torch.linspace(-1, 2, width(shared(backend, name)))
    for part, changed in (
        (Half(), lambda z, head: z / 2),
        (Added(vector), lambda z, head: z + vector * (1 + head)),
    ):
        found = ablated(model, HEADS, part)
        assert torch.equal(found, plain_z(model, changed))
        assert furthest(found, intact(backend, name)) > 1e-3
    assert torch.equal(logits(model), intact(backend, name))


@some_models
def test_at_a_position_z_of_ones_own_changes_there_alone(backend, name):
    model = shared(backend, name)

    def there(z, head):
        z = z.clone()
        z[0, 5], z[1, 7] = z[0, 5] / 2, z[1, 7] / 2
        return z

    part = Half().placed([5, 7])
    found = ablated(model, HEADS, part)
    assert torch.equal(found, plain_z(model, there))
    assert not torch.equal(found, ablated(model, HEADS, Half()))


def test_what_a_part_binds_acts_at_the_positions_of_the_part():
    """A part that its `on` makes anew knows of no position."""
    model = shared("bridge", "llama")
    for part in KINDS.values():
        binding = kind(acts_on=part.acts_on, on=lambda self, view, by_layer, part=part: dict.fromkeys(by_layer, part))
        found = ablated(model, HEADS, binding.placed([5, 7]))
        assert torch.equal(found, ablated(model, HEADS, part.placed([5, 7])))
        assert not torch.equal(found, ablated(model, HEADS, part))


@pytest.mark.parametrize(("backend", "name"), SCORES[::2])
def test_a_mask_of_ones_own_is_a_plain_hook_on_scores_to_the_bit(backend, name):
    model, view = shared(backend, name), attention_view(shared(backend, name))

    def hide(scores, hook):
        scores = scores.clone()
        scores[:, 1, 1:, 0] = torch.finfo(scores.dtype).min
        return scores

    with model.hooks(fwd_hooks=[(view.hook_names(0)["scores"], hide)]):
        expected = logits(model)
    found = ablated(model, [(0, 1)], Sink())
    assert torch.equal(found, expected)
    assert furthest(found, intact(backend, name)) > 1e-3


class Far(Part):
    """What `LongRange` hides, by other means."""

    name = "far"
    acts_on = "mask"

    def beyond(self, visible, own):
        at = torch.arange(visible.shape[-1])
        return visible & (at[:, None] - at >= 3)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("backend", "name"), ROUTES)
def test_a_mask_of_ones_own_is_the_packages_own(backend, name):
    model = shared(backend, name)
    for at in (None, 9, [9, 12]):
        found = ablated(model, HEADS, Far().placed(at))
        assert torch.equal(found, ablated(model, HEADS, LongRange(3, at=at)))
        assert not torch.equal(found, intact(backend, name))


def test_a_mask_of_ones_own_acts_on_an_encoder():
    model = shared("bridge", "bert")
    view, seen = attention_view(model), {}
    keep = (view.hook_names(0)["pattern"], lambda pattern, hook: seen.update(pattern=pattern.clone()))
    with model.hooks(fwd_hooks=[keep]):
        logits(model)
    before = seen["pattern"][:, 1].clone()
    with tls.ablate(model, [(0, 1)], Sink()), model.hooks(fwd_hooks=[keep]):
        logits(model)
    before[:, 1:, 0] = 0.0
    # float32 of two softmaxes: measured 1e-7; the key that is hidden has tenths of the attention.
    torch.testing.assert_close(seen["pattern"][:, 1], before / before.sum(-1, keepdim=True), atol=1e-6, rtol=0)


@pytest.mark.fast(2)
@some_models
def test_a_score_needs_no_other_base_class(backend, name):
    class OfPairs(QueryKeyPart):
        name = "whole"

        def of(self, scores, pairs):
            return scores.whole()

    model = shared(backend, name)
    assert torch.equal(ablated(model, HEADS, Whole()), ablated(model, HEADS, OfPairs()))
    matrices = [tls.scores(model, zoo.prompt(1), "L1H0", part) for part in (Whole(), OfPairs())]
    assert matrices[0].equals(matrices[1])
    tables = [
        tls.ablation_sweep(model, part, heads="L0", task=task(), control="random", draws=2)
        for part in (Whole(), OfPairs())
    ]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


# --- sweeps ---


@pytest.mark.fast(1)
@every_kind
@pytest.mark.parametrize(("backend", "name"), ROUTES[:3])
def test_rows_of_a_sweep_are_runs_without_the_part(acts_on, backend, name):
    model, part = shared(backend, name), KINDS[acts_on]
    table = tls.ablation_sweep(model, part, task=task())
    rows_are_ablated_runs(model, table, part, task())
    assert table["delta"].abs().max() > 1e-3
    assert table["score_rms"].isna().all() == (acts_on != "scores")
    at = tls.ablation_sweep(model, part, heads="L0", task=task(positions={"END": -1}), at=["END", 5])
    for called, place in (("END", zoo.PROMPT_LENGTH - 1), ("5", 5)):
        rows_are_ablated_runs(model, at[at["position"] == called], part.placed(place), task())


@pytest.mark.fast(1)
@pytest.mark.parametrize("part", [Half(), Sink(), Added(torch.ones(12))], ids=["half", "sink", "added"])
def test_the_control_of_a_mask_and_of_z_is_the_other_heads(part):
    model = shared("bridge", "llama")  # whose heads share keys
    table = tls.ablation_sweep(model, part, heads="L0", task=task(), control="random")
    assert table.attrs["draws"] == 3
    for row in table.itertuples():
        others = table.loc[table["head"] != row.head, "delta"]
        assert sorted(row.control_draws) == sorted(others)
    sets = tls.ablation_sweep(model, part, heads={"two": ["L0H1", "L1H2"]}, task=task(), control="random", draws=3)
    with tls.ablate(model, HEADS, part):
        without = tls.evaluate(model, task())
    # float32 of batches of other sizes: measured 1e-7; effects are 1e-2 and more.
    assert sets["value"].item() == pytest.approx(without.value, abs=1e-5)
    assert len(sets["control_draws"].item()) == 3


def test_the_estimates_of_a_screen_are_linear_in_z():
    model = shared("bridge", "llama")
    half, zero = (tls.ablation_sweep(model, part, task=task(), screen="gradient") for part in (Half(), Output("zero")))
    np.testing.assert_allclose(half["estimate"], zero["estimate"] / 2, rtol=1e-5, atol=1e-9)  # halves are exact
    assert zero["estimate"].abs().max() > 1e-3
    own, far = (tls.ablation_sweep(model, part, task=task(), screen="gradient") for part in (Far(), LongRange(3)))
    assert own["estimate"].equals(far["estimate"])


def test_parts_with_other_fields_have_other_files(tmp_path):
    model, ones = shared("bridge", "llama"), torch.ones(12)
    given = {"task": task(), "heads": [(0, 1)]}

    def delta(part, **folder):
        return tls.ablation_sweep(model, part, **given, **folder)["delta"].item()

    class Renamed(Sink):
        name = "added"

    for part in (Added(ones), Added(2 * ones), Renamed(), Added(ones.clone())):
        assert delta(part, folder=tmp_path) == delta(part)
    assert delta(Added(ones)) != delta(Added(2 * ones))
    assert len(list(tmp_path.glob("added-*.parquet"))) == 3  # the last one was read again


class OfPrompts(Added):
    """A vector for each prompt of a run, [prompts, d_head]."""

    def of(self, z, heads, run):
        assert len(z) == len(self.vector)
        return z + self.vector[:, None, None]

    def of_rows(self, rows):
        return replace(super().of_rows(rows), vector=self.vector[rows])


def test_a_part_that_keeps_something_for_each_prompt_is_told_of_batches(batch_size):
    model = shared("bridge", "llama")
    part = OfPrompts(torch.linspace(-2, 2, 5 * 12).reshape(5, 12))
    prompts = tls.Task(zoo.prompt(batch=5), lambda logits, *_: logits[:, -1, 3], predict=-1)
    table = tls.ablation_sweep(model, part, heads="L0", task=prompts)
    with tls.ablate(model, [(0, 2)], part):
        without = tls.evaluate(model, prompts)
    assert table.loc[2, "value"] == pytest.approx(without.value, abs=1e-5)
    batch_size(tokens=2 * zoo.PROMPT_LENGTH)
    batched = tls.ablation_sweep(model, part, heads="L0", task=prompts)
    assert batched.attrs["batch"] < table.attrs["batch"]
    # float32 of batches of other sizes: measured 1e-7; effects are 1e-2 and more.
    np.testing.assert_allclose(batched["delta"], table["delta"], atol=1e-5)
    assert table["delta"].abs().max() > 1e-2


# --- edges ---


@pytest.mark.fast(1)
@every_kind
@pytest.mark.parametrize(("backend", "name"), [("bridge", "gemma2"), ROUTES[1], ("bridge", "gptj")])
def test_an_edge_of_ones_own_part_is_the_plain_recomputation(acts_on, backend, name):
    model, part = shared(backend, name), KINDS[acts_on]
    senders, layer, head = edge_of(attention_view(model))
    found = ablated(model, senders, part, into=f"L{layer}H{head}.q")
    # float32, as in tests/hooks/edges/test_receiving.py: noise below 1e-6, edges above 1e-3.
    assert furthest(found, recomputed(model, senders, part, layer, head, "q")) < 1e-5
    assert furthest(found, intact(backend, name)) > 1e-3
    where = ablated(model, senders, part.placed(9), into=f"L{layer}H{head}.q")
    assert furthest(where, recomputed(model, senders, part.placed(9), layer, head, "q")) < 1e-5


# --- what is said of them ---


def test_hooks_say_what_they_replace():
    hooks = tls.ablation_hooks(shared("bridge", "llama"), "L0H3", Half())
    assert repr(hooks) == "blocks.0.attn.hook_z: L0H3, half replaced"
    assert repr(Added(1.0)) == "Added(vector=1.0)"


# --- what a part needs ---

LACKING = [
    (
        kind(),
        r"acts on 'scores' and has no of\(scores, pairs\): write this method, or beyond\(visible, own\) and acts_on",
    ),
    (kind(acts_on="mask", of=lambda self, z, heads, run: z), r"acts on 'mask' and has no beyond\(visible, own\)"),
    (kind(acts_on="z", beyond=lambda self, visible, own: own), r"acts on 'z' and has no of\(z, heads, run\)"),
    (kind(acts_on="z", of=lambda self, z: z), r"of\(\) of the part 'own' is a function of z, heads and run, .*found"),
    (kind(of=lambda self, z, heads, run: z), r"of\(\) of the part 'own' is a function of scores and pairs"),
    (
        kind(acts_on="mask", beyond=lambda self, own: own),
        r"beyond\(\) of .* is a function of visible and own",
    ),
    (
        kind(acts_on="z", of=lambda self, z, heads, run: z, control=lambda self, removal, which, seeds: 0),
        "acts on 'z': its control is the same part of other heads, so remove the method control",
    ),
    (
        kind(acts_on="z", of=lambda self, z, heads, run: z, control="scores"),
        "acts on 'z' and has control = 'scores': write control = 'heads'",
    ),
    (
        kind(of=lambda self, scores, pairs: scores.whole(), control=lambda self, removal: 0),
        r"control\(\) of the part 'own' is a function of removal, which and seeds",
    ),
]


@pytest.mark.parametrize(("part", "said"), LACKING)
def test_a_part_without_its_function_is_refused_before_the_model_runs(part, said):
    model = shared("bridge", "llama")
    for call in (lambda: tls.ablate(model, HEADS, part), lambda: tls.ablation_sweep(model, part)):
        with pytest.raises(TypeError, match=said):
            call()


def test_a_part_of_rotary_pairs_is_refused_where_there_are_none():
    part = kind(rotary=True, of=lambda self, scores, pairs: scores.phase())
    with pytest.raises(UnsupportedArchitecture, match="layer 0: no rotary positions, so there is no own to remove"):
        ablated(shared("bridge", "gptneo"), HEADS, part)
    assert furthest(ablated(shared("bridge", "llama"), HEADS, part), intact("bridge", "llama")) > 1e-3


def test_what_a_part_binds_needs_its_function_too():
    part = kind(acts_on="z", on=lambda self, view, by_layer: dict.fromkeys(by_layer, kind(acts_on="z")))
    said = r"Own, which on\(\) of the part 'own' returns, acts on 'z' and has no of\(z, heads, run\)"
    with pytest.raises(TypeError, match=said):
        ablated(shared("bridge", "llama"), HEADS, part)


RETURNED = {
    "numpy": (lambda z: z.numpy(), "of ndarray"),
    "one head": (lambda z: z[:, :, :1], r"found shape \(2, 24, 1, 12\)"),
    "whole numbers": (lambda z: z.long(), "of torch.int64"),
    "nothing": (lambda z: None, "found NoneType"),
    "inf": (lambda z: z / 0, "found NaN or infinity at position 0 of row 0, head 1"),
}


@pytest.mark.parametrize("case", RETURNED)
def test_anything_but_z_of_these_heads_is_refused(case):
    made, said = RETURNED[case]
    part, model = kind(acts_on="z", of=lambda self, z, heads, run: made(z)), shared("bridge", "llama")
    named = rf"of\(\) of the part 'own' must return the replacement for z, \[batch, pos, heads, d_head\].*{said}"
    for into in (None, "L1H0.q"):
        with pytest.raises(ValueError, match=named):
            ablated(model, [(0, 1), (0, 3)], part, into=into)


# --- a control of one's own ---


class Opposite(Whole):
    """A part of scores whose draws are the part itself with the other sign, and that writes into all it is given."""

    def control(self, removal, which, seeds):
        assert [len(seed) for seed in seeds] == [4] * len(which)
        drawn = -removal.difference[:, which]
        removal.difference.zero_()
        removal.scores.query.content.zero_()
        which.clear()
        return drawn


class Doubled(Part):
    """Twice the score: what `Opposite` draws."""

    name = "doubled"

    def of(self, scores, pairs):
        return -scores.whole()


def test_a_control_of_ones_own_is_what_replaces_the_part():
    model = shared("bridge", "llama")
    table = tls.ablation_sweep(model, Opposite(), heads="L0", task=task(), control="random", draws=2)
    doubled = tls.ablation_sweep(model, Doubled(), heads="L0", task=task())
    plain = tls.ablation_sweep(model, Whole(), heads="L0", task=task())
    # float32 of batches of other sizes: measured 1e-7; effects are 1e-3 and more.
    for row, expected in zip(table.itertuples(), doubled["delta"], strict=True):
        assert row.control_draws == pytest.approx([expected] * 2, abs=1e-5)
    np.testing.assert_allclose(table["delta"], plain["delta"], atol=1e-5)
    assert doubled["delta"].abs().max() > 1e-2


def test_a_control_of_another_shape_is_refused():
    class Short(Whole):
        def control(self, removal, which, seeds):
            return removal.difference[:, which[:1]]

    with pytest.raises(ValueError, match=r"control\(\) of the part 'whole' must return a change .*found shape"):
        tls.ablation_sweep(shared("bridge", "llama"), Short(), heads="L0", task=task(), control="random", draws=2)


def test_a_part_of_scores_may_be_compared_with_other_heads():
    class BesideHeads(Whole):
        control = "heads"

    table = tls.ablation_sweep(shared("bridge", "llama"), BesideHeads(), heads="L0", task=task(), control="random")
    for row in table.itertuples():
        assert sorted(row.control_draws) == sorted(table.loc[table["head"] != row.head, "delta"])
