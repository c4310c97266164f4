"""The input tokens of a step, some of which may still be on the device only."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.plan import Row
from baton.engine.upload import upload_integers


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a packed batch, [num_tokens].

    ``on_host`` are all tokens; if ``previous`` is None, all of them are known. Otherwise
    ``previous`` [num_sampled], int32, are the tokens that the previous step samples, on the device,
    and ``sources`` says for each token of the batch which of them it is, or None if it is the one
    in ``on_host``."""

    on_host: Sequence[int]
    previous: torch.Tensor | None = None
    sources: Sequence[int | None] = ()

    @classmethod
    def known(cls, rows: Sequence[Row]) -> "StepTokens":
        return cls([token for row in rows for token in row.token_ids])

    @classmethod
    def following(
        cls, rows: Sequence[Row], previous: torch.Tensor, sampled_rows: Sequence[int]
    ) -> "StepTokens":
        """Return the tokens of ``rows``, some of which continue rows of the previous step.
        ``sampled_rows`` are the indices of the rows that the previous step samples, in the order of
        ``previous``."""
        index_of = {row: index for index, row in enumerate(sampled_rows)}
        sources: list[int | None] = []
        for row in rows:
            if row.previous_row_index is None:
                sources += [None] * len(row.token_ids)
            else:
                sources.append(index_of[row.previous_row_index])
        return cls([token for row in rows for token in row.token_ids], previous, sources)

    def to_device(self, device: torch.device) -> torch.Tensor:
        """Return the tokens on ``device``, in int32 on a GPU and int64 on a CPU. The host does not
        wait for the device."""
        dtype = torch.int64 if device.type == "cpu" else torch.int32
        if self.previous is None:
            return upload_integers(self.on_host, device, dtype)
        previous = self.previous.to(dtype)
        if list(self.sources) == list(range(len(previous))):
            return previous
        count = len(previous)
        places = [count + n if source is None else source for n, source in enumerate(self.sources)]
        joined = torch.cat((previous, upload_integers(self.on_host, device, dtype)))
        return joined[upload_integers(places, device)]
