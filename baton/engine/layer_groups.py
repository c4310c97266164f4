"""Divides a model's layers into groups whose KV is kept in separate blocks.

If some layers of a model have a sliding window and others read the whole context, a block that had
the KV of all layers could never be freed. Therefore each block has the KV of one group's layers
only: groups of windowed layers free the blocks before their window, and the others keep theirs.
All blocks have the same size, so that one pool serves all groups; a group that has fewer layers
than others leaves a part of its blocks unused. (vLLM's hybrid KV cache manager divides layers in
the same way.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.checkpoints.checkpoint import ModelConfig

_COST_OF_A_GROUP = 0.02
"""What one more group costs, as a share of the KV: with more groups less of the blocks is unused,
but block tables get longer."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers: first ``num_full`` groups of layers that read the whole
    context, then ``num_windowed`` groups of layers that read at most the last ``window_tokens``
    tokens. ``places`` has each layer's group, and its index in the blocks of that group."""

    num_full: int
    num_windowed: int
    layers_per_block: int
    places: tuple[tuple[int, int], ...]
    window_tokens: int | None = None

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    @classmethod
    def single(cls, num_layers: int, window_tokens: int | None = None) -> "LayerGroups":
        """Return one group with all layers. ``window_tokens`` is set if all have a window."""
        num_windowed = 0 if window_tokens is None else 1
        places = tuple((0, layer) for layer in range(num_layers))
        return cls(1 - num_windowed, num_windowed, num_layers, places, window_tokens)

    @classmethod
    def of(cls, config: ModelConfig) -> "LayerGroups":
        """Divide the layers of a model. They stay together if all or none of them have a window, or
        if the windows are longer than any context."""
        num_layers, windows = config.num_layers, config.traits.windows
        windowed = [layer for layer in range(num_layers) if config.traits.window(layer) is not None]
        full = [layer for layer in range(num_layers) if config.traits.window(layer) is None]
        longest = max((each for each in windows if each is not None), default=None)
        if not full:
            return cls.single(num_layers, longest)
        if longest is None or longest >= config.max_position_embeddings:
            return cls.single(num_layers)
        size = _layers_per_block(len(full), len(windowed))
        num_full, num_windowed = -(-len(full) // size), -(-len(windowed) // size)
        places = {**_places(full, size, 0), **_places(windowed, size, num_full)}
        ordered = tuple(places[layer] for layer in range(num_layers))
        return cls(num_full, num_windowed, size, ordered, longest)


def _layers_per_block(num_full: int, num_windowed: int) -> int:
    """Return how many layers a block should have, weighing unused memory against the number of
    groups."""

    def cost(size: int) -> float:
        num_groups = -(-num_full // size) - (-num_windowed // size)
        return num_groups * (size / (num_full + num_windowed) + _COST_OF_A_GROUP)

    return min(range(1, min(num_full, num_windowed) + 1), key=cost)


def _places(layers: Sequence[int], size: int, first_group: int) -> dict[int, tuple[int, int]]:
    return {
        layer: (first_group + index // size, index % size) for index, layer in enumerate(layers)
    }
