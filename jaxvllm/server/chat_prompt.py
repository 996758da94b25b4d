"""A conversation of the API as the prompt that the model's chat template makes of it."""

from typing import Any

from jaxvllm.async_engine import MAX_CHARS_AT_ONCE
from jaxvllm.chat import TRANSFORMERS_ARGUMENTS, split_conversations
from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol import ChatCompletionRequest, RenderRequest, TokenizeRequest
from jaxvllm.server.serving import Serving

# Arguments of rendering, and what transformers would take for one: no variables of a template.
_RESERVED = TRANSFORMERS_ARGUMENTS | {
    *("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "self"),
}


async def render(serving: Serving, request: RenderRequest) -> str:
    """The prompt's text.

    Raises: ApiError, ValueError, NotImplementedError: messages, tools or template variables that cannot be rendered.
    """
    assert request.messages is not None
    [messages] = split_conversations([request.messages])
    tools = _tools(serving, request)
    template = _template(serving, request)
    variables = _variables(serving, request)
    tokenizer = serving.tokenizer

    def apply() -> str:
        try:
            return tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                tools=tools,
                **variables,
            )
        except ValueError:
            raise
        except Exception as error:  # a template is a program over the caller's data: whatever it raises is about that
            raise ApiError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    num_chars = sum(len(message.get("content") or "") for message in messages)
    is_quick = num_chars <= MAX_CHARS_AT_ONCE and not request.continue_final_message and not variables
    return apply() if is_quick else await serving.engine.run_in_thread(apply)


def _tools(serving: Serving, request: RenderRequest) -> list[dict[str, Any]] | None:
    is_hidden = (
        serving.config.exclude_tools_when_tool_choice_none
        and isinstance(request, ChatCompletionRequest)
        and request.tool_choice == "none"
    )
    if not request.tools or is_hidden:
        return None
    return [tool.model_dump(exclude_unset=False, exclude_none=True) for tool in request.tools]


def _template(serving: Serving, request: RenderRequest) -> str | None:
    if request.chat_template is None:
        return serving.config.chat_template
    if not serving.config.trust_request_chat_template:
        raise ApiError(
            "chat_template of a request is not trusted here: start the server with --trust-request-chat-template.",
            param="chat_template",
        )
    return request.chat_template


def _variables(serving: Serving, request: RenderRequest) -> dict[str, Any]:
    variables = {**serving.config.default_chat_template_kwargs, **(request.chat_template_kwargs or {})}
    if isinstance(request, ChatCompletionRequest) and request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    reserved = sorted(variables.keys() & _RESERVED)
    if reserved:
        raise ApiError(
            f"chat_template_kwargs must not set {', '.join(reserved)}: use the fields of the request.",
            param="chat_template_kwargs",
        )
    if isinstance(request, ChatCompletionRequest) and request.documents is not None:
        variables["documents"] = request.documents
    return variables


async def prompt_of(
    serving: Serving, request: ChatCompletionRequest | TokenizeRequest, truncate_to: int | None = None
) -> tuple[str, list[int]]:
    """A conversation's text and ids; the template has written the begin token itself."""
    text = await render(serving, request)
    return text, await serving.tokenize(text, bool(request.add_special_tokens), truncate_to)
