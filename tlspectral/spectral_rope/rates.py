"""Learning rates of a spectral model: an angle at distance N changes N times as fast as its frequency."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import Tensor, nn

from tlspectral.errors import not_a, shown
from tlspectral.spectral_rope.module import SpectralRoPE

OMEGA_SHARE = 0.1
_FREQUENCY_PARAMETERS = ("omega", "log_omega_shift")


def parameter_groups(spectral: nn.Module, lr: float, *, weights_lr: float | None = None) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer such as AdamW, with a tenth of the learning rate for frequencies.

    >>> import torch
    >>> import tlspectral as tls
    >>> from tlspectral.spectral_rope import parameter_groups
    >>> spectral = tls.to_spectral(tls.load_model("tiny-rope"))
    >>> optimizer = torch.optim.AdamW(parameter_groups(spectral, lr=1e-3))
    >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
    [('gain_phase', 0.001), ('omega', 0.0001)]
    >>> with_weights = tls.to_spectral(tls.load_model("tiny-rope"), share_weights=False)
    >>> [group["name"] for group in parameter_groups(with_weights, lr=1e-3, weights_lr=1e-4)]
    ['gain_phase', 'omega', 'weights']

    Frequencies need the lower rate because one step of AdamW at 1e-3 can undo the attention of a trained model at long
    distances.

    Args:
        spectral: made by `tls.to_spectral` or `SpectralHookedTransformer`, or any module with `SpectralRoPE` modules.
        lr: learning rate of gain and phase; frequencies get a tenth.
        weights_lr: learning rate of the weights. Default: `lr`.

    Returns:
        List of dicts with `name`, `params` and `lr`: groups `gain_phase`, `omega` (frequencies) and `weights` (all
            other parameters). The first two have no weight decay; `weights` have the optimizer's. Parameters without
            `requires_grad`, and empty groups, are left out.

    Raises:
        ValueError: a rate that is not a finite number from 0 up, or no spectral parameter that requires a gradient.

    Not established: that the rate suits a task. It keeps one step from undoing earlier training. More:
    docs/training.md.
    """
    if not isinstance(spectral, nn.Module):
        raise TypeError(f"{not_a(spectral, 'a spectral model')}: give the result of tls.to_spectral")
    weights_lr = lr if weights_lr is None else weights_lr
    for name, rate in (("lr", lr), ("weights_lr", weights_lr)):
        is_number = isinstance(rate, Real | Tensor) and not isinstance(rate, bool) and not getattr(rate, "ndim", 0)
        if not is_number or not 0 <= float(rate) < math.inf:
            raise ValueError(f"{name}= must be a learning rate, a finite number from 0 up; found {shown(rate)}")
    groups = rated_groups(spectral, lr, OMEGA_SHARE)
    if not groups:
        raise ValueError(
            f"no spectral parameter of this {type(spectral).__name__} asks for a gradient: make it with to_spectral, "
            "or call requires_grad_() on the parameters to train"
        )
    rated = {id(parameter) for group in groups for parameter in group["params"]}
    weights = [weight for weight in spectral.parameters() if weight.requires_grad and id(weight) not in rated]
    return groups + ([{"name": "weights", "params": weights, "lr": weights_lr}] if weights else [])


def rated_groups(model: nn.Module, lr: float, omega_share: float) -> list[dict[str, Any]]:
    """Return the optimizer groups `gain_phase` (rate `lr`) and `omega` (frequencies, rate `omega_share * lr`) as a
    list.

    `model`: a spectral model. A group is a dict with name, params, lr and weight_decay 0. Groups without a parameter
    that trains are left out.
    """
    parameters_of: dict[str, dict[int, nn.Parameter]] = {"gain_phase": {}, "omega": {}}
    for module in model.modules():
        if not isinstance(module, SpectralRoPE):
            continue
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:  # by identity, as layers may share them
                parameters_of["omega" if name in _FREQUENCY_PARAMETERS else "gain_phase"][id(parameter)] = parameter
    rates = {"gain_phase": lr, "omega": omega_share * lr}
    return [
        {"name": name, "params": list(by_identity.values()), "lr": rates[name], "weight_decay": 0.0}
        for name, by_identity in parameters_of.items()
        if by_identity
    ]
