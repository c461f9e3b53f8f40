"""The functions by which a view reads one kind of model.

The module `bridge` defines them for a TransformerBridge, the module `hooked_transformer` for a HookedTransformer. A
third kind of model needs only a third module and its name in `READERS` (`view.py`).
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tlspectral.models.reading.layer import RawAttention
from tlspectral.models.reading.norms import MlpInput, Normalization


@runtime_checkable
class Reader(Protocol):
    """Functions of a module that reads one kind of model. `model` is the model itself; `layer` counts from 0.

    They raise UnsupportedArchitecture for a layer or norm that is not supported, and BadWeights for unreadable weights.
    """

    # --- weights of a layer ---

    def read_attention(self, model: Any, layer: int) -> RawAttention:
        """Return the attention parameters of layer `layer` as a `RawAttention`: tensors of the model or views of them,
        not folded.
        """
        ...

    def read_output(self, model: Any, layer: int) -> tuple[Tensor | None, Normalization, float]:
        """Return (b_O, norm after the attention, factor on the heads' writes to the residual stream) of layer `layer`
        of `model`.
        """
        ...

    def read_mlp_input(self, model: Any, layer: int) -> MlpInput:
        """Return, as `MlpInput`, the hook point of the MLP input of layer `layer` of `model` and the norm between
        stream and point.
        """
        ...

    def final_normalization(self, model: Any) -> Normalization:
        """Return the norm before the unembedding; `NO_NORM` if the model has none."""
        ...

    # --- positions and masks ---

    def rotary_tables(
        self, model: Any, layer: int, n_positions: int, captured: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the scaled (cos, sin) of layer `layer` of `model` in a run, each [(batch,) pos, columns]; None without
        tables.

        n_positions: tokens of the prompt. captured: activations of the run, from hook point name to tensor.
        """
        ...

    def frequency_switch(self, model: Any, n_positions: int) -> int | None:
        """Return the largest prompt length below `n_positions` past which the model uses other rotary frequencies.

        None if the frequencies do not change up to `n_positions`.
        """
        ...

    def seen_keys(self, model: Any, layer: int, n_positions: int, first: int = 0) -> Tensor:
        """Return a bool tensor [query, key] for a prompt of `n_positions` tokens: True for the keys that each query of
        layer `layer` may see, by causality and the layer's window.

        first: the first query; rows of earlier queries are left out.
        """
        ...

    def selected_keys(self, model: Any, layer: int) -> int | None:
        """Return how many of the visible keys an indexer of layer `layer` picks for each query; None without an
        indexer.
        """
        ...

    def unmasked(self, model: Any, layer: int, scores: Tensor) -> Tensor:
        """Return a bool tensor of the shape of `scores`: True where the layer's mask lets the query see the key.

        scores: some or all scores that the layer's hook point shows.
        """
        ...

    # --- key/value caches ---

    def prefill_cache(self, model: Any, tokens: Tensor) -> Any:
        """Run the model on `tokens` [batch, pos] and return its key/value cache; None if it keeps none."""
        ...

    def joined_caches(self, caches: list[Any]) -> Any:
        """Return one key/value cache with the rows of all caches; None if a layer keeps more than keys and values."""
        ...

    def cache_bytes(self, cache: Any) -> int:
        """Return the size in bytes of a cache's keys and values, all rows together."""
        ...

    def continued_logits(self, model: Any, cache: Any, tokens: Tensor, rows: Tensor, alive: Sequence[int]) -> Tensor:
        """Return logits [rows, pos, d_vocab] of `tokens` [rows, pos] that continue cached prompts, from a run of
        `model`.

        cache: a key/value cache; it is not changed.
        rows: for each row of `tokens`, the row of the cache that it continues.
        alive: for each layer, how many rows it runs, counted from the first.
        """
        ...
