"""Serving: what the routes share; from a request of the API to requests of the engine and back to numbers."""

import itertools
import time
import uuid
from collections.abc import Sequence

from jaxvllm.async_engine import AsyncEngine
from jaxvllm.input_processor import ProcessedRequest, naming_prompt
from jaxvllm.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.config import MAX_CHOICES, ServerConfig
from jaxvllm.server.errors import ApiError, refusal
from jaxvllm.server.logprobs import TokenNames
from jaxvllm.server.middleware import Load
from jaxvllm.server.protocol import GenerationRequest
from jaxvllm.server.responses import PromptTokensDetails, Usage
from jaxvllm.tokenizer import Tokenizer
from jaxvllm.tool_parsers import ToolParser, get_tool_parser
from scheduler.sampling_params import SamplingParams

TextOrIds = str | list[int]


class Serving:
    """The engine and what the server makes of it.

    Attributes:
      engine: replaced when a core has died and another one takes its place.
      is_draining: the server is about to end and takes no new requests.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.load = Load()
        self.created = int(time.time())
        self.is_draining = False
        self.tool_parser: type[ToolParser] | None = None
        if config.tool_call_parser is not None:
            self.tool_parser = get_tool_parser(config.tool_call_parser)
        self._numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises: ApiError without one."""
        if self.engine.tokenizer is None:
            raise ApiError("the server has no tokenizer: only prompts of token ids can be served.")
        return self.engine.tokenizer

    def model_name(self, wanted: str | None) -> str:
        """The name that answers carry.

        Raises: ApiError for a model that is not served.
        """
        names = self.config.served_model_names
        if wanted is not None and wanted not in names:
            raise ApiError(
                f"The model {wanted!r} does not exist: this server has {', '.join(map(repr, names))}.",
                status=404,
                param="model",
            )
        return names[0] if wanted is None else wanted

    def check_open(self) -> None:
        """Raises: ApiError, EngineDeadError if nothing can be served now."""
        if self.is_draining:
            raise ApiError("the server is shutting down.", status=503)
        self.engine.check_alive()

    def names_of_tokens(self, request: GenerationRequest) -> TokenNames:
        """How a request wants tokens written."""
        wanted = request.return_tokens_as_token_ids
        as_ids = self.config.return_tokens_as_token_ids if wanted is None else wanted
        return TokenNames(self.engine.tokenizer, as_ids)

    async def tokenize(self, text: str, add_special_tokens: bool, truncate_to: int | None = None) -> list[int]:
        """A text's ids; the last truncate_to of them, if given."""
        if truncate_to is None:
            return await self.engine.tokenize(text, add_special_tokens=add_special_tokens)
        tokenizer = self.tokenizer
        ids = await self.engine.run_in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return truncated(ids, truncate_to)

    async def engine_requests(
        self, request: GenerationRequest, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams
    ) -> list[ProcessedRequest]:
        """Validate all prompts (text if there is one, ids) before the first one runs."""
        processed: list[ProcessedRequest] = []
        for text, ids in prompts:
            prompt = {"prompt": text, "prompt_token_ids": ids, "cache_salt": request.cache_salt}
            # Not the caller's name for it: two callers may choose the same one.
            request_id = f"{request.request_id or 'request'}-{next(self._numbers)}"
            with naming_prompt(len(processed), len(prompts)):
                processed.append(
                    await self.engine.process_request(request_id, prompt, params, priority=request.priority)
                )
        return processed

    def truncate_to(self, request: GenerationRequest) -> int | None:
        """The number of last prompt tokens that a request wants to keep; -1 stands for what fits."""
        wanted = request.truncate_prompt_tokens
        if wanted == 0:
            raise ApiError("truncate_prompt_tokens=0 must be at least 1, or -1.", param="truncate_prompt_tokens")
        return self.engine.max_model_len - 1 if wanted == -1 else wanted


def check_num_choices(num_prompts: int, n: int | None) -> None:
    """Raises: ApiError for more completions than one request may ask for."""
    if num_prompts * (n or 1) > MAX_CHOICES:
        raise ApiError(
            f"n={n or 1} times {num_prompts} prompts are {num_prompts * (n or 1)} completions; one request may ask "
            f"for {MAX_CHOICES}.",
            param="n" if num_prompts == 1 else "prompt",
        )


def truncated(ids: list[int], truncate_to: int | None) -> list[int]:
    """The last truncate_to ids; all without a number."""
    return ids if truncate_to is None else ids[-truncate_to:]


def new_id(prefix: str, header: str | None, wanted: str | None) -> str:
    """The id of an answer: the caller's (X-Request-Id, or in the body), or a new one."""
    return f"{prefix}-{header or wanted or uuid.uuid4().hex}"


def check_completion(completion: CompletionOutput, request: GenerationRequest) -> None:
    """Raises: ApiError if a completion ended with an error, which is what its request asks for that cannot be done."""
    if completion.finish_reason == "error":
        raise refusal(str(completion.stop_reason), type(request).model_fields, request.other_names())


class UsageCounter:
    """Adds up the tokens of the requests behind one answer."""

    def __init__(self, requests: Sequence[ProcessedRequest], with_details: bool) -> None:
        self._num_prompt = sum(len(request.caller.prompt_token_ids) for request in requests)
        self._num_completion = 0
        self._cached: dict[str, int] = {}
        self._with_details = with_details

    def add(self, output: RequestOutput) -> None:
        """Take an output into account; of kind DELTA or FINAL_ONLY."""
        self._num_completion += sum(len(completion.token_ids) for completion in output.outputs)
        self._cached[output.request_id] = output.num_cached_tokens or 0

    def usage(self) -> Usage:
        """So far."""
        details = PromptTokensDetails(sum(self._cached.values())) if self._with_details else None
        return Usage(self._num_prompt, self._num_completion, self._num_prompt + self._num_completion, details)
