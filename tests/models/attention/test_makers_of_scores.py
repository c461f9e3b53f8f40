"""The three makers of `HeadScores` give one result: from the stream, from a run, and from some rows of one head."""

import pytest
import torch
import zoo
from spectral_zoo import move

import tlspectral as tls
from tlspectral.algebra.rotary import in_float64
from tlspectral.models.attention.head_scores import HeadScores, rotation_tables
from tlspectral.models.attention.score_side import Rotation
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until
from tlspectral.models.stream.writes import layer_reads

LAYER, HEADS = 1, [2, 0, 3]
# Both in float64: measured at most 6e-16 of the largest score. Another bias, gain or key/value head moves it by tenths.
ROUNDING = 1e-12
# Norms of queries and keys (of a head, over heads), ALiBi, a softcap, biases, keys that heads share, spectral rows.
KINDS = ["llama", *zoo.also_slow("gpt2", "bloom", "gemma3", "phi"), "qwen3", "olmo2", "spectral"]


class Layer:
    """One layer of a model with the stream of a run, and the queries and keys that float64 reads from this stream."""

    def __init__(self, name):
        # Grouped keys, and a geometry of its own for each head.
        model = move(tls.to_spectral(zoo.bridge("llama"))) if name == "spectral" else zoo.shared("bridge", name)
        view = attention_view(model)
        names, tokens = view.hook_names(LAYER), zoo.prompt()
        captured = capture_until(view, tokens, names.values(), last=names["pattern"])
        self.view, self.captured, self.names = view, captured, names
        self.raw, self.layer = view.raw(LAYER), view.layer(LAYER)
        self.residual = captured[names["residual"]].double()
        self.tables = rotation_tables(view, self.raw.rotary, LAYER, tokens.shape[1], captured)
        self.rotation = None if self.tables is None else Rotation(self.layer.rotary, *self.tables).of_heads(HEADS)

    def read(self, what):
        (reads,) = layer_reads(self.raw, what, in_float64)
        return reads.from_stream(self.residual).detach()

    def of_stream(self):
        return HeadScores.of_stream(self.layer, self.residual, self.tables)

    def of_run(self, query, key, layer=None):
        return HeadScores.of_run(self.layer if layer is None else layer, HEADS, query, key, self.rotation)


def matrices(scores, heads=slice(None)):
    """Everything that a `HeadScores` says of some heads."""
    kinds = ("whole", "inside", "own", "even", "symmetric", "antisymmetric")
    found = {kind: getattr(scores, kind)()[:, heads].detach() for kind in kinds}
    return found if scores.key.rotation is None else found | {"phase": scores.phase()[:, heads].detach()}


def assert_close(found, expected, share):
    assert found.keys() == expected.keys()
    for name, matrix in expected.items():
        assert float(matrix.abs().max()) > 0.1, name
        torch.testing.assert_close(
            found[name].double(), matrix, rtol=0, atol=share * float(expected["whole"].abs().max())
        )


@pytest.mark.parametrize("name", KINDS)
def test_scores_of_a_run_are_those_of_its_stream(name):
    case = Layer(name)
    query, key = case.read("q"), case.read("k")
    run, expected = matrices(case.of_run(query, key)), matrices(case.of_stream(), HEADS)
    assert_close(run, expected, ROUNDING)
    # Some models hand on one key for each query head.
    groups = case.layer.n_heads // case.layer.n_kv_heads
    repeated = key.repeat_interleave(groups, dim=2)
    for kind, matrix in matrices(case.of_run(query, repeated)).items():
        if case.layer.k_norm is None or not case.layer.k_norm.over_heads:
            assert torch.equal(matrix, run[kind]), kind
        else:
            torch.testing.assert_close(matrix, run[kind], rtol=0, atol=ROUNDING * float(run[kind].abs().max()))


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_one_head_are_rows_of_the_run(name):
    case = Layer(name)
    query, key = case.read("q"), case.read("k")
    run, n_positions = case.of_run(query, key), query.shape[1]
    every = torch.arange(n_positions).expand(len(query), -1)
    some = torch.stack([torch.tensor([5, 1, 9]) + sequence for sequence in range(len(query))])
    for place, head in enumerate(HEADS):
        biases = case.layer.b_q[[head]], case.layer.b_k[[case.layer.kv_head(head)]]
        of_head = HeadScores.of_rows(case.raw, head, query, key, case.tables, every, biases=biases)
        expected = matrices(run, [place])
        for kind, matrix in matrices(of_head).items():
            assert torch.equal(matrix, expected[kind]), (head, kind)
        asked = query.gather(1, some[..., None, None].expand(-1, -1, *query.shape[2:]))
        rows = HeadScores.of_rows(case.raw, head, asked, key, case.tables, some)
        for kind in ("whole", "own"):
            whole = expected[kind][:, 0].gather(1, some[..., None].expand(-1, -1, n_positions))
            # A product of fewer rows sums in another order.
            torch.testing.assert_close(
                getattr(rows, kind)()[:, 0], whole, rtol=0, atol=ROUNDING * float(whole.abs().max())
            )
        # Without biases told apart, M acts on all of it.
        assert torch.equal(rows.inside(), rows.whole())


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", *zoo.also_slow("gpt2", "olmo2", "deepseek_v2_lite")])
def test_what_passes_the_hook_points_gives_the_scores_of_the_stream(name):
    """Folded weights, and stored ones through which gradients pass."""
    case = Layer(name)
    query, key = (case.captured[case.names[point]] for point in ("query", "key"))
    expected = matrices(case.of_stream(), HEADS)
    for layer in (case.layer, case.raw):
        # The model runs in float32: measured 4e-7 of the largest score.
        assert_close(matrices(case.of_run(query, key, layer)), expected, 1e-5)


def test_changed_rows_are_rows_of_the_changed_run():
    """Under a norm over all heads a change of one head's queries or keys moves the others' scale."""
    case = Layer("olmo2")
    query, key, head = case.read("q"), case.read("k"), HEADS[0]
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(query.shape[1]).expand(len(query), -1)
    for what, x in (("query", query), ("key", key)):
        place = head if what == "query" else case.layer.kv_head(head)
        change = torch.zeros(2, *x.shape, dtype=torch.float64)
        change[..., place, :] = torch.randn(change[..., place, :].shape, generator=generator, dtype=torch.float64)
        found = HeadScores.of_rows(case.raw, head, query, key, case.tables, every, **{f"{what}_change": change})
        for copy, matrix in zip(change, found.whole(), strict=True):
            changed = {"query": query, "key": key} | {what: x + copy}
            of_run = case.of_run(changed["query"], changed["key"])
            torch.testing.assert_close(matrix[:, 0], of_run.whole()[:, 0], rtol=0, atol=1e-12)
