"""``/v1/openapi.json``: OpenAPI 3.1, made of the handlers' signatures and the wire's structs."""

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.routing import Endpoint, Plain
from rollmuxd.wire.answers import Problem

_REF: Final = "#/components/schemas/{name}"
_REQUEST_ID: Final = {"X-Request-Id": {"description": "the caller's, if it sent one", "schema": {"type": "string"}}}


def describe(endpoints: Iterable[Endpoint], version: str) -> bytes:
    """The whole description, as JSON."""
    endpoints = list(endpoints)
    given = [shape for endpoint in endpoints for shape in (endpoint.body, _json_answer(endpoint)) if shape is not None]
    shapes: list[Any] = list(dict.fromkeys([Problem, *given]))
    refs, components = msgspec.json.schema_components(shapes, ref_template=_REF)
    by_shape = dict(zip(shapes, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.format_path, {})[endpoint.method.lower()] = _operation(endpoint, by_shape)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "rollmuxd",
            "version": version,
            "description": "Lets several RL post-training jobs share a rollout pool and a train pool, phase by phase.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "an API key; on the Unix socket the kernel names the caller, and none is needed",
                }
            },
        },
    }
    return msgspec.json.encode(document)


def _json_answer(endpoint: Endpoint) -> Any:
    """What the route answers as JSON, if it does."""
    return None if endpoint.answer is Plain else endpoint.answer


def _operation(endpoint: Endpoint, refs: dict[Any, Any]) -> dict[str, Any]:
    summary, _, rest = (endpoint.handler.__doc__ or "").strip().partition("\n")
    operation: dict[str, Any] = {
        "operationId": getattr(endpoint.handler, "__name__", endpoint.path),
        "tags": [endpoint.tag],
        "summary": summary.strip(),
        "responses": _responses(endpoint, refs),
        "security": [] if endpoint.needs is None else [{"key": []}, {}],
    }
    if rest.strip():
        operation["description"] = re.sub(r"\s+", " ", rest).strip()
    if endpoint.needs is not None:
        operation["x-role"] = str(endpoint.needs)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in endpoint.path_names
    ]
    if endpoint.query is not None:
        parameters += _query_parameters(endpoint.query)
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": not endpoint.body_optional,
            "content": {"application/json": {"schema": refs[endpoint.body]}},
        }
    return operation


def _query_parameters(query: type[Struct]) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components([query], ref_template=_REF)
    shape = components[query.__name__]
    required = shape.get("required", [])
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "schema": _inlined(schema, components),
        }
        for name, schema in shape["properties"].items()
    ]


def _inlined(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """An enum's schema in place of the reference to it."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return {**components[name], **{key: value for key, value in schema.items() if key != "$ref"}} if name else schema


def _responses(endpoint: Endpoint, refs: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {media: {"schema": {"type": "string"}} for media in endpoint.produces}
    answer = _json_answer(endpoint)
    if answer is not None:
        content = {"application/json": {"schema": refs[answer]}, **content}
    responses: dict[str, Any] = {
        str(status): {"description": HTTPStatus(status).phrase, "headers": _REQUEST_ID, "content": content}
        for status in (endpoint.status, *endpoint.also)
    }
    problem = {problems.MEDIA_TYPE: {"schema": refs[Problem]}}
    expected = dict.fromkeys(endpoint.problems)
    if endpoint.needs is not None:
        expected |= dict.fromkeys((401, 403))
    if endpoint.query is not None:
        expected |= dict.fromkeys((400, 422))
    for status in sorted(expected):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "headers": _REQUEST_ID,
            "content": problem,
        }
    responses["default"] = {"description": "any other error", "headers": _REQUEST_ID, "content": problem}
    return responses
