"""One view of a model's attention layers, the only code that reads a model's internals.

`attention_view(model)` serves a raw or processed TransformerBridge and a HookedTransformer, folded or not, alike.
`with measured(model) as view:` opens a measurement.
"""

from tlspectral.models.reading.view import attention_view, measured

__all__ = ["attention_view", "measured"]
