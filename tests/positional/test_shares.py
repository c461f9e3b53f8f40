"""Content, position and their interaction: shares of a head's logits, and what is left when `ablate` removes one."""

import pytest
import torch
from ablation_runs import (
    ROUTES,
    ablated,
    block_parts,
    intact,
    logits,
    one_of_each,
    recorded,
    rows_are_ablated_runs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from positional_measurements import EQUAL_BLOCKS, PLACES, block_prompt, cut_prompt, hidden, tiny
from positional_recomputation import components, tables_of
from zoo import shared

import tlspectral as tls
from tlspectral.hooks.parts import Content, Interaction
from tlspectral.hooks.sweeps.layer_effects import LayerReplays, layer_effects
from tlspectral.models.reading import attention_view
from tlspectral.models.running.partial_runs import IntactRun
from tlspectral.positional import exclusion_split, logit_shares
from tlspectral.positional.shares import split_logits
from tlspectral.tasks.block_places import BlockPlaces
from tlspectral.tasks.task_sequences import intact_values, task_sequences

PROMPT = EQUAL_BLOCKS


# --- the split of a table ---


@settings(max_examples=30, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_squares_add_up_and_an_additive_head_has_its_index_as_position(seed, n):
    rng = torch.Generator().manual_seed(seed)
    table = torch.randn(2, n, n, generator=rng, dtype=torch.float64)
    split = split_logits(table)
    about_mean = table - table.mean((-2, -1), keepdim=True)
    # Sums of squares of size 10: measured 1e-14.
    torch.testing.assert_close(split.total, about_mean.square().sum((-2, -1)), rtol=0, atol=1e-11)
    torch.testing.assert_close(split.shares().sum(0), torch.ones(2).double(), rtol=0, atol=1e-12)
    for part, each in zip(block_parts, split, strict=True):
        torch.testing.assert_close(each, components(table)[part].square().sum((-2, -1)), rtol=0, atol=1e-11)
    torch.testing.assert_close(split_logits(table.mT), type(split)(split[1], split[0], split[2]), rtol=0, atol=1e-11)
    additive = table[:, :, :1] + table[:, :1, :]
    split = split_logits(additive)
    assert float(split.interaction.max()) < 1e-25
    torch.testing.assert_close(split.shares()[1], exclusion_split(additive).index, rtol=0, atol=1e-9)


# --- shares of models ---


def test_some_heads_and_windows():
    model = shared("bridge", "llama")
    whole = logit_shares(model, PROMPT)
    some = logit_shares(model, PROMPT, "L1H2")
    assert some.iloc[0].tolist() == whole.query("layer == 1 and head == 2").iloc[0].tolist()
    assert hidden(shared("bridge", "mistral"), 0)
    with pytest.raises(ValueError, match="no heads were given"):
        logit_shares(model, PROMPT, [])
    with pytest.raises(ValueError, match="blocks have 2 to 3 tokens"):
        logit_shares(model, block_prompt((3, 2, 3)))


# --- removal ---


def test_only_keys_in_blocks_and_queries_behind_them_are_edited():
    model, tokens = shared("bridge", "llama"), PROMPT.tokens()[None]
    before = recorded(model, ("scores",), tokens, [1])[1, "scores"]
    with tls.ablate(model, [(1, 2)], Content(PROMPT)):
        after = recorded(model, ("scores",), tokens, [1])[1, "scores"]
    changed = (before != after)[0]
    assert not changed[[0, 1, 3]].any()
    inside = torch.zeros(18, 18, dtype=torch.bool)
    inside[15:, PLACES.tokens().flatten()] = True
    assert torch.equal(changed[2], inside)


def test_a_part_that_is_zero_keeps_the_scores_to_the_bit():
    tokens = PROMPT.tokens()[None]
    for part in ("position", "interaction"):
        model = shared("bridge", "gpt2")  # no rotary positions: all is content
        edited = ablated(model, [(0, 1), (1, 2)], one_of_each(PROMPT)[part], tokens)
        assert torch.equal(edited, logits(model, tokens))
    model = shared("bridge", "llama")
    assert torch.equal(ablated(model, [], Content(PROMPT)), intact("bridge", "llama"))


def test_longer_runs_and_other_suffixes_of_the_prompt():
    """Generated tokens are queries behind the blocks, and a suffix is no block."""
    model = shared("bridge", "llama")
    longer = torch.cat([PROMPT.tokens()[:15], torch.tensor([7, 5, 6, 9, 4])])[None]
    plain = recorded(model, ("scores",), longer, [1])[1, "scores"]
    with tls.ablate(model, [(1, 2)], Content(PROMPT)):
        edited = recorded(model, ("scores",), longer, [1])[1, "scores"]
        assert (edited != plain).any(-1)[0, 2].nonzero().flatten().tolist() == [15, 16, 17, 18, 19]
        with pytest.raises(ValueError, match="this run has 15 tokens and the blocks fill the first 15"):
            logits(model, longer[:, :15])


START = (
    "row 0 has token 2 at position 0, and .* has token {first} there .the prompt begins 1 token later.: .*"
    " start token in front"
)
OTHERS = {  # which rows are wrong, and what is said
    "a start token": (lambda own: torch.cat([torch.full_like(own[:, :1], 2), own], 1), START),
    "another block": (lambda own: own.index_fill(1, torch.tensor([7]), 2), "row 0 has token 2 at position 7"),
    "one row": (lambda own: torch.cat([own, own.flip(1)]), "row 2 has token .* at position 0"),
    "padding in front": (
        lambda own: torch.cat([torch.full((2, 2), 2), own], 1),
        "the prompt begins 2 tokens later.* pad at the end",
    ),
    "swapped blocks": (lambda own: PROMPT.swapped(0, 1).tokens()[None], "at position 3"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize(("backend", "name"), ROUTES[:3])  # the window of GPT-Neo hides blocks
def test_a_run_of_other_tokens_is_refused(case, backend, name):
    model, own = shared(backend, name), PROMPT.tokens().expand(2, -1)
    tokens, said = OTHERS[case][0](own), OTHERS[case][1].format(first=int(own[0, 0]))
    if backend == "hooked":  # which shows embeddings alone
        said = said.replace("token 2", "another token").replace("token .* at", "another token at")
    with tls.ablate(model, [(1, 2)], Content(PROMPT)):
        with pytest.raises(ValueError, match=said):
            logits(model, tokens)
        logits(model, own)
    hooks = tls.ablation_hooks(model, [(0, 1)], Interaction(PROMPT), into="L1H0.q")
    with pytest.raises(ValueError, match=said), torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    # The last token differs, so that each prompt is an observation.
    tokens = torch.cat([tokens, torch.arange(3, 3 + len(tokens))[:, None]], 1)
    task = tls.Task(tokens, lambda scores, tokens, mask: scores[:, -1, 7], predict=-1)
    said = said.replace("row", "prompt", 1).replace("another token", "token .*")
    with pytest.raises(ValueError, match=said):
        tls.ablation_sweep(model, Content(PROMPT), heads="L1H2", task=task)


def test_a_batch_padded_behind_and_positions_are_those_of_the_prompt():
    model, own = shared("bridge", "llama"), PROMPT.tokens()
    alone = ablated(model, [(1, 2)], Content(PROMPT), own[None])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 18:] = 0
    wide = torch.cat([own.expand(2, -1), torch.tensor([[2, 2], [5, 6]])], 1)
    with tls.ablate(model, [(1, 2)], Content(PROMPT)), torch.no_grad():
        # Measured 1e-6: the logits are of size 10.
        torch.testing.assert_close(model(wide, attention_mask=mask)[:1, :18], alone, rtol=0, atol=2e-5)
    with tls.ablate(model, [(1, 2)], Content(PROMPT, at=17)), pytest.raises(ValueError, match="1 token later"):
        logits(model, torch.cat([torch.tensor([2]), own])[None])


def test_a_run_that_begins_behind_the_embedding_is_refused():
    model, own = shared("bridge", "llama"), PROMPT.tokens()[None]
    embeddings = model.W_E[own].detach()
    with tls.ablate(model, [(1, 2)], Content(PROMPT)), torch.no_grad():
        logits(model, own)
        with pytest.raises(ValueError, match=r"content: this run began after the embedding .* on token ids"):
            model.original_model(inputs_embeds=embeddings)


def test_one_part_of_several_prompts():
    model, other = shared("bridge", "llama"), PROMPT.swapped(0, 2)
    both = torch.stack([PROMPT.tokens(), other.tokens()])
    found = ablated(model, [(1, 2)], Content([PROMPT, other]), both)
    for row, prompt in enumerate((PROMPT, other)):
        alone = ablated(model, [(1, 2)], Content(prompt), both[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], alone, rtol=0, atol=2e-5)  # as above
    with pytest.raises(
        ValueError, match=r"prompt 1 begin at positions \[2, .* prompt 0 at \[3, .*: make a part of its own"
    ):
        tls.ablation_hooks(model, [(1, 2)], Content([PROMPT, cut_prompt(PROMPT.tokens(), [2, 3, 3, 3, 3, 4])]))


def test_padding_in_front_is_refused():
    model, tokens = shared("bridge", "llama"), PROMPT.tokens()[None].repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[1, 0] = 0
    with (
        tls.ablate(model, [(1, 2)], Content(PROMPT)),
        pytest.raises(ValueError, match="pad rows at their end"),
        torch.no_grad(),
    ):
        model(tokens, attention_mask=mask)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Interaction(block_prompt((3, 4, 3))), "blocks have 3 to 4 tokens"),
        (Content(PROMPT.tokens()), "a Tensor of shape .* is not a BlockPrompt"),
        (Content([]), "an empty list is not a BlockPrompt"),
    ],
)
def test_prompts_without_equal_blocks_are_refused(part, message):
    model = shared("bridge", "llama")
    with pytest.raises(ValueError, match=message), tls.ablate(model, [(0, 0)], part):
        pytest.fail("entered")
    with pytest.raises(ValueError, match=message):
        tls.ablation_sweep(model, part, task=blocks_task(model))


