"""The OpenAPI description of the server: every field of `fields.TABLES`, with the ranges that the validation holds to.

Fields that are refused unless they ask for nothing are missing: nobody who follows this file is refused for one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from corellm.openai_api.fields import MAX_CHOICES, MAX_PRIORITY, TABLES, Endpoint
from corellm.openai_api.kinds import MAX_INT32
from corellm.openai_api.tokenize import DETOKENIZE, TOKENIZE
from corellm.openai_api.tools import MAX_TOOLS, TOOL_NAME
from corellm.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from corellm.text.chat_messages import BUILT_IN_TOOLS

Schema = dict[str, Any]


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float, *, above: bool = False) -> Schema:
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


_TEXT: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_COUNT = _integer(1, MAX_INT32)
_COUNT_OR_NONE: Schema = {**_integer(0, MAX_INT32), "description": "0, for the prompt alone, only with echo and n 1."}
_TOKEN_IDS: Schema = {"type": "array", "items": _integer(0, MAX_INT32)}
_SOME_TOKEN_IDS: Schema = {**_TOKEN_IDS, "minItems": 1}
_STOP: Schema = {"type": "string", "minLength": 1}
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": _TEXT,
                "arguments": {"type": ["string", "object"], "contentMediaType": "application/json"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "ipython"]},
        "content": _CONTENT,
    },
    "required": ["role", "content"],
}
_CALLING_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"anyOf": [_CONTENT, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
    },
    "required": ["role", "tool_calls"],
}
_MESSAGES: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": [_MESSAGE, _CALLING_MESSAGE]}}

_JSON_SCHEMA: Schema = {"type": "object"}
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"schema": _JSON_SCHEMA, "strict": {"type": ["boolean", "null"]}},
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_PARAMETERS: Schema = {
    "type": ["object", "null"],
    "properties": {"type": {"anyOf": [{"const": "object"}, {"type": "array", "contains": {"const": "object"}}]}},
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
                "description": {},
                "parameters": _PARAMETERS,
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_BUILT_IN: Schema = {"type": "object", "properties": {"type": {"enum": list(BUILT_IN_TOOLS)}}, "required": ["type"]}
_TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}

# Of fields with the same meaning at both endpoints. A field that is missing here and in `_OWN` is not described.
_COMMON: dict[str, Schema] = {
    "model": _TEXT,
    "n": _integer(1, MAX_CHOICES),
    "best_of": {**_integer(1, MAX_CHOICES), "description": "The same as n, or left out."},
    "stream": _BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {
            "include_usage": _BOOLEAN,
            "continuous_usage_stats": _BOOLEAN,
            "include_obfuscation": _BOOLEAN,
        },
        "additionalProperties": False,
    },
    "response_format": _RESPONSE_FORMAT,
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "priority": _integer(0, MAX_PRIORITY),
    "cache_salt": _TEXT,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _integer(-1, MAX_INT32),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 10, above=True),
    "min_tokens": _integer(0, MAX_INT32),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]},
    "stop_token_ids": {**_TOKEN_IDS, "maxItems": MAX_STOP_TOKEN_IDS},
    "include_stop_str_in_output": _BOOLEAN,
    "ignore_eos": _BOOLEAN,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": _number(-100, 100),
    },
    "user": _TEXT,
    "metadata": _OBJECT,
    "store": _BOOLEAN,
    "service_tier": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": _OBJECT,
    "prompt_cache_retention": _TEXT,
}
_OWN: dict[Endpoint, dict[str, Schema]] = {
    Endpoint.CHAT: {
        "messages": _MESSAGES,
        "max_tokens": _COUNT,
        "max_completion_tokens": _COUNT,
        "logprobs": _BOOLEAN,
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        "tools": {"type": "array", "items": {"anyOf": [_FUNCTION, _BUILT_IN]}, "maxItems": MAX_TOOLS},
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _BOOLEAN,
        "add_generation_prompt": _BOOLEAN,
        "continue_final_message": _BOOLEAN,
    },
    Endpoint.COMPLETIONS: {
        "prompt": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _SOME_TOKEN_IDS,
                {"type": "array", "items": _SOME_TOKEN_IDS, "minItems": 1},
            ]
        },
        "max_tokens": _COUNT_OR_NONE,
        "max_completion_tokens": _COUNT_OR_NONE,
        "logprobs": _integer(0, MAX_LOGPROBS),
        "echo": _BOOLEAN,
    },
}
_REQUIRED = {Endpoint.CHAT: ["messages"], Endpoint.COMPLETIONS: ["prompt"]}
_TOKENIZE_FIELDS: dict[str, Schema] = {
    "model": _TEXT,
    "prompt": _TEXT,
    "messages": _MESSAGES,
    "add_special_tokens": _BOOLEAN,
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
    "return_token_strs": _BOOLEAN,
    "tokens": _TOKEN_IDS,
}


def request_schema(endpoint: Endpoint) -> Schema:
    """The JSON schema of the bodies that an endpoint takes. Every field but the required ones may also be null."""
    described = {**_COMMON, **_OWN[endpoint]}
    return _object({name: described[name] for name in TABLES[endpoint] if name in described}, _REQUIRED[endpoint])


def _object(fields: dict[str, Schema], required: list[str]) -> Schema:
    properties = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items()
    }
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@cache
def openapi(version: str) -> Schema:
    """The OpenAPI 3.1 document. It is shared: do not change it."""
    chat, completions = (_generates(endpoint) for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS))
    tokenize = _object({name: _TOKENIZE_FIELDS[name] for name in TOKENIZE}, [])
    detokenize = _object({name: _TOKENIZE_FIELDS[name] for name in DETOKENIZE}, ["tokens"])
    model_id = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "CoreLLM", "version": version, "description": "OpenAI's API over one Llama 3.1 engine."},
        "paths": {
            Endpoint.CHAT.value: {"post": chat},
            Endpoint.COMPLETIONS.value: {"post": completions},
            "/v1/models": {"get": _gets("The models served")},
            "/v1/models/{model}": {"parameters": [model_id], "get": _gets("One model")},
            "/health": {"get": {**_gets("Whether requests are welcome"), "security": []}},
            "/metrics": {"get": _gets("Prometheus metrics", "text/plain")},
            "/tokenize": {"post": _posts("Text or messages to token ids", tokenize)},
            "/detokenize": {"post": _posts("Token ids to text", detokenize)},
            "/version": {"get": _gets("CoreLLM's version")},
            "/openapi.json": {"get": _gets("This file")},
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _generates(endpoint: Endpoint) -> Schema:
    described = _posts("Generate", request_schema(endpoint))
    described["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    return described


def _posts(summary: str, body: Schema) -> Schema:
    content = {"application/json": {"schema": body}}
    return {**_gets(summary), "requestBody": {"required": True, "content": content}}


def _gets(summary: str, content_type: str = "application/json") -> Schema:
    schema = {"type": "object"} if content_type == "application/json" else _TEXT
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "It worked.", "content": {content_type: {"schema": schema}}},
            "default": {"description": "It did not; the error says why.", "content": error},
        },
    }
