"""Random JSON schemas of the kinds that people write, and the completion of a text that was cut."""

import random
from typing import Any

import numpy as np
from llguidance import LLMatcher

from jaxvllm.structured_output.manager import GrammarTokenizer

WORDS = ["id", "name", "tags", "π", 'a"b', "x y", "größe"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that jsonschema and llguidance understand alike."""
    leaves = [_integer, _number, _string, _enum, _constant]
    inner = [_object, _array, _any_of]
    return rng.choice(leaves if depth >= 2 else inner if depth == 0 else leaves + inner)(rng, depth)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 500)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 400)}
    return {"type": "integer"} | {name: bounds[name] for name in bounds if rng.random() < 0.7}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number"} | rng.choice([{}, {"minimum": 0, "exclusiveMaximum": 1}])


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    limits = [{"maxLength": 4}, {"minLength": 1, "maxLength": 6}, {"pattern": "^[a-c]{2,5}$"}, {"format": "date"}]
    return {"type": "string"} | rng.choice(limits)


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 7, None, True, -1.5], rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": "fix"}, {"type": ["integer", "null"]}])


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}


def complete(tokenizer: GrammarTokenizer, grammar: str, token_ids: list[int], max_tokens: int = 400) -> bytes:
    """A whole text that begins with the tokens and follows the grammar, byte by byte (K-bytes: id = byte).

    Raises: AssertionError if there is none, or it is too long.
    """
    matcher = LLMatcher(tokenizer.llguidance, grammar)
    assert matcher.consume_tokens(token_ids), matcher.get_error()
    ids = list(token_ids)
    preferred = [*b'"}],:0123456789', *range(33, 256), *range(33)]
    while not matcher.is_accepting():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ids.append(next(token for token in preferred if mask[token]))
        assert matcher.consume_token(ids[-1]) and len(ids) < max_tokens
    return tokenizer.llguidance.decode_bytes(ids)
