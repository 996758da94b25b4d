"""LLMEngine: requests in, RequestOutputs out, one step a call; Engine is the convenient face of it."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from jaxvllm.config import EngineConfig
from jaxvllm.core_client import CoreClient, make_client
from jaxvllm.core_messages import CoreMetrics
from jaxvllm.engine_args import EngineArgs
from jaxvllm.errors import EngineDeadError
from jaxvllm.input_processor import InputProcessor, ProcessedRequest, Prompt
from jaxvllm.metrics import FrontEndStats, Metric
from jaxvllm.model_info import ModelInfo, read_model_info
from jaxvllm.model_source import ModelSource, load_tokenizer, read_json, resolve
from jaxvllm.models.registry import MODELS
from jaxvllm.output_processor import OutputProcessor
from jaxvllm.outputs import RequestOutput
from jaxvllm.sampling_checks import SamplingFeatures
from jaxvllm.stats_log import StatsLog
from jaxvllm.tokenizer import Tokenizer
from scheduler.field_checks import as_int, as_text
from scheduler.outputs import EngineCoreOutputs
from scheduler.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1


class LLMEngine:
    """Drives one engine core. For one thread at a time.

    Args:
      client: a started core; owned: shut down with the engine.
    """

    def __init__(
        self, config: EngineConfig, model: ModelInfo, tokenizer: Tokenizer | None, client: CoreClient, log_stats: bool
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._client = client
        self._core_info = client.wait_until_ready()
        self._stats = FrontEndStats.of_engine(config, self._core_info)
        features = SamplingFeatures.of_config(config)
        self._input_processor = InputProcessor(model, tokenizer, self._core_info, config.seed, features)
        self._output_processor = OutputProcessor(tokenizer.backend if tokenizer else None, self._stats)
        self._stats_log = StatsLog(self._stats) if log_stats else None

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, is_server: bool = False, give_up: Event | None = None
    ) -> "LLMEngine":
        """Find the model, start the core, read the tokenizer meanwhile.

        Args:
          is_server: where the caller leaves limits open, take vLLM's for a server, not those for batches.
          give_up: set by another thread, ends the wait for a core process with EngineDeadError.

        Raises: ValueError for a model, an argument or a tokenizer that cannot be served; OSError if the hub cannot be
          reached.
        """
        source = resolve(args.model, revision=args.revision, download_dir=args.download_dir, supported=MODELS)
        _check_load_format(args.load_format, source.path)
        config = args.create_engine_config(source.config.max_context, is_server=is_server)
        local = dataclasses.replace(config.model, model=str(source.path))
        config = dataclasses.replace(config, model=local)
        client = make_client(config, args.use_multiprocess, give_up)
        try:
            tokenizer = None
            if not args.skip_tokenizer_init:
                tokenizer = load_tokenizer(source, args.tokenizer, args.tokenizer_revision, args.download_dir)
            generation_config = _generation_config(args, source)
            limit = _max_output_tokens(args, generation_config)
            model = read_model_info(source, tokenizer, generation_config, limit)
            return cls(config, model, tokenizer, client, not args.disable_log_stats)
        except BaseException:
            client.shutdown()
            raise

    @property
    def client(self) -> CoreClient:
        """The core."""
        return self._client

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self._core_info.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue one request.

        Args:
          request_id: the caller's name for it; free again once the request has finished.
          prompt: text, token ids, or a dict with prompt or prompt_token_ids and, if wanted, cache_salt.
          arrival_time: seconds since the epoch; None: now.
          priority: lower is served first, with scheduling_policy="priority".

        Raises: ValueError, NotImplementedError: what is wrong with it; nothing was queued.
        """
        self.add_requests(
            [self.process_request(request_id, prompt, params, arrival_time=arrival_time, priority=priority)]
        )

    def process_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> ProcessedRequest:
        """Tokenise and validate a request without queueing it; arguments and errors as in add_request."""
        request_id = as_text("request_id", request_id)
        priority = as_int("priority", priority)
        if abs(priority) > MAX_PRIORITY:
            raise ValueError(f"priority={priority} must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}].")
        if priority != 0 and self.config.scheduler.policy != "priority":
            raise ValueError(
                f"priority={priority} has no meaning with scheduling_policy={self.config.scheduler.policy!r}: "
                "start the engine with scheduling_policy='priority', or leave it out."
            )
        if self._output_processor.is_running(request_id):
            raise ValueError(f"request_id={request_id!r} is in use: give every running request an id of its own.")
        return self._input_processor.process(request_id, prompt, params, priority=priority, arrival_time=arrival_time)

    def add_requests(self, requests: Sequence[ProcessedRequest]) -> None:
        """Queue requests that process_request made, all in one message: the core may schedule them together."""
        for request in requests:
            self._output_processor.add_request(request.caller, request.children)
        try:
            self._client.add_requests([child for request in requests for child in request.children])
        except BaseException:
            with contextlib.suppress(EngineDeadError):
                self.drop_requests([request.caller.request_id for request in requests])
            raise

    def step(self) -> list[RequestOutput]:
        """Wait for the core's next outputs and return what they mean; [] without unfinished requests.

        Raises: EngineDeadError: the core died; all requests are lost.
        """
        if not self._output_processor.has_unfinished_requests():
            return []
        request_outputs = self.handle_outputs(self._client.get_outputs())
        if self._stats_log is not None and self._stats_log.is_due():
            self.take_core_metrics(self._client.metrics())
        return request_outputs

    def handle_outputs(self, outputs: EngineCoreOutputs) -> list[RequestOutput]:
        """What outputs of the core mean for the callers; aborts in the core what a stop string has ended."""
        result = self._output_processor.process_outputs(outputs)
        if result.aborts:
            self._client.abort_requests(result.aborts)
        return result.request_outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests early; unknown and finished ids are ignored. step() reports each once, as aborted."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        internal_ids = self._output_processor.internal_ids(ids)
        if internal_ids:
            self._client.abort_requests(internal_ids)

    def drop_requests(self, request_ids: Sequence[str]) -> None:
        """Abort requests whose outputs nobody will fetch."""
        internal_ids = self._output_processor.internal_ids(request_ids)
        self._output_processor.forget(request_ids)
        if internal_ids:
            self._client.abort_requests(internal_ids)

    def forget_requests(self, request_ids: Sequence[str]) -> None:
        """Let go of requests of a core that is dead."""
        self._output_processor.forget(request_ids)

    @property
    def last_core_metrics(self) -> CoreMetrics:
        """What the core said of itself last."""
        return self._stats.core

    def has_unfinished_requests(self) -> bool:
        """Whether step() has more to report."""
        return self._output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """How many requests wait or run."""
        return self._output_processor.num_unfinished_requests()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids.

        Raises: ValueError without a tokenizer, or for a text that is certain to be longer than max_model_len.
        """
        return self._input_processor.tokenize(text, add_special_tokens=add_special_tokens)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer.

        Raises: ValueError with skip_tokenizer_init=True.
        """
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer: it was started with skip_tokenizer_init=True.")
        return self.tokenizer.hf

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests are running."""
        return self._client.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """What the engine has done so far."""
        return self.take_core_metrics(self._client.metrics())

    def take_core_metrics(self, core: CoreMetrics) -> list[Metric]:
        """Note what the core says of itself, and write the statistics line if it is due; returns all metrics."""
        self._stats.core = core
        if self._stats_log is not None and self._stats_log.is_due():
            self._stats_log.write(core)
        return self._stats.to_metrics()

    def shutdown(self) -> None:
        """End the core and free the device; may be called again."""
        self._client.shutdown()


def _check_load_format(load_format: str, path: Path) -> None:
    is_gguf = path.is_file()
    if load_format == "gguf" and not is_gguf:
        raise ValueError(f"load_format='gguf', but {path} is a folder: name the .gguf file, or use load_format='auto'.")
    if load_format == "safetensors" and (is_gguf or not any(path.glob("*.safetensors"))):
        raise ValueError(f"load_format='safetensors', but {path} has no .safetensors file: use load_format='auto'.")


def _generation_config(args: EngineArgs, source: ModelSource) -> Mapping[str, Any]:
    """Defaults for requests: "auto" takes the model's file, "vllm" none, a folder that folder's file."""
    if args.generation_config == "auto":
        chosen = source.generation_config
    elif args.generation_config == "vllm":
        chosen = {}
    else:
        file = Path(args.generation_config).expanduser() / "generation_config.json"
        if not file.exists():
            raise ValueError(
                f"generation_config={args.generation_config!r} must be 'auto', 'vllm' or a folder with a "
                "generation_config.json."
            )
        chosen = read_json(file)
    return {**chosen, **(args.override_generation_config or {})}


def _max_output_tokens(args: EngineArgs, generation_config: Mapping[str, Any]) -> int | None:
    """max_new_tokens that the caller chose: a limit, as in vLLM's server. The model's own is but a default."""
    is_own = args.generation_config not in ("auto", "vllm")
    chosen = generation_config if is_own else args.override_generation_config or {}
    return chosen.get("max_new_tokens")
