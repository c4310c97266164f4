"""Tests how Baton's plans are converted to the messages with which vLLM's scheduler would drive its
workers."""

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.plan import Plan, Row, SampledToken
from baton.vllm_engine.batch import UNUSED_TOKEN, WorkerBatch
from baton.vllm_engine.worker import SampledStep

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def row(name: str, tokens: list[int], start: int, blocks: list[int], sample: bool = True) -> Row:
    return Row(
        RequestId(name),
        tuple(TokenId(token) for token in tokens),
        start,
        tuple(BlockId(block) for block in blocks),
        sample,
        GREEDY,
    )


class Driver:
    """Converts plans with a :class:`WorkerBatch`, and then reports to it which tokens the rows have
    sampled."""

    def __init__(self) -> None:
        self.batch = WorkerBatch()

    def step(self, *rows: Row, sampled: dict[str, int | None] | None = None):  # type: ignore[no-untyped-def]
        """Return the message for a step of ``rows``. ``sampled`` maps requests to the tokens that
        they sample in the step, or to None if they sample none. All other requests sample token
        1."""
        plan = Plan(1, rows)
        message = self.batch.messages(plan)
        tokens = {
            self.batch.id_of(each): None if token is None else SampledToken(TokenId(token))
            for each in rows
            if each.sample
            for token in [(sampled or {}).get(each.request_id, 1)]
        }
        self.batch.record(plan, SampledStep(tokens, {}))
        return message


def new(message) -> list[tuple[str, list[int], int, list[int]]]:  # type: ignore[no-untyped-def]
    return [
        (each.req_id, list(each.prompt_token_ids), each.num_computed_tokens, each.block_ids[0])
        for each in message.scheduled_new_reqs
    ]


def continued(message) -> list[tuple[str, object, int, int]]:  # type: ignore[no-untyped-def]
    requests = message.scheduled_cached_reqs
    return list(
        zip(
            requests.req_ids,
            requests.new_block_ids,
            requests.num_computed_tokens,
            requests.num_output_tokens,
            strict=True,
        )
    )


def test_a_prompt_is_a_new_request() -> None:
    message = Driver().step(row("a", [5, 6, 7], 0, [3]))
    assert new(message) == [("1", [5, 6, 7], 0, [3])]
    assert continued(message) == []
    assert message.num_scheduled_tokens == {"1": 3}
    assert message.total_num_scheduled_tokens == 3
    assert message.finished_req_ids == set()


def test_decodes_continue_and_name_only_new_blocks() -> None:
    driver = Driver()
    driver.step(row("a", [5, 6], 0, [3]), sampled={"a": 8})
    second = driver.step(row("a", [8], 2, [3]), sampled={"a": 9})
    assert (new(second), continued(second)) == ([], [("1", None, 2, 1)])
    third = driver.step(row("a", [9], 3, [3, 7]), sampled={"a": 4})
    assert (new(third), continued(third)) == ([], [("1", ([7],), 3, 2)])
    fourth = driver.step(row("a", [4], 4, [3, 7]))
    assert (new(fourth), continued(fourth)) == ([], [("1", None, 4, 3)])
    assert fourth.finished_req_ids == set()


def test_the_chunks_of_a_prompt_are_requests_of_their_own() -> None:
    driver = Driver()
    driver.step(row("a", [5, 6], 0, [3], sample=False))
    message = driver.step(row("a", [7], 2, [3]))
    assert new(message) == [("2", [UNUSED_TOKEN, UNUSED_TOKEN, 7], 2, [3])]
    assert message.finished_req_ids == {"1"}


def test_a_request_that_arrives_with_its_kv_is_new() -> None:
    message = Driver().step(row("a", [8], 3, [2]))
    assert new(message) == [("1", [UNUSED_TOKEN] * 3 + [8], 3, [2])]


def test_a_request_with_other_blocks_is_new() -> None:
    driver = Driver()
    driver.step(row("a", [5, 6], 0, [3]), sampled={"a": 8})
    message = driver.step(row("a", [8], 2, [4]))
    assert (new(message), continued(message)) == ([("2", [0, 0, 8], 2, [4])], [])
    assert message.finished_req_ids == {"1"}


def test_a_request_with_another_token_or_position_is_new() -> None:
    for token, start in ((7, 2), (8, 1)):
        driver = Driver()
        driver.step(row("a", [5, 6], 0, [3]), sampled={"a": 8})
        message = driver.step(row("a", [token], start, [3]))
        assert continued(message) == [] and len(new(message)) == 1


def test_a_request_that_missed_a_step_is_new() -> None:
    driver = Driver()
    first = row("a", [5, 6], 0, [3])
    driver.step(first, row("b", [5], 0, [4]), sampled={"a": 8, "b": 2})
    without = driver.step(row("b", [2], 1, [4]), sampled={"b": 3})
    assert without.finished_req_ids == {"1"}
    assert continued(without) == [("2", None, 1, 1)]
    back = driver.step(row("a", [8], 2, [3]), row("b", [3], 2, [4]))
    assert new(back) == [("3", [0, 0, 8], 2, [3])]
    assert continued(back) == [("2", None, 2, 2)]
    assert back.num_scheduled_tokens == {"3": 1, "2": 1}


def test_a_request_without_an_allowed_token_is_forgotten() -> None:
    driver = Driver()
    driver.step(row("a", [5, 6], 0, [3]), sampled={"a": None})
    message = driver.step(row("b", [5], 0, [4]))
    assert message.finished_req_ids == {"1"}


def test_only_rows_with_a_result_are_sent_to_the_workers() -> None:
    batch = WorkerBatch()
    scored = row("c", [5], 0, [6], sample=False)
    scored.prompt_logprob_targets = (TokenId(6),)
    rows = (row("a", [5], 0, [3]), row("b", [5], 0, [4], sample=False), scored)
    plan = Plan(1, rows)
    batch.messages(plan)
    assert batch.rows_by_id(plan) == {"1": rows[0], "3": scored}
    assert [batch.id_of(each) for each in rows] == ["1", "2", "3"]
