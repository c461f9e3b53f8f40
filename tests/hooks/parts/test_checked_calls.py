"""Parts of one's own: what they are given is a copy, what they return is checked, and never written to."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import SCORES, ablated, intact, some_models
from gradient_checks import in_float64, loss_of, slopes
from zoo import shared

import tlspectral as tls
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.models.reading import attention_view

PARTS = tls.parts
HEADS = [(0, 1), (0, 2)]


class Own(PARTS.QueryKeyPart):
    """What a function makes of the scores; no dataclass."""

    name = "own"

    def __init__(self, made):
        self.made = made

    def of(self, scores, pairs):
        return self.made(scores)


@dataclass(frozen=True, eq=False, repr=False)
class Whole(PARTS.QueryKeyPart):
    """The whole score, as the docs have it."""

    name = "own"

    def of(self, scores, pairs):
        return scores.whole()


def later(scores):
    """A mask of the keys behind their query."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


class Kernel(Own):
    """A kernel of the token before, which is the same for all prompts."""

    def __init__(self, kept):
        self.kept, self.saved = kept, {}

    def of(self, scores, pairs):
        if not self.kept:
            self.saved = {}
        if scores.shape not in self.saved:
            self.saved[scores.shape] = (8 * torch.ones(scores.shape)).triu(-1).tril(-1)
        return self.saved[scores.shape]


# --- never written to ---


@pytest.mark.fast(1)
@some_models
def test_a_stored_tensor_is_the_same_in_every_pass(backend, name):
    model, stored = shared(backend, name), Kernel(kept=True)
    fresh = ablated(model, HEADS, Kernel(kept=False))
    with tls.ablate(model, HEADS, stored):
        passes = [zoo.logits(model) for _ in range(4)]
    assert not torch.equal(fresh, intact(backend, name))
    assert all(torch.equal(one, fresh) for one in passes)
    assert all(set(kept.unique().tolist()) == {0.0, 8.0} for kept in stored.saved.values())


@pytest.mark.fast(2)
@pytest.mark.parametrize("settings", [{}, {"control": "random", "draws": 2}, {"at": [-1, 5]}, {"screen": "gradient"}])
def test_a_sweep_with_a_stored_tensor_is_the_sweep_with_a_fresh_one(settings):
    model, task = shared("bridge", "llama"), tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1)
    tables = [tls.ablation_sweep(model, Kernel(kept), heads="L0", task=task, **settings) for kept in (True, False)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert tables[0]["delta"].abs().max() > 0.01


def test_an_expanded_tensor_is_a_part():
    model = shared("bridge", "llama")

    def overlapping(scores):  # one number of memory for many entries
        return torch.arange(2.0 * scores.shape[-1]).as_strided(scores.shape, (0, 0, 1, 1))

    dense = ablated(model, HEADS, Own(lambda scores: overlapping(scores).clone()))
    assert torch.equal(ablated(model, HEADS, Own(overlapping)), dense)
    assert not torch.equal(dense, intact("bridge", "llama"))


def test_what_change_and_alter_return_stays_as_it_is():
    model, view = shared("bridge", "llama"), attention_view(shared("bridge", "llama"))
    stored = {}

    class Changing(Own):
        def change(self, scores, allowed):
            return stored.setdefault("change", torch.ones(scores.shape)), allowed

    ablated(model, HEADS, Changing(None))
    ablation = LayerAblation(
        view, view.layer(0), [1, 2], Whole(), alter=lambda removal: stored.setdefault("alter", removal.difference + 1)
    )
    with view.hooks_on(ablation.hooks()):
        zoo.logits(model)
        first = stored["alter"].clone()
        zoo.logits(model)
    assert torch.equal(stored["change"], torch.ones_like(stored["change"]))
    assert torch.equal(stored["alter"], first)
    assert bool(first[..., 0, 1].any())  # a masked pair


# --- what it is given is a copy ---


def writing(scores):
    """Write into all that the scores hold."""
    whole = scores.whole()
    for one in (scores.query, scores.key):
        one.whole.zero_()
        one.content.zero_()
        if one.rotation is not None:
            one.rotation.cos.zero_()
    scores.heads.clear()
    return whole


@pytest.mark.parametrize(("backend", "name"), [*SCORES, ("bridge", "gptj")])
def test_a_part_that_writes_into_the_scores_changes_no_number(backend, name):
    """With a softcap (gemma2) scores are read again behind the part, and so are queries by the control."""
    model = shared(backend, name)
    assert torch.equal(ablated(model, HEADS, Own(writing)), ablated(model, HEADS, Whole()))
    assert torch.equal(zoo.logits(model), intact(backend, name))


def test_a_sweep_and_scores_of_a_part_that_writes_are_those_of_one_that_does_not():
    model, task = shared("bridge", "llama"), tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1)
    tables = [
        tls.ablation_sweep(model, part, heads="L0", task=task, control="random", draws=2)
        for part in (Own(writing), Whole())
    ]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    matrices = [tls.scores(model, zoo.prompt(1), "L1H0", part) for part in (Own(writing), Whole())]
    assert matrices[0].equals(matrices[1])


