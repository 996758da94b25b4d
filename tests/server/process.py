"""A server in a process of its own, as `jaxvllm serve` starts it, over a scripted executor or a real one."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXECUTORS = "tests.engine.fake_executor"
START_S = 180.0  # of a machine that compiles much else at once; a process that ends is noticed at once
SCRIPT = """
import sys
from jaxvllm.engine_args import EngineArgs
if sys.argv[1]:
    EngineArgs.executor = sys.argv[1]
from jaxvllm import cli
sys.exit(cli.main(sys.argv[2:]))
"""


@dataclass
class Server:
    """A running server. get() and post() make one request each, on a connection of their own."""

    process: subprocess.Popen
    port: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict | None = None) -> "Answer":
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.read(), dict(response.headers))
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> "Answer":
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> "Answer":
        raw = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        return self.request("POST", path, raw, {"Content-Type": "application/json"} | headers)

    def stream(self, path: str, body: dict) -> list[dict]:
        """The events of a stream, which must end with [DONE]."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = answer.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", ""), answer.body[-200:]
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def gauges(self) -> dict[str, float]:
        """The metrics without labels' values: name -> value (summed)."""
        values: dict[str, float] = {}
        for line in self.get("/metrics").body.decode().splitlines():
            found = re.match(r"([a-zA-Z_:]+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", line)
            if found and not line.startswith("#"):
                name = found.group(1).removesuffix("_total")
                values[name] = values.get(name, 0.0) + float(found.group(2))
        return values

    def wait_until_idle(self, limit_s: float = 1.0) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            gauges = self.gauges()
            state = [gauges[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting")]
            if state == [0, 0] and gauges["vllm:kv_cache_usage_perc"] == 0:
                return
            assert time.monotonic() < deadline, f"still busy: {state}"
            time.sleep(0.02)


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    def __post_init__(self) -> None:
        self.headers = {name.lower(): value for name, value in self.headers.items()}

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error object, which must have OpenAI's shape and this answer's status."""
        assert self.status >= 400, self.body
        assert self.headers["content-type"] == "application/json"
        error = self.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == self.status and error["message"] and isinstance(error["message"], str)
        return error


@contextlib.contextmanager
def running_server(
    model: Path | None, executor: str = "successor", *options: str, stops: bool = True
) -> Iterator[Server]:
    """Start a server and end it with SIGTERM; it must then end by itself, with status 0 (stops=True).

    Args:
      model: None: the default one.
      executor: of fake_executor, or "module:function"; "": the real one.
    """
    full = executor if ":" in executor or not executor else f"{EXECUTORS}:{executor}"
    model_args = [] if model is None else [str(model)]
    command = [sys.executable, "-c", SCRIPT, full, "serve", *model_args, "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=ROOT)
    server = Server(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.lines.append(line.rstrip())
            if found := re.search(r"Serving .* on 127\.0\.0\.1:(\d+)", line):
                server.port = int(found.group(1))
            if "Application startup complete" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_S) and process.poll() is None, "\n".join(server.lines)
        yield server
        if stops:
            process.terminate()
            assert process.wait(15) == 0, "\n".join(server.lines[-30:])
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()
