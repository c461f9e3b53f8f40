"""Spectral models are their base to the bit at the start, and eq. 2 of the paper after it."""

import numpy as np
import torch
import zoo
from ablation_runs import logits
from reference_keys import normed
from spectral_zoo import move

from tlspectral.spectral_rope import to_spectral

from .rows import asked, rotating

OPTIONS = {
    "head": {},
    "layer-linear": {"scope": "layer", "log_omega": False},
    "group-shared": {"scope": "group", "shared_phase": True},
}


@asked(rotating, every=6, scope=OPTIONS)
def the_spectral_start_is_the_model_itself_to_the_bit(row, scope):
    tokens = zoo.prompt(length=40)  # beyond the length at which some rotary modules switch
    assert torch.equal(logits(to_spectral(row.model, **OPTIONS[scope]), tokens), logits(row.model, tokens))


@asked(rotating, every=6)
def every_spectral_parameter_has_a_gradient_at_the_start(row):
    spectral = to_spectral(row.model, log_omega=False)
    loss = spectral(zoo.prompt(), return_type="loss")
    loss.backward(inputs=list(spectral.spectral_parameters()))
    assert [int(index) for index in spectral.spectral] == [i for i in row.layers if row.view.rotary(i) is not None]
    for module in spectral.spectral.values():
        for parameter in (module.omega, module.phase, module.gain):
            # Rounding is 1e-9 and the smallest seen 1e-6, of a pair that hardly turns.
            assert float(parameter.grad.abs().amax()) > 1e-5
            assert bool((parameter.grad != 0).all())


def equation_2_scores(view, index, q, k, geometry):
    """Scaled and capped scores of A (x exp(i (m Omega + Phi))) in complex numpy, from q and k before any rotation."""
    raw, own = view.raw(index), view.rotary(index)

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


@asked(lambda row: row.rotary and row.read_right, every=6)
def moved_parameters_are_equation_2(row):
    spectral = move(to_spectral(row.model))
    for index in map(int, spectral.spectral):
        names = row.view.hook_names(index)
        compared = "scores" if "scores" in names else "pattern"
        wanted = [names[at] for at in ("query", "key", compared)]
        with torch.no_grad():
            _, cache = spectral.run_with_cache(zoo.prompt(), names_filter=wanted)
        q, k, theirs = (cache[name] for name in wanted)
        ours, theirs = (
            equation_2_scores(row.view, index, q, k, spectral.spectral_geometry(index)),
            theirs.double().numpy(),
        )
        seen = np.broadcast_to(np.tril(np.ones(ours.shape[-2:], dtype=bool)), ours.shape)
        if compared == "pattern":
            weights = np.exp(np.where(seen, ours, -np.inf) - ours.max())
            ours = weights / weights.sum(-1, keepdims=True)
        # float32 noise of scores up to 20, with the model's own tables: measured 1e-5; without the spectral part, with
        # the phase on the other side or with a gain on both, off by units.
        assert np.abs(ours - theirs)[seen & (theirs > -1e30)].max() < 4e-5, index
        assert not np.array_equal(ours, theirs)
