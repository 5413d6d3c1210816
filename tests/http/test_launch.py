"""Real servers as processes: they come up, answer, drain, survive a dead engine, and leave nothing behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner
from tiny_folder import make_tiny_text
from toy_door import png_url

from triptych.cli import main

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "ignore_eos": True}


@dataclass
class Server:
    """`triptych serve` as a process; its engine is its only child."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def engine(self) -> psutil.Process:
        return next(
            child for child in psutil.Process(self.process.pid).children() if "engine_main" in " ".join(child.cmdline())
        )

    def chat(self, **body: object) -> httpx.Response:
        message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **body}
        return httpx.post(self.url + CHAT, json=message, timeout=60)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return make_tiny_text(tmp_path_factory.mktemp("models") / "tiny-text")


@contextlib.contextmanager
def started(folder: Path, tmp_path: Path, *flags: str) -> Iterator[Server]:
    log = tmp_path / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "triptych.cli", "serve", str(folder), "--port", "0", "--num-threads", "1", *flags],
            stderr=file,
            env={**os.environ, "COLUMNS": "200", "TMPDIR": str(tmp_path)},
            text=True,
        )
    try:
        found = wait_for(lambda: re.search(r"Ready on (\S+)", log.read_text()) or process.poll() is not None, 120)
        assert process.poll() is None, log.read_text()
        yield Server(process, found[1], log)
    finally:
        process.terminate()
        process.wait(30)


def wait_for(condition, timeout_s=60.0):
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)
    return found


def test_server_answers_and_its_stages_add_up(folder, tmp_path):
    """The whole way through two processes: same greedy answer whole and streamed, stages that sum to the measured
    TTFT, bad requests that change nobody's answer, metrics of the engine, one log line a request; then a drained,
    clean end."""
    with started(folder, tmp_path) as server:
        assert httpx.get(f"{server.url}/ready").json()["models"] == ["tiny-text"]
        whole = server.chat(temperature=0, include_stages=True).json()
        streamed = server.chat(temperature=0, stream=True).text
        pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert (
            "".join(p["choices"][0]["delta"].get("content", "") for p in pieces)
            == (whole["choices"][0]["message"]["content"])
        )
        stages = dict(whole["usage"]["stages"])
        ttft_ms, _ = stages.pop("ttft_ms"), stages.pop("tpot_ms")
        assert abs(sum(stages.values()) - ttft_ms) < 2
        assert {"request_parse_ms", "llm_prefill_ms", "first_stream_ms"} <= stages.keys()
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'triptych_engine_up{model="tiny-text"} 1.0' in metrics
        assert "triptych_kv_blocks_total" in metrics
        assert (
            server.chat(messages=[{"role": "user", "content": "x" * 5000}]).json()["error"]["code"] == "prompt_refused"
        )
        check_poison(server)

        with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            engine = server.engine()
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(rest)
        assert server.process.wait(30) == 0

    assert not engine.is_running()
    assert [path.name for path in tmp_path.glob("triptych-*")] == []
    logged = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith('{"request_id"')]
    codes = [line["code"] for line in logged]
    assert codes[:3] == ["ok", "ok", "prompt_refused"]
    assert len(codes) == 4 + 2 * len(QUESTIONS) + len(POISON)


QUESTIONS = [f"what is {number} and {number + 1}?" for number in range(6)]
POISON = [
    {"messages": 5},
    {"max_tokens": "x"},
    {"max_token": 1},
    {"temperature": float(2**70)},
    {"cache_salt": "s" * 10**6},
    {"messages": [{"role": "user", "content": "y" * 10**5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": png_url(1, 1)}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}},
    {"response_format": {"type": "lark", "grammar": "start: ("}},
    {"stop_token_ids": [10**9]},
    {"logit_bias": {"999999": 1}},
]


def check_poison(server: Server) -> None:
    """Each bad request beside good ones: a 4xx for it, the quiet run's answers for the others."""

    def ask(question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
        return server.chat(**body, ignore_eos=True).json()["choices"][0]["message"]["content"]

    quiet = [ask(question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS) + len(POISON)) as pool:
        bad = [pool.submit(server.chat, **poison) for poison in POISON]
        good = list(pool.map(ask, QUESTIONS))
        statuses = [future.result().status_code for future in bad]

    assert good == quiet
    assert [status for status in statuses if not 400 <= status < 500] == []


@pytest.mark.full
def test_dead_engine_is_replaced_and_a_dead_front_leaves_none(folder, tmp_path):
    """When the engine dies, its requests end with an error, /ready says so, and a new engine serves; when the front is
    killed, the engine ends by itself."""
    with started(folder, tmp_path) as server:
        first = server.engine()
        with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            first.kill()
            rest = [line for line in lines if line]
        assert '"error"' in rest[-2] or '"finish_reason":"length"' in "".join(rest)  # it may have been done already
        assert httpx.get(f"{server.url}/health").status_code == 200

        def is_replaced() -> bool:
            return httpx.get(f"{server.url}/ready", timeout=10).status_code == 200 and server.engine().pid != first.pid

        wait_for(is_replaced, 120)
        assert server.chat().status_code == 200
        assert 'triptych_engine_restarts_total{model="tiny-text"} 1.0' in httpx.get(f"{server.url}/metrics").text

        second = server.engine()
        server.process.kill()
        server.process.wait(30)
        wait_for(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"architectures": ["NoSuchModel"]}'), "NoSuchModel"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"nonsense" * 10), "safetensors"),
    ],
)
def test_bad_folder_is_said_at_the_start(tmp_path, monkeypatch, harm, words):
    """A folder that cannot be served ends `serve` with code 1 and one line that says why; nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = make_tiny_text(tmp_path / "bad")
    harm(folder)
    ended = CliRunner().invoke(main, ["serve", str(folder), "--port", "0"])

    assert ended.exit_code == 1
    assert ended.stderr.splitlines()[-1].startswith("Error: ")
    assert words in ended.stderr
    assert list(tmp_path.glob("triptych-*")) == []
    assert not [child for child in psutil.Process().children() if "engine_main" in " ".join(child.cmdline())]


def test_engine_that_cannot_load_is_said_with_its_own_words(folder, tmp_path, monkeypatch):
    """What fails in the engine's process is the front's one line."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = CliRunner().invoke(main, ["serve", str(folder), "--port", "0", "--device", "abacus"])

    assert ended.exit_code == 1
    assert "abacus" in ended.stderr.splitlines()[-1]
    assert list(tmp_path.glob("triptych-*")) == []
