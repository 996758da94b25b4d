"""Engine: the Python API. `Engine(model).generate(prompts, sampling_params)` gives list[RequestOutput]."""

import contextlib
import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from jaxvllm.chat import Message, read_chat_template, split_conversations
from jaxvllm.engine_args import EngineArgs
from jaxvllm.errors import EngineDeadError
from jaxvllm.input_processor import ProcessedRequest, Prompt, naming_prompt
from jaxvllm.llm_engine import LLMEngine
from jaxvllm.metrics import Metric
from jaxvllm.outputs import RequestOutput
from jaxvllm.owner import Owner
from jaxvllm.progress import Progress
from scheduler.field_checks import as_list
from scheduler.sampling_params import RequestOutputKind, SamplingParams

Prompts = Prompt | Sequence[Prompt]


class Engine:
    """A language model that answers batches of prompts.

    The engine core runs in a child process, which ends with the engine (shutdown(), `with`, garbage collection or the
    interpreter's end). Threads may share an engine: their calls take turns, and only the prompts of one call are
    batched (AsyncEngine serves many callers at once). A fork of this process may not use it.

    Args:
      model: a local folder in Hugging Face's layout, a GGUF file, a hub id, or None for SmolLM2-135M-Instruct.
      kwargs: see EngineArgs; those of vLLM's LLM.

    Raises:
      ValueError: a model that cannot be served, or a bad value.
      NotImplementedError: an argument of vLLM that is not built here.
      TypeError: an unknown argument.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        args = EngineArgs(model, **kwargs)
        self._chat_template = read_chat_template(args.chat_template)
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._counter = itertools.count()
        self._lock = threading.RLock()  # not Lock: a progress bar of the caller's may ask for metrics
        self._owner = Owner()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the whole batch is served together.

        All prompts are checked before the first is queued: an error costs no other request.

        Args:
          prompts: one prompt or a list. A prompt is text, a list of token ids, or a dict with `prompt` or
            `prompt_token_ids` and, if wanted, `cache_salt`.
          sampling_params: for all prompts, or a list with one for each; None: get_default_sampling_params().
          use_tqdm: show a progress bar; or a function that makes one, called as tqdm is.
          priority: one number a prompt, lower first, with scheduling_policy="priority".

        Returns: one RequestOutput a prompt, in the order of the prompts. One that the core refused has finish_reason
          "error" and the message as stop_reason.
        Raises:
          ValueError, NotImplementedError: a prompt or a parameter that cannot be served, or requests of llm_engine's
            are unfinished, whose outputs this call would take from their caller.
          EngineDeadError: the core died.
        """
        if any(request is not None for request in _as_sequence(lora_request)):
            raise NotImplementedError("lora_request is not supported: leave it out.")
        if tokenization_kwargs:
            raise NotImplementedError(f"tokenization_kwargs={tokenization_kwargs!r} is not supported: leave it out.")
        prompt_list = _as_list(prompts)
        params_list = self._params_list(sampling_params, len(prompt_list))
        priorities = [0] * len(prompt_list) if priority is None else as_list("priority", priority)
        if len(priorities) != len(prompt_list):
            raise ValueError(f"priority has {len(priorities)} numbers for {len(prompt_list)} prompts: give one each.")
        with self._turn():
            self._check_idle()
            requests = []
            for prompt, params, number in zip(prompt_list, params_list, priorities, strict=True):
                request_id, params = str(next(self._counter)), _final_only(params)
                with naming_prompt(len(requests), len(prompt_list)):
                    requests.append(self.llm_engine.process_request(request_id, prompt, params, priority=number))
            return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
          messages: [{"role": "user", "content": "..."}], or a list of such lists.
          sampling_params, use_tqdm: as in generate().
          chat_template: Jinja text, or a file of it, in the place of the model's own.
          continue_final_message: go on with the last message instead of answering it (add_generation_prompt=False).
          tools: function descriptions, shown to the template.
          chat_template_kwargs: further variables of the template; they win over the arguments above.

        Returns: one RequestOutput a conversation, in order.
        Raises: as generate(); ValueError too if there is no template or it refuses the messages.
        """
        if chat_template_content_format not in ("auto", "string"):
            raise NotImplementedError(
                f"chat_template_content_format={chat_template_content_format!r} is not supported: use 'auto'."
            )
        if mm_processor_kwargs:
            raise NotImplementedError("mm_processor_kwargs is not supported: leave it out.")
        variables = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = [self.render_chat(conversation, **variables) for conversation in split_conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def render_chat(self, messages: Sequence[Message], **template_args: Any) -> dict[str, Any]:
        """One conversation as a prompt for generate(); template_args as Tokenizer.apply_chat_template takes them."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: set skip_tokenizer_init=False.")
        template_args["chat_template"] = read_chat_template(template_args.get("chat_template")) or self._chat_template
        text = tokenizer.apply_chat_template(messages, **template_args)
        # The template has written the begin token itself.
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate() uses where it is given none: the model's generation_config.json over vLLM's defaults."""
        return self.llm_engine.model.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests are running."""
        with self._turn():
            return self.llm_engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """What the engine has done so far: counters and gauges with vLLM's names."""
        with self._turn():
            return self.llm_engine.get_metrics()

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Pooling models are not supported."""
        raise NotImplementedError("Engine.encode is not supported: there are no pooling models.")

    def embed(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Embedding models are not supported."""
        raise NotImplementedError("Engine.embed is not supported: there are no embedding models.")

    def classify(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Classification models are not supported."""
        raise NotImplementedError("Engine.classify is not supported: there are no classification models.")

    def score(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Scoring models are not supported."""
        raise NotImplementedError("Engine.score is not supported: there are no scoring models.")

    def beam_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Beam search is not supported."""
        raise NotImplementedError("Engine.beam_search is not supported: use generate().")

    def shutdown(self) -> None:
        """End the core and free the device, after a call that runs in another thread; may be called again."""
        if self._owner.is_here():
            with self._lock:
                self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Keep other threads out: requests of two calls would take each other's outputs.

        Raises: RuntimeError in a fork, where the core would hear two processes at once.
        """
        self._owner.check()
        with self._lock:
            yield

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, Sequence):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(
                f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one for all, or one each."
            )
        return list(params)

    def _check_idle(self) -> None:
        """Raises: ValueError while requests run that this engine's own caller added, whose outputs step() returns."""
        num_others = self.llm_engine.get_num_unfinished_requests()
        if num_others:
            # vLLM returns them among those of the prompts.
            raise ValueError(
                f"llm_engine has {num_others} unfinished requests of its own caller, and generate() would take their "
                "outputs: call llm_engine.step() until it has none, or llm_engine.drop_requests(), before."
            )

    def _run(self, requests: list[ProcessedRequest], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Step until the requests have finished; if that fails or is interrupted, none of them stays behind."""
        request_ids = [request.caller.request_id for request in requests]
        outputs: dict[str, RequestOutput] = {}
        wanted = set(request_ids)
        progress = Progress(len(request_ids), use_tqdm)
        try:
            self.llm_engine.add_requests(requests)
            while len(outputs) < len(request_ids):
                for output in self.llm_engine.step():
                    if output.request_id in wanted:
                        outputs[output.request_id] = output
                        progress.finish(output)
        except BaseException:
            self._drop(request_ids)
            raise
        finally:
            progress.close()
        return [outputs[request_id] for request_id in request_ids]

    def _drop(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):  # the error that brought us here says it
            self.llm_engine.drop_requests(request_ids)


def _as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or many, as a list: text, a dict, or a sequence of numbers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if getattr(prompts, "ndim", 0) > 0:
        prompts = prompts.tolist()  # type: ignore[union-attr]  # an array of one or of two dimensions
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be text, token ids, a dict, or a list of those, got {type(prompts).__name__}.")
    items: list[Any] = list(prompts)  # type: ignore[arg-type]
    return [items] if items and not any(_is_prompt(item) for item in items) else items


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_prompt(item: Any) -> bool:
    """Whether an item of a list is a prompt of its own and not one id of a prompt."""
    return isinstance(item, str | Mapping | Sequence) or getattr(item, "ndim", 0) > 0


def _final_only(params: SamplingParams) -> SamplingParams:
    """The same parameters, for a caller who looks at the end only."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params={params!r} must be a SamplingParams.")
    params = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


LLM = Engine  # vLLM's name
