"""POST /tokenize and /detokenize."""

from starlette.responses import Response

from jaxvllm.server.chat_prompt import prompt_of
from jaxvllm.server.errors import ApiError
from jaxvllm.server.protocol import DetokenizeRequest, TokenizeRequest
from jaxvllm.server.responses import Tokens, encode
from jaxvllm.server.serving import Serving


async def tokenize(serving: Serving, request: TokenizeRequest) -> Response:
    """A prompt or a conversation as ids."""
    serving.model_name(request.model)
    tokenizer = serving.tokenizer
    if request.prompt is not None:
        ids = await serving.tokenize(request.prompt, request.add_special_tokens is not False)
    else:
        _, ids = await prompt_of(serving, request)
    answer = Tokens(len(ids), serving.engine.max_model_len, ids)
    if request.return_token_strs:
        answer.token_strs = [tokenizer.backend.id_to_token(i) for i in ids]
    return Response(encode(answer), media_type="application/json")


async def detokenize(serving: Serving, request: DetokenizeRequest) -> Response:
    """Ids as text, special tokens included."""
    serving.model_name(request.model)
    size = serving.engine.model.vocab_size
    bad = next((i for i in request.tokens if not 0 <= i < size), None)
    if bad is not None:
        raise ApiError(f"tokens: {bad} is outside the vocabulary: ids must be in [0, {size - 1}].", param="tokens")
    tokenizer = serving.tokenizer
    text = await serving.engine.run_in_thread(lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))
    return Response(encode({"prompt": text}), media_type="application/json")
