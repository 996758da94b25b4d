"""Many streaming connections at once: does a server hold them, and at what cost?

    python scripts/hold_connections.py                       # 1,000 streams; starts a server with a tiny model
    python scripts/hold_connections.py --url http://host:8000 --connections 200

Every stream must bring all its tokens and its end, /health must answer all the while, and afterwards the server must be
idle. Prints one JSON object.
"""

import argparse
import asyncio
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 256,
}


def write_tiny_model(folder: Path) -> None:
    """A config and a tokenizer of single bytes; the weights are drawn at the start."""
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


@contextmanager
def tiny_server(max_num_seqs: int):
    """(URL, process id) of a server with a tiny random model on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        command = [sys.executable, "-m", "jaxvllm.cli", "serve", folder, "--load-format", "dummy", "--device", "cpu"]
        command += ["--port", "0", "--max-num-seqs", str(max_num_seqs), "--max-num-batched-tokens", "1024"]
        command += ["--disable-uvicorn-access-log"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"Serving .* on (127\.0\.0\.1:\d+)", line):
                    break
            else:
                raise RuntimeError("the server did not start")
            yield f"http://{found.group(1)}", process.pid
        finally:
            process.terminate()
            process.communicate()


class Connection:
    """One request on a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80

    async def send(self, method: str, path: str, body: dict | None = None) -> int:
        """Send a request; returns the status."""
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        raw = json.dumps(body).encode() if body is not None else b""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        self.writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        status = await self.reader.readuntil(b"\r\n\r\n")
        return int(status.split()[1])

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        rest = b""
        while size := int(await self.reader.readline(), 16):
            rest += (await self.reader.readexactly(size + 2))[:-2]
            *whole, rest = rest.split(b"\n\n")
            for event in whole:
                yield event.removeprefix(b"data: ")

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()


async def stream(url: str, number: int, max_tokens: int) -> tuple[float, float, int]:
    """(seconds to the first event, longest silence, tokens) of one stream.

    Raises: RuntimeError if it does not bring all its tokens and its end.
    """
    body = {"prompt": [number % 250, 7], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, "temperature": 0}
    connection, start = Connection(url), time.monotonic()
    status = await connection.send("POST", "/v1/completions", body)
    if status != 200:
        raise RuntimeError(f"stream {number}: status {status}")
    first, last, silence, num_tokens, is_done = 0.0, time.monotonic(), 0.0, 0, False
    async for event in connection.events():
        now = time.monotonic()
        first = first or now - start
        silence, last = max(silence, now - last), now
        if event == b"[DONE]":
            is_done = True
        else:
            num_tokens += len(json.loads(event)["choices"][0]["token_ids"])
    connection.close()
    if not is_done or num_tokens != max_tokens:
        raise RuntimeError(f"stream {number}: {num_tokens} of {max_tokens} tokens, end seen: {is_done}")
    return first, silence, num_tokens


async def watch_health(url: str, over: asyncio.Event) -> float:
    """The longest time that /health took."""
    longest = 0.0
    while not over.is_set():
        start, connection = time.monotonic(), Connection(url)
        status = await connection.send("GET", "/health")
        if status != 200:
            raise RuntimeError(f"/health: status {status}")
        connection.close()
        longest = max(longest, time.monotonic() - start)
        await asyncio.sleep(0.1)
    return longest


async def gauges(url: str) -> dict[str, float]:
    """The server's numbers of requests."""
    connection = Connection(url)
    await connection.send("GET", "/metrics")
    text = (await connection.reader.read()).decode()
    connection.close()
    found = re.findall(r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\S* (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


async def measure(url: str, num_connections: int, max_tokens: int) -> dict[str, float]:
    """Run the streams; returns what was seen.

    Raises: RuntimeError for a stream that is not complete, or a server that is not idle afterwards.
    """
    over = asyncio.Event()
    health = asyncio.create_task(watch_health(url, over))
    start = time.monotonic()
    results = await asyncio.gather(*(stream(url, i, max_tokens) for i in range(num_connections)))
    elapsed = time.monotonic() - start
    over.set()
    await asyncio.sleep(0.5)
    state = await gauges(url)
    if any(state.values()) or len(state) != 3:
        raise RuntimeError(f"the server is not idle: {state}")
    firsts, silences = sorted(r[0] for r in results), sorted(r[1] for r in results)
    return {
        "connections": num_connections,
        "tokens": sum(r[2] for r in results),
        "seconds": round(elapsed, 2),
        "tokens_per_s": round(sum(r[2] for r in results) / elapsed),
        "first_event_p50_s": round(firsts[len(firsts) // 2], 3),
        "first_event_max_s": round(firsts[-1], 3),
        "longest_silence_p50_s": round(silences[len(silences) // 2], 3),
        "longest_silence_max_s": round(silences[-1], 3),
        "health_max_s": round(await health, 3),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server (default: start one with a tiny model on the CPU)")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of the server that is started")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, args.connections + 200)), hard))
    if args.url is not None:
        print(json.dumps(asyncio.run(measure(args.url, args.connections, args.max_tokens))))
        return
    with tiny_server(args.max_num_seqs) as (url, pid):
        asyncio.run(measure(url, args.connections, args.max_tokens))  # a CPU compiles on first use
        result = asyncio.run(measure(url, args.connections, args.max_tokens))
        status = Path(f"/proc/{pid}/status").read_text()
        result["server_peak_mb"] = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) // 1024
        print(json.dumps(result))


if __name__ == "__main__":
    main()