def test_an_edge_loses_the_part_only_in_what_its_receiver_reads():
    model, tokens = tiny("tiny-rope"), PROMPT.tokens()[None] % 32
    before = recorded(model, ("pattern", "query"), tokens)
    with tls.ablate(model, "L0H3", Content(cut_prompt(tokens[0], 6 * [3])), into="L1H0.q"):
        after = recorded(model, ("pattern", "query"), tokens)
    assert torch.equal(before[0, "pattern"], after[0, "pattern"])
    changed = (before[1, "query"] != after[1, "query"])[0].any(-1)  # pos heads
    assert changed[15:, 0].all()
    assert not changed[:15].any()
    assert not changed[:, 1:].any()


# --- the sweep and its control ---


def blocks_task(model, n=6):
    """Prompts with the same prefix and blocks, and other suffixes."""
    prompts = torch.stack([PROMPT.tokens() % attention_view(model).d_vocab for _ in range(n)])
    prompts[:, 15:] = torch.randint(3, 30, (n, 3), generator=torch.Generator().manual_seed(0))

    def metric(scores, tokens, mask):
        return scores[:, -1].log_softmax(-1)[:, 7]

    return tls.Task(prompts, metric, predict=-1, name="blocks")


@pytest.mark.parametrize("part", block_parts)
def test_a_sweep_is_whole_passes_under_ablate(part):
    model = shared("bridge", "llama")
    task = blocks_task(model)
    options = {"heads": ["L0H1", "L1H2"], "task": task}
    part = one_of_each(PROMPT)[part]
    sweep = tls.ablation_sweep(model, part, control="random", **options)
    assert (sweep["score_rms"] > 0).all()
    rows_are_ablated_runs(model, sweep, part, task)
    assert sweep.attrs["block_starts"] == [3, 6, 9, 12]
    assert sweep["control_delta"].abs().min() > 1e-6
    with pytest.raises(ValueError, match="a part without blocks"):
        tls.ablation_sweep(model, part, screen="gradient", **options)


