"""The requests in OpenAPI's words: for tools that make clients or test the server; no route serves it."""

from typing import Any

from pydantic import BaseModel


def describe(model: type[BaseModel]) -> dict[str, Any]:
    """openapi_extra of a route whose body is a model, and whose errors are those of the API."""
    error = {"description": "What is wrong.", "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inline(model.model_json_schema())}},
        },
        "responses": {"4XX": error, "5XX": error},
    }


ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: their targets would be looked for in the whole document. None of ours recurses."""
    definitions = schema.get("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items() if key != "$defs"}

    return resolve(schema)
