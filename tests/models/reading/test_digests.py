"""Hashes of weights: of the bytes as stored, computed once, and again after any change of a number."""

import hashlib

import pytest
import torch
import zoo
from torch import nn

import tlspectral as tls
from tlspectral.models.reading import attention_view, digests, measured
from tlspectral.models.reading.digests import digest_of, digest_of_named, kept_digest

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=[0, digests._SMALL], ids=["sums", "kept"])
def compared(request, monkeypatch):
    """Weights of the zoo compared by their sums, as weights of larger models are, and whole."""
    monkeypatch.setattr(digests, "_SMALL", request.param)


def plain(*values):
    """SHA-256 of the bytes of whole copies."""
    whole = b"".join(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in values)
    return hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("piece", [1, 100, 2**20])
def test_the_hash_is_of_the_bytes_in_order_however_they_are_laid_out(monkeypatch, dtype, piece):
    monkeypatch.setattr(digests, "_PIECE", piece)
    matrix = torch.randn(7, 12, generator=zoo.generator()).to(dtype)
    by_head = matrix.T.reshape(3, 4, 7).transpose(1, 2)
    for value in (matrix, matrix.T, matrix[:, 2:5], matrix[::2], by_head, matrix[0], matrix[:0].T):
        assert digest_of([None, value, matrix]) == plain(value, matrix)
    assert digest_of_named({"b": matrix.T, "a": matrix}) == digest_of_named({"a": matrix, "b": matrix.T.contiguous()})


def test_a_transposed_weight_is_never_copied_whole(monkeypatch, spied):
    monkeypatch.setattr(digests, "_PIECE", 1000)
    read = spied(digests, "stored_bytes")
    digest_of([torch.zeros(20, 100).T])
    assert [len(piece) for piece in read] == [12] * 8 + [4]  # rows of 80 bytes


# --- computed once ---