def test_a_control_takes_the_same_numbers_from_other_blocks():
    rng = torch.Generator().manual_seed(0)
    difference = torch.randn(2, 3, 18, 18, generator=rng)
    moved = PLACES.shuffled(difference, [[0, 1], [0, 2], [0, 1]])
    at = PLACES.tokens()
    for job in range(3):
        before, after = (x[:, job][..., at] for x in (difference, moved))  # batch queries blocks width
        same = (before[:, :, :, None] == after[:, :, None]).all(-1).all(0).all(0)  # old block, new block
        assert same.sum(0).tolist() == same.sum(1).tolist() == [1] * 4
        assert not same.diagonal().any()  # no block keeps its own
    assert torch.equal(moved[:, 0], PLACES.shuffled(difference[:, :1], [[0, 1]])[:, 0])
    outside = torch.ones(18, dtype=torch.bool)
    outside[at.flatten()] = False
    assert torch.equal(moved[..., outside], difference[..., outside])


@pytest.mark.parametrize(("n_blocks", "cycles"), [(3, 2), (4, 6), (6, 120)])
def test_draws_of_few_blocks_differ(n_blocks, cycles):
    places = BlockPlaces(tuple(range(0, 2 * n_blocks, 2)), 2, ())
    assert places.cycles == cycles
    difference = torch.randn(1, 1, 2 * n_blocks, 2 * n_blocks, generator=torch.Generator().manual_seed(0))
    drawn = [places.shuffled(difference, [[5, 1, 2, draw]]) for draw in range(cycles)]
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == cycles
    assert not any(torch.equal(one, difference) for one in drawn)


