"""The gateway's own description, in OpenAPI's form: what it checks, what it answers. Served at /v1/openapi.json."""

from typing import Any

from aimgpu.gateway.dialects.table import OPERATIONS

_ERROR = {
    "description": "Refused or failed, in OpenAI's shape.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_STATUSES = ("400", "401", "403", "404", "405", "408", "413", "415", "429", "502", "503", "504")
_ERRORS: dict[str, Any] = dict.fromkeys(_STATUSES, _ERROR)


def describe_gateway(version: str, models: tuple[str, ...] = ()) -> dict[str, Any]:
    """`models`: the names that a request may carry here and now."""
    named = {"type": "string", "enum": list(models)} if models else {"type": "string", "minLength": 1, "maxLength": 256}
    return {
        "openapi": "3.0.3",
        "info": {"title": "AIM GPU Sharing gateway", "version": version},
        "paths": _dialect_paths()
        | {
            "/v1/models": {"get": _read("List the models.", "ModelList")},
            "/v1/models/{id}": {"get": _read("One model.", "Model") | {"parameters": [_ID]}},
            "/v1/chat/completions": {"post": _ask("Chat.", "ChatRequest")},
            "/v1/completions": {"post": _ask("Complete a text.", "CompletionRequest")},
            "/v1/embeddings": {"post": _ask("Embed texts.", "EmbeddingRequest")},
            "/api/chat": {"post": _ask("Chat, as Ollama's clients ask.", "OllamaChatRequest", errors="OllamaError")},
            "/api/tags": {"get": _read("List the models, for Ollama's clients.", "OllamaTags")},
        },
        "components": {
            "schemas": _SCHEMAS | {"ModelName": named},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _dialect_paths() -> dict[str, Any]:
    """Every operation of the dialects' table; those that have a schema of their own are described above."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        errors = "OllamaError" if operation.path.startswith("/api/") else "Error"
        errors = "AnthropicError" if operation.path.startswith("/v1/messages") else errors
        described = _ask(operation.summary, "DialectRequest", errors=errors)
        if not operation.reads_body:
            del described["requestBody"]
        if "{id}" in operation.path:
            described["parameters"] = [*_HEADERS, _ID]
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return paths


_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "maxLength": 256}}
_HEADERS = [
    {"name": "x-aimgpu-priority", "in": "header", "schema": {"type": "string", "enum": ["high", "medium", "low"]}},
    {"name": "x-aimgpu-deadline-ms", "in": "header", "schema": {"type": "integer", "minimum": 1, "maximum": 86_400_000}},
]
_TEXT_OR_LIST = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_SAMPLING: dict[str, Any] = {
    "model": {"$ref": "#/components/schemas/ModelName"},
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer"},
    "temperature": {"type": "number"},
    "top_p": {"type": "number"},
    "seed": {"type": "integer"},
    "n": {"type": "integer"},
    "stop": _TEXT_OR_LIST,
    "user": {"type": "string"},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {"type": "string", "nullable": True}},
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON schema
    return {"type": "object", "required": required, "properties": properties}


_SCHEMAS: dict[str, Any] = {
    "Error": _object(
        ["error"],
        error=_object(
            ["message", "type", "code"],
            message={"type": "string"},
            type={"type": "string"},
            param={"type": "string", "nullable": True},
            code={"type": "string"},
        ),
    ),
    "OllamaError": _object(["error"], error={"type": "string"}),
    "AnthropicError": _object(["type", "error"], type={"type": "string"}, error=_object(["type", "message"])),
    "DialectRequest": _object(["model"], model=_SAMPLING["model"]),
    "Model": _object(
        ["id", "object", "owned_by", "state", "simulated"],
        id={"type": "string"},
        object={"type": "string", "enum": ["model"]},
        created={"type": "integer"},
        owned_by={"type": "string", "enum": ["aimgpu"]},
        root={"type": "string"},
        state={"type": "string"},
        simulated={"type": "boolean"},
        aliases={"type": "array", "items": {"type": "string"}},
        default={"type": "boolean"},
    ),
    "ModelList": _object(["object", "data"], data={"type": "array", "items": {"$ref": "#/components/schemas/Model"}}),
    "OllamaTags": _object(["models"], models={"type": "array", "items": {"type": "object"}}),
    "ChatRequest": _object(["model", "messages"], messages={"type": "array", "minItems": 1, "items": _MESSAGE}, **_SAMPLING),
    "CompletionRequest": _object(["model", "prompt"], prompt=_TEXT_OR_LIST, **_SAMPLING),
    "EmbeddingRequest": _object(["model", "input"], model=_SAMPLING["model"], input=_TEXT_OR_LIST),
    "OllamaChatRequest": _object(
        ["model", "messages"],
        model=_SAMPLING["model"],
        messages={"type": "array", "minItems": 1, "items": _MESSAGE},
        stream={"type": "boolean"},
        options={"type": "object"},
    ),
}


def _read(summary: str, schema: str) -> dict[str, Any]:
    ok = {"description": "OK", "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
    return {"summary": summary, "responses": {"200": ok} | _ERRORS, "security": [{}, {"key": []}]}


def _ask(summary: str, schema: str, *, errors: str = "Error") -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
    streams = {"text/event-stream": {}, "application/x-ndjson": {}, "application/json": {"schema": {"type": "object"}}}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{errors}"}}}
    refused = {status: {"description": "Refused or failed.", "content": content} for status in _STATUSES}
    return {
        "summary": summary,
        "parameters": _HEADERS,
        "requestBody": body,
        "responses": {"200": {"description": "The answer, or a stream of its parts.", "content": streams}} | refused,
        "security": [{}, {"key": []}],
    }