def test_on_gets_heads_of_its_own():
    model = shared("bridge", "llama")

    class Clearing(Whole):
        def on(self, view, by_layer):
            bound = dict.fromkeys(by_layer, self)
            for heads in by_layer.values():
                heads.clear()
            by_layer.clear()
            return bound

    assert torch.equal(ablated(model, HEADS, Clearing()), ablated(model, HEADS, Whole()))


# --- what it returns is checked ---

RETURNED = {
    "another batch": (lambda scores: scores.whole()[0], r"found shape \(2, 24, 24\)"),
    "one key": (lambda scores: scores.whole()[..., :1], r"found shape \(2, 2, 24, 1\)"),
    "one head": (lambda scores: scores.whole()[:, :1], r"found shape \(2, 1, 24, 24\)"),
    "a matrix": (lambda scores: scores.whole()[0, 0], r"found shape \(24, 24\)"),
    "a number": (lambda scores: torch.tensor(1.0), r"found shape \(\)"),
    "numpy": (lambda scores: scores.whole().numpy(), "of ndarray"),
    "a list": (lambda scores: [scores.whole()], "found list"),
    "nothing": (lambda scores: None, "found NoneType"),
    "whole numbers": (lambda scores: scores.whole().int(), "of torch.int32"),
    "a mask": (lambda scores: scores.whole() > 0, "of torch.bool"),
    "complex": (lambda scores: scores.whole() + 0j, "of torch.complex64"),
    "no data": (lambda scores: scores.whole().to("meta"), "on meta"),
    "nan": (
        lambda scores: scores.whole() * np.nan,
        "finite wherever the key is not masked; found nan for query 0 and key 0 of row 0, head 1",
    ),
    "masked nan": (lambda scores: scores.whole().masked_fill(later(scores), np.nan), "found nan for query 0 and key 1"),
    "seen inf": (
        lambda scores: scores.whole().masked_fill(~later(scores), -np.inf),
        "found -inf for query 0 and key 0",
    ),
}


@pytest.mark.parametrize("case", RETURNED)
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_anything_but_scores_of_these_heads_is_refused(case, name):
    made, said = RETURNED[case]
    with pytest.raises(ValueError, match=rf"of\(\) of the part 'own' must return .*\[batch, heads, pos, pos\].*{said}"):
        ablated(shared("bridge", name), HEADS, Own(made))
    assert torch.equal(zoo.logits(shared("bridge", name)), intact("bridge", name))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj"])
def test_infinite_numbers_at_masked_pairs_are_ignored(name):
    model = shared("bridge", name)
    masked = Own(lambda scores: scores.whole().masked_fill(later(scores), -torch.inf))
    assert torch.equal(ablated(model, HEADS, masked), ablated(model, HEADS, Whole()))


def test_their_size_counts_no_masked_pair():
    model, task = shared("bridge", "llama"), tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1)
    masked = Own(lambda scores: scores.whole().masked_fill(later(scores), torch.inf))
    tables = [tls.ablation_sweep(model, part, heads="L0", task=task) for part in (masked, Whole())]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floating_point_parts_are_converted(dtype):
    model = shared("bridge", "llama")
    rounded = ablated(model, HEADS, Own(lambda scores: scores.whole().to(dtype).float()))
    assert torch.equal(ablated(model, HEADS, Own(lambda scores: scores.whole().to(dtype))), rounded)


