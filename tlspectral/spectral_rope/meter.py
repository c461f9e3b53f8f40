"""Largest angle by which learned frequencies have changed over a context, and a Trainer callback that logs it."""

import warnings
from typing import Any

from transformers import TrainerCallback

from tlspectral.errors.settings import checked_settings
from tlspectral.spectral_rope.spectral_layers import layers_of

WARN_ABOVE = 0.5


@checked_settings
def omega_shift(model: Any, context: int) -> float:
    """Return the largest rotation, in radians, that learned frequencies add at a distance of `context` tokens.

    It is the largest |change of a frequency| (omega, radians per token) times `context`. Use it in training, to see
    whether a model is still a small change of the model it was made from.

    >>> import tlspectral as tls
    >>> from tlspectral.spectral_rope import omega_shift
    >>> omega_shift(tls.to_spectral(tls.load_model("tiny-rope")), context=64)
    0.0

    Args:
        model: made by `tls.to_spectral` or `SpectralHookedTransformer`.
        context: distance in tokens, usually the longest text that the model reads.

    Returns:
        A float in radians, 0 at the start. At 0.5 a trained head's attention at the far end of its context already
            differs: the cosine of the angle has lost an eighth.

    Raises:
        TypeError: the model is not spectral.

    Not established: that a change is harmful, or that it was learned for a reason.
    """
    return max(float(module.shift_by_head().abs().max()) for module in layers_of(model).values()) * context


@checked_settings
class OmegaMeter(TrainerCallback):
    """Trainer callback that logs how far learned rotary frequencies have changed, and warns once above 0.5 radians.

    The number is `omega_shift`: the largest |change of a frequency| times `context`, in radians, which is the largest
    rotation added at that distance. Use it when a `transformers.Trainer` trains a model of `tls.to_spectral`:

        from tlspectral.spectral_rope import OmegaMeter

        trainer = Trainer(spectral, args, train_dataset=data, callbacks=[OmegaMeter(1024)])
        trainer.train()
        [record.get("omega_shift") for record in trainer.state.log_history]

    >>> from tlspectral.spectral_rope import OmegaMeter
    >>> OmegaMeter(context=1024).context
    1024

    Args:
        context: distance in tokens: the longest text that the model will read.

    The value stands in each record of `trainer.state.log_history`, as `"omega_shift"` beside the loss.

    Raises:
        TypeError: at the first log of the Trainer, if its model was not made by `to_spectral` (or is not a
            `SpectralHookedTransformer`).

    Not established: that a change is harmful, or that it was learned for a reason.
    """

    def __init__(self, context: int):
        self.context = context
        self._warned = False

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        """Add `omega_shift` (radians) to the log record, and warn once if it exceeds 0.5.

        The Trainer calls this method. `model`: the spectral model in training. The dict `logs` and the last entry of
        `state.log_history` are changed in place; `args`, `control` and `kwargs` are not used.

        Raises TypeError if `model` has no learned rotations.
        """
        shift = omega_shift(model, self.context)
        for record in (logs, *state.log_history[-1:]):
            if record is not None:
                record["omega_shift"] = shift
        if shift > WARN_ABOVE and not self._warned:
            self._warned = True
            warnings.warn(
                f"at step {state.global_step} a learned frequency has changed by {shift:.2f} radians over "
                f"{self.context} tokens, so attention at that distance differs from the starting model: give "
                "frequencies a lower rate (parameter_groups) to stay closer",
                stacklevel=2,
            )