LAYOUTS = {
    "rows of 8 bytes": lambda: torch.randn(6, 20, 16, generator=zoo.generator()),
    "transposed": lambda: torch.randn(6, 20, 16, generator=zoo.generator()).transpose(1, 2),
    "an odd width": lambda: torch.randn(6, 40, 7, generator=zoo.generator()),
    "odd sizes": lambda: torch.randn(3, 5, 7, generator=zoo.generator()),
    "columns of a joint matrix": lambda: torch.randn(20, 33, generator=zoo.generator())[:, 11:22],
    "a vector": lambda: torch.randn(64, generator=zoo.generator()),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_counts_and_so_does_its_place(layout, dtype):
    owner, weight = nn.Module(), LAYOUTS[layout]().to(dtype)
    made = []

    def hashed():
        made.append(kept_digest(owner, "w", [weight, None], lambda: digest_of([weight])))
        return made[-1] == digest_of([weight])

    assert hashed()
    flat = [tuple(index) for index in torch.cartesian_prod(*map(torch.arange, weight.shape)).view(-1, weight.ndim)]
    for index in flat[:: len(flat) // 20]:
        weight.data[index] = torch.nextafter(weight.data[index].float(), torch.tensor(9.0)).to(dtype) + 2**-5
        assert hashed()
    for first, second in zip(flat[::40], flat[1::40], strict=False):  # two neighbours of a row change places
        held = weight.data[first].clone()
        weight.data[first] = weight.data[second]
        weight.data[second] = held
        assert hashed()
    weight.data[:] = weight.data.flip(0)  # whole rows do
    assert hashed()
    assert len({*made}) == len(made)


CHANGES = {
    "one number through .data": lambda model, weight: weight.data.view(-1)[3:4].add_(1e-3),
    "one number in place": lambda model, weight: weight.view(-1)[3:4].add_(1e-3),
    "one head through .data": lambda model, weight: weight.data[12:24].mul_(-1),
    "another parameter": lambda model, weight: setattr(
        model.blocks[1].attn.k.original_component, "weight", nn.Parameter(weight + 1e-3)
    ),
    "another .data": lambda model, weight: setattr(weight, "data", weight.data + 1e-3),
    "load_state_dict": lambda model, weight: model.original_model.load_state_dict(
        {name: value + 1e-3 for name, value in model.original_model.state_dict().items()}
    ),
    "another type": lambda model, weight: model.bfloat16(),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_hashed_again(spied, change):
    model = zoo.bridge("llama")
    before = recorded(model)
    hashing = spied(digests, "digest_of")
    assert recorded(model) == before
    assert not hashing
    with torch.no_grad():
        CHANGES[change](model, model.blocks[1].attn.k.weight)
    after = recorded(model)
    digests._kept.pop(model)
    assert after == recorded(model)
    others = change in ("load_state_dict", "another type")
    assert (before[0][0] == after[0][0], before[0][1] == after[0][1]) == (not others, False)
    assert (before[1] == after[1], before[2] == after[2]) == (not others, False)


def recorded(model):
    view = attention_view(model)
    return [view.layer_digest(0), view.layer_digest(1)], view.ends_digest(), view.weights_digest()


@pytest.mark.usefixtures("compared")
def test_a_model_that_is_moved_and_moved_back_has_its_hash_again():
    model = zoo.bridge("llama")
    before = recorded(model)
    model.double()
    assert recorded(model)[0] != before[0]
    model.float()
    assert recorded(model) == before


@pytest.mark.usefixtures("compared")
def test_of_two_models_that_share_weights_both_see_an_edit():
    model, other = zoo.bridge("llama"), zoo.bridge("llama", seed=1)
    other.blocks[1].attn.k.original_component.weight = model.blocks[1].attn.k.original_component.weight
    before = [recorded(one)[0] for one in (model, other)]
    model.blocks[1].attn.k.weight.data[0, 0] += 1e-3
    after = [recorded(one)[0] for one in (model, other)]
    for then, now in zip(before, after, strict=True):
        assert (then[0] == now[0], then[1] == now[1]) == (True, False)


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3", *[*zoo.LATENTS][:1], "bloom"])
def test_weights_are_hashed_once_and_summed_after(monkeypatch, spied, name):
    # The gains of Gemma are computed at each reading: they are small, and compared whole.
    monkeypatch.setattr(digests, "_SMALL", zoo.WIDTH)
    model = zoo.bridge(name)
    first = attention_view(model).origin()
    read = spied(digests, "stored_bytes")
    assert attention_view(model).origin() == first
    assert not read


def test_tied_weights_are_summed_once(monkeypatch, spied):
    monkeypatch.setattr(digests, "_SMALL", zoo.WIDTH)
    model = zoo.bridge("gpt2")
    assert model.W_U.data_ptr() == model.W_E.data_ptr()
    view = attention_view(model)
    summed = spied(digests, "_as_integers")
    view.ends_digest()
    assert [tuple(one.shape) for one in summed] == [(zoo.VOCABULARY, zoo.WIDTH)]
    model.W_E.data[5, 7] += 1e-3
    assert view.ends_digest() == plain(model.W_E.detach(), model.W_U.detach(), model.ln_final.weight.detach())


def test_one_measurement_sums_a_weight_once_and_the_next_one_again(monkeypatch, spied):
    monkeypatch.setattr(digests, "_SMALL", zoo.WIDTH)
    model = zoo.bridge("llama")
    summed = spied(digests, "_as_integers")
    with measured(model) as view:
        first = view.state(), view.weights_digest(), view.layer_digest(0)
        storages = [one.untyped_storage().data_ptr() for one in summed]
        again = view.state(), view.weights_digest(), view.layer_digest(0)
    assert first == again
    # W_O is read head by head, in another order.
    assert len(storages) == len(summed) == len({*storages}) + 1
    model.blocks[1].attn.k.weight.data[0, 0] += 1e-3
    with measured(model) as view:
        assert view.state() != first[0]
        assert view.weights_digest() != first[1]


def test_a_tensor_of_inference_mode_is_compared_by_its_numbers():
    with torch.inference_mode():
        weight = torch.randn(200, 100, generator=zoo.generator())
        owner = nn.Module()
        first = kept_digest(owner, "w", [weight], lambda: digest_of([weight]))
        weight[3, 4] += 1.0
        assert kept_digest(owner, "w", [weight], lambda: digest_of([weight])) == digest_of([weight]) != first


def test_no_sum_copies_a_weight():
    weight = torch.zeros(1000, 2000)
    owner = nn.Module()
    kept_digest(owner, "w", [weight], lambda: "")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        assert kept_digest(owner, "w", [weight], lambda: "again") == ""
    taken = sum(max(0, event.self_cpu_memory_usage) for event in run.events())
    assert taken < weight.nbytes / 100  # sums of 1,000 rows and 1,000 pairs of columns, 16 kB of 8 MB


@pytest.mark.slow
def test_a_head_of_the_real_model_is_seen():
    model = tls.load_model("smollm2-135m")
    before = attention_view(model).origin()["weights_by_layer"]
    model.blocks[17].attn.q.weight.data[64:128] *= 1.001
    after = attention_view(model).origin()["weights_by_layer"]
    assert [layer for layer in before if before[layer] != after[layer]] == ["17"]
