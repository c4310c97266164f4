"""Merges the outputs of a prefill and a decode worker into the order of the answer."""

from collections.abc import Iterator
from dataclasses import replace

from baton.core.ids import Epoch
from baton.core.request import RequestOutput
from baton.errors import Corrupt
from router.limits import MAX_EARLY_OUTPUTS


class OutputMerger:
    """Yields the tokens of one placement from ``next_index`` on, each once and in order.

    If ``is_split`` is True, the first token comes from the prefill worker and the other tokens from
    the decode worker. If the decode worker's outputs arrive earlier, they are held back until the
    first token arrives, at most :data:`MAX_EARLY_OUTPUTS` of them. Any other missing token is an
    error.
    """

    def __init__(self, epoch: Epoch, next_index: int, *, is_split: bool) -> None:
        self._epoch = epoch
        self.next_index = next_index
        self._is_split = is_split
        self._early_outputs: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """Yield the outputs that can be delivered now that ``output`` has arrived, without the
        tokens that were already delivered.

        Raises Corrupt for a gap, or if too many outputs arrive before the first token. Outputs of
        other epochs are dropped.
        """
        if output.epoch != self._epoch:
            return
        if output.first_index > self._max_first_index():
            raise Corrupt(
                f"tokens {self._max_first_index()} to {output.first_index - 1} of the answer are "
                "missing"
            )
        if output.first_index > self.next_index:
            if len(self._early_outputs) >= MAX_EARLY_OUTPUTS:
                raise Corrupt(f"the first of {len(self._early_outputs)} outputs is missing")
            self._early_outputs.append(output)
            return
        self._is_split = False
        yield from self._without_delivered(output)
        held, self._early_outputs = self._early_outputs, []
        for each in held:
            yield from self._without_delivered(each)

    def _max_first_index(self) -> int:
        """Return the highest token index at which the next output may begin."""
        if self._early_outputs:
            return self._early_outputs[-1].first_index + len(self._early_outputs[-1].token_ids)
        return self.next_index + (1 if self._is_split else 0)

    def _without_delivered(self, output: RequestOutput) -> Iterator[RequestOutput]:
        known = self.next_index - output.first_index
        if known > len(output.token_ids):
            return
        if known > 0:
            output = replace(
                output,
                first_index=self.next_index,
                token_ids=output.token_ids[known:],
                logprobs=output.logprobs[known:],
            )
        if output.token_ids or output.finish_reason is not None:
            self.next_index += len(output.token_ids)
            yield output


def coalesce_outputs(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Merge consecutive outputs into as few as possible, so that a reader that has fallen behind
    needs fewer writes to its client. An output with ``details`` always begins a new merged
    output."""
    if len(outputs) == 1:
        return outputs
    runs: list[list[RequestOutput]] = []
    for output in outputs:
        if runs and not output.details and runs[-1][-1].finish_reason is None:
            runs[-1].append(output)
        else:
            runs.append([output])
    return [_concatenate(group) for group in runs]


def _concatenate(run: list[RequestOutput]) -> RequestOutput:
    if len(run) == 1:
        return run[0]
    return replace(
        run[0],
        token_ids=tuple(token for output in run for token in output.token_ids),
        logprobs=tuple(entry for output in run for entry in output.logprobs),
        finish_reason=run[-1].finish_reason,
        error=run[-1].error,
        cached_tokens=max(output.cached_tokens for output in run),
    )