def test_a_control_of_three_blocks_is_two_draws_whose_p_says_so():
    model = shared("bridge", "llama")
    blocks = [torch.tensor([start, start + 1]) for start in (10, 20, 30)]
    prompt = tls.positional.BlockPrompt(torch.tensor([1, 2, 3]), blocks, torch.tensor([30, 31]))
    tokens = prompt.tokenized(model).tokens()
    task = tls.Task(tokens[None], lambda logits, ids, mask: logits[:, -1, 7], predict=-1)
    with pytest.warns(UserWarning, match="3 blocks have only 2 such cycles, .*control_p cannot be below 1 / 3"):
        sweep = tls.ablation_sweep(model, Content(prompt), heads=["L1H2"], task=task, control="random", draws=19)
    assert len(set(sweep["control_draws"].iloc[0])) == 2
    assert sweep["control_p_floor"].tolist() == [1 / 3]


@pytest.mark.slow
def test_the_size_of_what_is_removed_is_that_over_the_blocks():
    model = shared("bridge", "llama")
    view, task = attention_view(model), blocks_task(shared("bridge", "llama"), 2)
    sequences = task_sequences(view, task)
    run, _ = intact_values(view, sequences, [1])
    assert isinstance(run, IntactRun)
    part = Content(PROMPT).on(view, {1: [2]})[1]
    (effects,) = layer_effects(run, sequences, [LayerReplays(view, sequences, 1, [2], part)])
    squares = []
    for tokens in task.prompts:
        for query in range(PLACES.stop, 18):
            table, _, _ = tables_of(model, 1, tokens[: query + 1])
            squares.append(components(table)["content"].diagonal(dim1=-2, dim2=-1)[2].square().mean())
    assert effects.score_rms[0] == pytest.approx(float(torch.stack(squares).mean().sqrt()), rel=1e-5)
