"""LLM inference for NVIDIA GPUs in JAX, after the architecture of vLLM V1.

Names are imported on first use: the core's process and `jaxvllm --help` need few of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxvllm.async_engine import AsyncEngine, AsyncLLM, AsyncLLMEngine
    from jaxvllm.engine import LLM, Engine
    from jaxvllm.engine_args import EngineArgs
    from jaxvllm.errors import EngineDeadError
    from jaxvllm.llm_engine import LLMEngine
    from jaxvllm.outputs import CompletionOutput, RequestOutput
    from scheduler.repetition import RepetitionDetectionParams
    from scheduler.sampling_params import RequestOutputKind, SamplingParams
    from scheduler.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "EngineDeadError",
    "LLMEngine",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "jaxvllm.engine",
    "AsyncEngine": "jaxvllm.async_engine",
    "AsyncLLM": "jaxvllm.async_engine",
    "AsyncLLMEngine": "jaxvllm.async_engine",
    "CompletionOutput": "jaxvllm.outputs",
    "Engine": "jaxvllm.engine",
    "EngineArgs": "jaxvllm.engine_args",
    "EngineDeadError": "jaxvllm.errors",
    "LLMEngine": "jaxvllm.llm_engine",
    "RepetitionDetectionParams": "scheduler.repetition",
    "RequestOutput": "jaxvllm.outputs",
    "RequestOutputKind": "scheduler.sampling_params",
    "SamplingParams": "scheduler.sampling_params",
    "StructuredOutputsParams": "scheduler.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
