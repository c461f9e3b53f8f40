"""Learning rates of spectral parameters. An angle at distance N changes N times as fast as its frequency."""

from typing import Any

from torch import nn

from tlspectral.spectral_rope.module import SpectralRoPE

OMEGA_SHARE = 0.1
_FREQUENCY_PARAMETERS = ("omega", "log_omega_shift")


def parameter_groups(spectral: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Groups of the spectral parameters for AdamW or another optimizer: frequencies at a tenth of the rate of the rest.

    AdamW moves every entry by about its rate in a step. A linear `omega` at 1e-3 rotates every pair by another radian
    at distance 1,024, and so undoes what a trained model attends to there, most of all with its slow pairs.
    Relative steps (`log_omega`, the default of `to_spectral`) spare the slow pairs, and a tenth of the rate keeps the
    fastest within 0.1 radians a step there. No group has weight decay: it would pull the parameters to 0 and not to
    their start.

    >>> import torch
    >>> import tlspectral as tls
    >>> from tlspectral.spectral_rope import parameter_groups
    >>> spectral = tls.to_spectral(tls.load_model("tiny-rope"))
    >>> optimizer = torch.optim.AdamW(parameter_groups(spectral, lr=1e-3))
    >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
    [('gain_phase', 0.001), ('omega', 0.0001)]

    Args:
        spectral: what `to_spectral` or `SpectralHookedTransformer` made, or any module with `SpectralRoPE` modules.
        lr: rate of gain and phase.

    Returns:
        `gain_phase` and `omega`, with `name`, `params`, `lr` and `weight_decay`; parameters that ask for no gradient,
        and empty groups, are left out. The weights are in no group: in a model of `to_spectral` they are frozen,
        unless made with `share_weights=False`. To train them too, add `{"params": ..., "lr": ...}`.

    Raises:
        ValueError: no spectral parameter asks for a gradient, or there is none.

    What it does not establish: that the rate suits a task. It keeps one step from undoing what was trained.
    """
    groups = rated_groups(spectral, lr, OMEGA_SHARE)
    if not groups:
        raise ValueError(
            f"no spectral parameter of this {type(spectral).__name__} asks for a gradient: make it with to_spectral, "
            "or call requires_grad_() on what shall be trained"
        )
    return groups


def rated_groups(model: nn.Module, lr: float, omega_share: float) -> list[dict[str, Any]]:
    """As `parameter_groups`, with `omega_share` of the rate for frequencies; an empty list if nothing is trainable."""
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