def test_a_part_that_is_not_finite_is_refused_with_gradients_too():
    part = Own(lambda scores: scores.whole() * torch.tensor(np.nan, requires_grad=True))
    model = shared("bridge", "llama")
    with pytest.raises(ValueError, match="found nan for query 0"), torch.enable_grad(), tls.ablate(model, HEADS, part):
        loss_of(model)


def test_gradients_go_through_a_part_of_ones_own():
    model = in_float64("bridge", "llama")
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def loss():
        with tls.ablate(model, HEADS, Own(lambda scores: scale * scores.whole())):
            return loss_of(model)

    gain = model.blocks[0].attn.q.original_component.weight
    for leaf in (scale, gain):
        (gradient,) = torch.autograd.grad(loss(), leaf)
        found, expected = slopes(loss, leaf.detach(), gradient)
        # Measured off by at most 1e-3 (norms and softmaxes in float32); a path that is cut off costs tens of per cent.
        assert found == pytest.approx(expected, rel=5e-3, abs=1e-3)
        assert abs(found) > 0.1


def test_a_changed_pair_is_one_that_the_model_does_not_mask():
    model = shared("bridge", "llama")

    class Changing(Own):
        def change(self, scores, allowed):
            return self.made(scores), torch.ones_like(allowed)

    assert torch.equal(ablated(model, HEADS, Changing(lambda scores: -scores.whole())), ablated(model, HEADS, Whole()))
    with pytest.raises(ValueError, match=r"change\(\) of the part 'own' must return .*found shape \(2, 24, 24\)"):
        ablated(model, HEADS, Changing(lambda scores: -scores.whole()[0]))


# --- masks, outputs, and what a part binds ---

WINDOW = PARTS.LongRange(3)


class Beyond(PARTS.LongRange):
    """What a function hides."""

    def __init__(self, made):
        super().__init__(3)
        object.__setattr__(self, "made", made)

    def beyond(self, visible, own):
        return self.made(visible, own)


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_mask_of_ones_own_gets_copies_and_is_checked(name):
    model = shared("bridge", name)

    def emptying(visible, own):
        hidden = WINDOW.beyond(visible, own)
        visible.zero_()
        own.zero_()
        return hidden

    right = ablated(model, HEADS, WINDOW)
    for made in (WINDOW.beyond, emptying, lambda visible, own: WINDOW.beyond(visible, own) | ~visible):
        assert torch.equal(ablated(model, HEADS, Beyond(made)), right)
    for made, said in (
        (lambda visible, own: WINDOW.beyond(visible, own).float(), "True and False"),
        (lambda visible, own: WINDOW.beyond(visible, own)[..., :1], "found shape"),
        (lambda visible, own: None, "found NoneType"),
        (lambda visible, own: visible, "leave each query a key; query 0 sees none"),
    ):
        with pytest.raises(ValueError, match=rf"beyond\(\) of the part 'long_range' must return .*{said}"):
            ablated(model, HEADS, Beyond(made))


class Put(PARTS.Part):
    """What a function puts in the place of z."""

    name = "put"
    acts_on = "z"

    def __init__(self, made):
        self.made = made

    def of(self, z, heads, run):
        return self.made(z)


class Putting(PARTS.Part):
    """A part that binds another one of its kind."""

    name = "putting"
    acts_on = "z"

    def __init__(self, made):
        self.made = made

    def on(self, view, by_layer):
        return dict.fromkeys(by_layer, Put(self.made))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Put, Putting])
def test_a_z_of_ones_own_gets_copies_and_is_checked(kind):
    model = shared("bridge", "llama")
    task = tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1)
    right = ablated(model, HEADS, "output")
    screened = tls.ablation_sweep(model, "output", task=task, screen="gradient")["estimate"]
    for made in (torch.zeros_like, torch.zero_, lambda z: 0 * z.double(), lambda z: torch.zeros(()).expand(z.shape)):
        assert torch.equal(ablated(model, HEADS, kind(made)), right)
        found = tls.ablation_sweep(model, kind(made), task=task, screen="gradient")["estimate"]
        pd.testing.assert_series_equal(found, screened, check_exact=True)
    for made, said in (
        (lambda z: z[:1], r"found shape \(1, 24, 2,"),
        (lambda z: z[..., :1], r"found shape \(2, 24, 2, 1\)"),
        (lambda z: z * np.nan, "found NaN or infinity at position 0 of row 0, head 1"),
    ):
        with pytest.raises(ValueError, match=rf"of\(\) of the part 'put' must return the replacement for z.*{said}"):
            ablated(model, HEADS, kind(made))


