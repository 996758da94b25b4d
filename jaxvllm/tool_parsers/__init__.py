"""Tool calls found in what a model wrote, by the style in which it was trained to write them."""

from jaxvllm.tool_parsers.base import (
    ContentDelta,
    ParsedMessage,
    ToolCall,
    ToolDelta,
    ToolParser,
    ToolStream,
    make_tool_call_id,
)
from jaxvllm.tool_parsers.json_styles import HermesToolParser, Llama3JsonToolParser

__all__ = [
    "TOOL_PARSERS",
    "ContentDelta",
    "ParsedMessage",
    "ToolCall",
    "ToolDelta",
    "ToolParser",
    "ToolStream",
    "get_tool_parser",
    "make_tool_call_id",
]

TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesToolParser, "llama3_json": Llama3JsonToolParser}


def get_tool_parser(name: str) -> type[ToolParser]:
    """The parser that vLLM's --tool-call-parser calls by this name.

    Raises: ValueError for an unknown name.
    """
    if name not in TOOL_PARSERS:
        raise ValueError(f"tool_call_parser={name!r} must be one of {', '.join(sorted(TOOL_PARSERS))}.")
    return TOOL_PARSERS[name]
