"""Outputs of two workers, put in the order of the answer."""

from collections.abc import Iterator
from dataclasses import replace

from baton.core.ids import Epoch
from baton.core.request import RequestOutput
from baton.errors import Corrupt


class OutputMerger:
    """The tokens of one placement from ``next_index`` on: each once, in order.

    With ``handed_over``, the first token comes from one worker and the others from another,
    which may be faster; they are held until the first one comes. Anything else that is missing
    is a gap, and a gap is a failure. Their number is bounded by the inbox in front.
    """

    def __init__(self, epoch: Epoch, next_index: int, *, handed_over: bool) -> None:
        self._epoch = epoch
        self.next_index = next_index
        self._handed_over = handed_over
        self._held: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """What comes next because of ``output``, without what was there before.

        Raises Corrupt for a gap. An output of another epoch is dropped.
        """
        if output.epoch != self._epoch:
            return
        if output.first_index > self._end_of_held():
            raise Corrupt(
                f"tokens {self._end_of_held()} to {output.first_index} of the answer are missing"
            )
        if output.first_index > self.next_index:
            self._held.append(output)
            return
        self._handed_over = False
        yield from self._next(output)
        held, self._held = self._held, []
        for each in held:
            yield from self._next(each)

    def _end_of_held(self) -> int:
        """The highest index that an output may begin with now."""
        if self._held:
            return self._held[-1].first_index + len(self._held[-1].token_ids)
        return self.next_index + (1 if self._handed_over else 0)

    def _next(self, output: RequestOutput) -> Iterator[RequestOutput]:
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
    """Outputs that follow each other, as few as say the same: who reads late writes once."""
    if len(outputs) == 1:
        return outputs
    runs: list[list[RequestOutput]] = []
    for output in outputs:
        if runs and not output.details and runs[-1][-1].finish_reason is None:
            runs[-1].append(output)
        else:
            runs.append([output])
    return [_concatenate(run) for run in runs]


def _concatenate(run: list[RequestOutput]) -> RequestOutput:
    if len(run) == 1:
        return run[0]
    return replace(
        run[0],
        token_ids=tuple(token for output in run for token in output.token_ids),
        logprobs=tuple(entry for output in run for entry in output.logprobs),
        finish_reason=run[-1].finish_reason,
        error=run[-1].error,
    )
