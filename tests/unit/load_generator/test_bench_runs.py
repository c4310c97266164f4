"""Tests whole runs of ``baton bench`` against a server that imitates OpenAI's API."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.traces.files import write_trace
from baton.traces.synthetic import TRACE_GENERATORS
from command_line.main import run_command_line
from tests.unit.load_generator.openai_server import KEY, FakeServer, fake_server

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run ``baton bench …`` in this process; return its exit code, stdout and stderr."""
    monkeypatch.delenv("BENCH_API_KEY", raising=False)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run_command


@contextmanager
def interrupt_after(server: FakeServer, num_requests: int) -> Iterator[None]:
    """Press Ctrl-C once the server has got so many requests of the load."""

    def interrupt() -> None:
        while len(server.load_requests) < num_requests:
            server.released.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    hand = threading.Thread(target=interrupt, daemon=True)
    hand.start()
    yield
    hand.join()


def json_result(answer: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = answer
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_closed_loop_run(ask: Ask) -> None:
    """Each user waits for an answer before it sends the next request. The first tenth of the
    requests is warm-up and does not count."""
    with fake_server() as server:
        found = json_result(ask(
                         "--url", server.url + "/v1/", "--concurrency", "3", "--requests", "40",
                         "--input-tokens", "50", "--output-tokens", "5", "--json",
                         "--slo-ttft", "60"))  # fmt: skip
    assert (found["num_requests"], found["completed"], found["loop"]) == (36, 36, "closed")
    assert found["most_at_once"] == 3
    assert found["prompt_tokens"]["p50"] == 50 and found["answer_tokens"]["mean"] == 5
    assert found["attainment_by_length_quartile"] == [1.0] * 4
    assert 0.4 < found["hit_ratio_tokens"] <= 0.5
    body = server.load_requests[0]
    assert set(body) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    assert len({body["messages"][0]["content"] for body in server.load_requests}) == 40


def test_open_loop_run_with_token_ids(ask: Ask) -> None:
    with fake_server() as server:
        found = json_result(ask(
                         "--url", server.url, "--rate", "200", "--requests", "30", "--warm-up", "0",
                         "--prompts", "tokens", "--ignore-eos", "--extra", '{"top_k": 1}',
                         "--input-tokens", "33", "--output-tokens", "2", "--json"))  # fmt: skip
    assert (found["num_requests"], found["completed"], found["loop"]) == (30, 30, "open")
    assert {len(body["prompt"]) for body in server.load_requests} == {33}
    assert all(body["ignore_eos"] and body["top_k"] == 1 for body in server.load_requests)


def test_trace_replay_writes_its_output_file(ask: Ask, tmp_path: Path) -> None:
    path, output = tmp_path / "t.jsonl", tmp_path / "out.json"
    write_trace(TRACE_GENERATORS["rag"](12, 100.0, 1), path)
    with fake_server() as server:
        found = json_result(ask(
                         "--url", server.url, "--trace", str(path), "--rate-factor", "4", "--json",
                         "--output", str(output)))  # fmt: skip
    assert found == json.loads(output.read_text())
    assert found["load"] == "t.jsonl" and found["trace_requests"] == 12
    assert found["shortened_requests"] > 0


def test_closed_loop_by_duration_repeats_its_requests_with_new_prompts(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load has 3 requests. It is ended when the 8th has arrived, after at least 6 answers."""
    monkeypatch.setattr("load_generator.load_spec.CLOSED_REQUESTS", 3)
    with fake_server() as server, interrupt_after(server, 8):
        found = json_result(ask("--url", server.url, "--concurrency", "2", "--duration", "600",
                         "--warm-up", "0", "--output-tokens", "2", "--json"))  # fmt: skip
        contents = [body["messages"][0]["content"] for body in server.load_requests]
    assert found["interrupted"] and found["completed"] >= 6
    assert len(set(contents)) == len(contents) >= 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the server's thread is ours
def test_load_is_spread_over_processes(ask: Ask) -> None:
    with fake_server() as server:
        found = json_result(ask(
                         "--url", server.url, "--concurrency", "4", "--requests", "20", "--json",
                         "--warm-up", "0", "--processes", "2", "--output-tokens", "2"))  # fmt: skip
        assert len(server.load_requests) == 20
    assert (found["completed"], found["num_requests"], found["most_at_once"]) == (20, 20, 4)


def test_errors_are_printed_as_a_table(ask: Ask) -> None:
    with fake_server("busy") as server:
        code, out, _ = ask("--url", server.url, "--concurrency", "1", "--requests", "10",
                           "--warm-up", "0", "--output-tokens", "2")  # fmt: skip
    assert code == 0
    assert "answered" in out and "rate_limit_exceeded" in out and "later" in out
    assert "50.0% (429), 50.0%" in out


def test_connections_closed_by_the_server_are_reopened(ask: Ask) -> None:
    with fake_server("closing") as server:
        found = json_result(ask(
                         "--url", server.url, "--concurrency", "2", "--requests", "20", "--json",
                         "--warm-up", "0", "--output-tokens", "2"))  # fmt: skip
    assert (found["completed"], found["errors"]) == (20, [])


@pytest.mark.parametrize(
    ("model", "message"),
    [("torn", "connection lost"), ("failing", "unavailable worker died")],
)
def test_run_without_any_answer_exits_with_1(ask: Ask, model: str, message: str) -> None:
    with fake_server(model) as server:
        code, _, err = ask("--url", server.url, "--concurrency", "1", "--requests", "3",
                           "--warm-up", "0", "--output-tokens", "4")  # fmt: skip
    assert code == 1
    assert "not one of 3 requests was answered: 200" in err and message in err


def test_request_that_exceeds_its_timeout_is_an_error(ask: Ask) -> None:
    with fake_server("hanging") as server:
        found = json_result(ask("--url", server.url, "--rate", "100", "--requests", "4", "--json",
                         "--warm-up", "0", "--timeout", "1", "--output-tokens", "2"))  # fmt: skip
    assert found["completed"] == 2
    (error,) = found["errors"]
    assert (error["code"], error["count"], error["message"]) == (
        "timeout",
        2,
        "not completed within 1 s",
    )


def test_interrupted_run_reports_what_it_has(ask: Ask) -> None:
    """Requests in flight count neither as completed nor as failed."""
    with fake_server("hanging") as server, interrupt_after(server, 4):
        found = json_result(ask("--url", server.url, "--rate", "100", "--requests", "4", "--json",
                         "--warm-up", "0", "--output-tokens", "2"))  # fmt: skip
    assert (found["interrupted"], found["failed_ratio"]) == (True, 0.0)
    assert found["completed"] <= 2


def test_requests_in_flight_are_bounded(ask: Ask) -> None:
    """Requests that had to wait start late, and their delay is reported."""
    with fake_server() as server:
        found = json_result(ask("--url", server.url, "--rate", "5000", "--requests", "20", "--json",
                         "--warm-up", "0", "--at-once", "1", "--output-tokens", "2"))  # fmt: skip
    assert (found["completed"], found["most_at_once"]) == (20, 1)
    assert found["lag_seconds"]["max"] > 0.01
    assert found["ttft_seconds"]["max"] > found["lag_seconds"]["max"]


def test_api_key_is_sent(ask: Ask) -> None:
    with fake_server(needs_key=True) as server:
        run = ("--url", server.url, "--concurrency", "1", "--requests", "2", "--warm-up", "0")
        code, _, err = ask(*run)
        assert code == 1 and "returned 401: use --api-key KEY (" in err and "no such key" in err
        code, _, _ = ask(*run, "--api-key", KEY)
        assert code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "bench needs --rate R, --concurrency N, or --trace FILE"),
        (("--rate", "1", "--concurrency", "1"), 2, "can't be combined"),
        (("--rate", "0"), 2, "--rate is 0; it must be finite and above 0"),
        (("--rate", "1", "--kind", "poem"), 2, "--kind is 'poem'; it must be one of plain, chat"),
        (("--rate", "1", "--url", "ftp://x"), 2, "it must look like http://HOST:PORT"),
        (("--rate", "1", "--url", "http://x:99999"), 2, "--url http://x:99999"),
        (("--rate", "1", "--api-key", "a\nb"), 2, "--api-key has characters"),
        (("--rate", "1", "--prompts", "songs"), 2, "--prompts is 'songs'; it must be text"),
        (("--rate", "1", "--prompts", "tokens", "--endpoint", "chat"), 2, "needs --endpoint"),
        (("--rate", "1", "--endpoint", "x"), 2, "--endpoint is 'x'; it must be chat or"),
        (("--rate", "1", "--extra", "[]"), 2, "--extra must be a JSON object"),
        (("--rate", "1", "--extra", "{"), 2, "--extra is not valid JSON"),
        (("--rate", "1", "--extra", '{"stream": false}'), 2, "--extra has 'stream'"),
        (("--rate", "1", "--input-tokens", "0"), 2, "--input-tokens is 0"),
        (("--rate", "1", "--output-spread", "9"), 2, "--output-spread is 9"),
        (("--rate", "1", "--shared-tokens", "512"), 2, "--shared-tokens is 512"),
        (("--rate", "1", "--burstiness", "-1"), 2, "--burstiness is -1"),
        (("--rate", "1", "--burstiness", "0", "--kind", "rag"), 2, "it must be above 0"),
        (("--rate", "1", "--think-seconds", "1"), 2, "--think-seconds needs --concurrency N"),
        (("--rate", "1", "--jitter-seconds", "1"), 2, "--jitter-seconds needs --trace FILE"),
        (("--rate", "1", "--warm-up", "-1"), 2, "--warm-up is -1"),
        (("--rate", "1", "--slo-tbt", "0"), 2, "--slo-tbt is 0"),
        (("--rate", "1", "--processes", "0"), 2, "--processes is 0"),
        (("--rate", "1", "--requests", "0"), 2, "--requests is 0"),
        (("--rate", "1", "--output", "/no/where"), 2, "--output /no/where"),
        (("--trace", "/no/where"), 2, "/no/where: cannot be read"),
        (
            ("--rate", "1", "--url", "http://127.0.0.1:1"),
            1,
            "127.0.0.1:1/v1/models can't be reached",
        ),
    ],
)
def test_invalid_arguments_exit_with_one_line(
    ask: Ask, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, _, err = ask(*arguments)
    assert found == code and message in err
    assert len(err.splitlines()) == 1