class Bound(PARTS.Part):
    """A part that binds whatever it is given."""

    name = "bound"

    def __init__(self, found):
        self.found = found

    def on(self, view, by_layer):
        return self.found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "found NoneType"),
        ({7: Whole()}, r"from \[0\]; found 7"),
        ({0: 3}, "found int for layer 0"),
        ({0: WINDOW}, "each with acts_on = 'scores'; found LongRange for layer 0"),
        ({0: PARTS.Output()}, "found Output for layer 0"),
    ],
)
def test_what_a_part_binds_is_checked(found, said):
    with pytest.raises(ValueError, match=rf"on\(\) of the part 'bound' must return .*{said}"):
        ablated(shared("bridge", "llama"), HEADS, Bound(found))


class FirstLayer(Whole):
    """The whole score of the first layer alone."""

    def on(self, view, by_layer):
        return {layer: self for layer in by_layer if layer == 0}


def test_a_sweep_of_a_layer_where_nothing_is_removed_is_refused():
    task = tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1)
    for settings in ({}, {"screen": "gradient"}):
        with pytest.raises(ValueError, match=r"removes nothing in layer 1 .*: leave the heads of this layer out"):
            tls.ablation_sweep(shared("bridge", "llama"), FirstLayer(), task=task, **settings)


# --- what a part has to have, before anything runs ---


class Nameless(Own):
    name = ""


class Alone(Own):
    def of(self, scores):
        return scores.whole()


class Elsewhere(Own):
    acts_on = "weights"


class Controlled(Own):
    control = "none"


class Set(Own):
    settings = 3


class NoSettings(PARTS.Output):
    def on(self, view):
        return {}


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        (Nameless(None), TypeError, "the part Nameless has the name ''"),
        (
            Alone(None),
            TypeError,
            r"of\(\) of the part 'own' is a function of scores and pairs, .*found \w+\.of\(scores\)",
        ),
        (
            Elsewhere(None),
            ValueError,
            "the part 'own' has acts_on = 'weights': write acts_on = 'scores', 'mask' or 'z'",
        ),
        (
            Controlled(None),
            TypeError,
            r"has control = 'none': .*'heads' .*, or a method control\(removal, which, seeds\)",
        ),
        (Set(None), TypeError, "the part 'own': settings must be a property that returns a dictionary; found int"),
        (NoSettings(), TypeError, r"on\(\) of the part 'output' is a function of view and by_layer"),
    ],
)
def test_a_part_of_another_form_is_refused_before_the_model_runs(part, error, said):
    model = shared("bridge", "llama")
    for call in (
        lambda: tls.ablate(model, HEADS, part),
        lambda: tls.ablation_hooks(model, HEADS, part),
        lambda: tls.ablation_sweep(model, part),
        lambda: tls.scores(model, zoo.prompt(1), "L0H1", part),
    ):
        with pytest.raises(error, match=said):
            call()


def test_a_class_without_a_name_is_refused():
    class WithoutName(PARTS.QueryKeyPart):
        def of(self, scores, pairs):
            return scores.whole()

    with pytest.raises(TypeError, match=r"the part WithoutName has the name None: write"):
        tls.ablate(shared("bridge", "llama"), HEADS, WithoutName())


def test_a_plain_class_is_removed_at_positions_as_a_dataclass_is():
    model = shared("bridge", "llama")
    task = tls.Task(zoo.prompt(), lambda logits, *_: logits[:, -1, 3], predict=-1, positions={"END": -1})
    tables = [
        tls.ablation_sweep(model, part, heads="L0", task=task, at=["END", 5])
        for part in (Own(lambda scores: scores.whole()), Whole())
    ]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert tables[0]["delta"].abs().max() > 0
