"""Runs the server: binds, starts the engine, serves; ends on a signal, or when the engine core has died."""

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import uvicorn
from uvicorn.config import create_ssl_context

from jaxvllm.async_engine import AsyncEngine
from jaxvllm.cli_args import flag
from jaxvllm.engine_args import EngineArgs
from jaxvllm.server.app import find_middleware, make_app
from jaxvllm.server.cli import DEFAULT_HOST
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http import BoundedHttpProtocol
from jaxvllm.server.serving import Serving

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 5.0  # a server whose core has died answers /health with 503 for so long before it ends
FORCE_CHECK_S = 0.1  # how often a wait for running requests looks for a second Ctrl-C
MAX_RESTARTS, RESTART_WINDOW_S = 3, 600.0
BACKLOG = 2048
MAX_OPEN_FILES = 65536


def serve(args: argparse.Namespace, engine_args: EngineArgs, config: ServerConfig) -> int:
    """Serve until a signal (exit status 0) or the core's death (1)."""
    logging.getLogger("jaxvllm").setLevel(logging.INFO)
    _allow_many_files()
    for path in config.middleware:
        find_middleware(path)  # a bad one is refused before the model is loaded
    _check_tls(args)
    listener = _bind(args)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while the model loads; it must clean up
    try:
        # In no variable of this function, which would keep it when it is dead and another has taken its place.
        serving = Serving(AsyncEngine(engine_args, step_timeout_s=args.step_timeout), config)
        runner = _Runner(serving, engine_args, args)
        try:
            asyncio.run(runner.run(listener), loop_factory=_loop_factory())
        finally:
            serving.engine.shutdown()
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)
    return 1 if runner.has_failed else 0


def _allow_many_files() -> None:
    """Every connection is an open file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_tls(args: argparse.Namespace) -> None:
    """Try what uvicorn will make of the options for TLS, before minutes go into loading a model.

    Raises: ValueError that names them.
    """
    if args.ssl_certfile is None:
        return
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ciphers")
    given = {flag(name): getattr(args, name) for name in names if getattr(args, name) is not None}
    files = [args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs]
    try:
        for path in filter(None, files):
            Path(path).open("rb").close()  # OpenSSL does not say which one it cannot read
        certfile, keyfile, ca_certs = files
        create_ssl_context(
            certfile, keyfile, None, ssl.PROTOCOL_TLS_SERVER, args.ssl_cert_reqs, ca_certs, args.ssl_ciphers
        )
    except OSError as error:  # an SSLError is one
        words = ", ".join(f"{option} {value}" for option, value in given.items())
        raise ValueError(f"TLS cannot start with {words}: {error}.") from error


def _bind(args: argparse.Namespace) -> socket.socket:
    """The listening socket, before minutes go into loading a model.

    Raises: OSError that names the address.
    """
    try:
        if args.uds is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(args.uds)
            return listener
        host = args.host or DEFAULT_HOST
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, args.port))
    except OSError as error:
        where = args.uds or f"{args.host or DEFAULT_HOST}:{args.port}"
        raise OSError(f"cannot listen on {where}: {error}.") from error
    return listener


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """uvicorn's server, which lets requests end before it ends itself."""

    def __init__(self, config: uvicorn.Config, serving: Serving, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._serving = serving
        self._shutdown_timeout_s = shutdown_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the server; uvicorn would raise them again at the end, before the engine is down."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new requests, give running ones their time (until a second Ctrl-C), abort the rest."""
        self._serving.is_draining = True
        deadline = time.monotonic() + self._shutdown_timeout_s
        while not await self._serving.engine.drain(min(FORCE_CHECK_S, deadline - time.monotonic())):
            if self.force_exit or time.monotonic() >= deadline:
                await self._serving.engine.abort_all()
                break
        await super().shutdown(sockets)


class _Runner:
    """The server and the watch over its engine.

    Attributes:
      has_failed: the core died and was not replaced.
    """

    def __init__(self, serving: Serving, engine_args: EngineArgs, args: argparse.Namespace) -> None:
        self.has_failed = False
        self._serving = serving
        self._engine_args = engine_args
        self._args = args
        self._restarts: deque[float] = deque()
        self._server = _Server(_uvicorn_config(serving, args), serving, args.shutdown_timeout)

    async def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket."""
        listener.listen(BACKLOG)
        name = listener.getsockname()
        where = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else name
        logger.info("Serving %s on %s", ", ".join(self._serving.config.served_model_names), where)
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve([listener])
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            # No variable holds the error: its traceback would keep the dead engine as long as the next one lives.
            logger.error("%s", await self._serving.engine.wait_until_dead())
            if not self._may_restart() or not await self._restart():
                break
        self.has_failed = True
        await asyncio.sleep(DEATH_NOTICE_S)
        self._server.should_exit = True

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        may_restart = self._args.restart_engine and not self._server.should_exit
        return may_restart and len(self._restarts) <= MAX_RESTARTS

    async def _restart(self) -> bool:
        """Put a new engine in the place of the dead one; until it is ready, requests get the dead one's error."""
        logger.warning("Starting a new engine core")
        await asyncio.to_thread(self._serving.engine.shutdown)
        give_up = Event()
        start = partial(AsyncEngine, step_timeout_s=self._args.step_timeout, give_up=give_up)
        try:
            engine = await asyncio.to_thread(start, self._engine_args)
        except asyncio.CancelledError:  # the server ends, and would wait for the thread
            give_up.set()
            raise
        except Exception:  # whatever it is, there is no engine: the log says why, and the server ends
            logger.exception("The engine core could not be started again")
            return False
        self._serving.engine = engine
        return True


def _uvicorn_config(serving: Serving, args: argparse.Namespace) -> uvicorn.Config:
    quiet = {path.strip() for path in (args.disable_access_log_for_endpoints or "").split(",") if path.strip()}
    if quiet:
        logging.getLogger("uvicorn.access").addFilter(lambda record: not _is_about(record, quiet))
    return uvicorn.Config(
        make_app(serving),
        http=BoundedHttpProtocol,
        ws="none",
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        server_header=False,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or "TLSv1",
        timeout_graceful_shutdown=int(DEATH_NOTICE_S),
        backlog=BACKLOG,
    )


def _is_about(record: logging.LogRecord, paths: set[str]) -> bool:
    """Whether a line of the access log is about one of the paths."""
    return isinstance(record.args, tuple) and len(record.args) > 2 and str(record.args[2]).split("?")[0] in paths
