"""The description says what is done: every route is in it, and its shapes are sound."""

import json
from importlib.metadata import version

import jsonschema_rs
import pytest

from rollmuxd.daemon.http.app import ENDPOINTS
from rollmuxd.daemon.http.openapi import describe

DOCUMENT = json.loads(describe(ENDPOINTS, version("rollmuxd")))


def test_every_route_is_described_with_its_answer_its_role_and_its_errors():
    for endpoint in ENDPOINTS:
        operation = DOCUMENT["paths"][endpoint.format_path][endpoint.method.lower()]
        assert operation["summary"], endpoint
        assert str(endpoint.status) in operation["responses"]
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        assert operation["security"] == ([] if endpoint.needs is None else [{"key": []}, {}])


def test_there_are_no_two_operations_of_one_name():
    names = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere_and_every_schema_is_one():
    components = DOCUMENT["components"]["schemas"]
    for reference in _references(DOCUMENT):
        assert reference.removeprefix("#/components/schemas/") in components
    for name, schema in components.items():
        jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})
        assert schema["type"] == "object", name


def test_a_typo_in_a_body_is_against_the_description_too():
    assert DOCUMENT["components"]["schemas"]["RegisterBody"]["additionalProperties"] is False


def test_a_body_may_be_left_out_only_where_none_of_its_fields_is_required():
    paths = DOCUMENT["paths"]
    assert paths["/v1/jobs"]["post"]["requestBody"]["required"] is True
    assert paths["/v1/slots/{slot}/revoke"]["post"]["requestBody"]["required"] is False


def test_the_path_of_a_node_is_one_parameter():
    parameters = DOCUMENT["paths"]["/v1/nodes/{node}/drain"]["post"]["parameters"]
    assert [parameter["name"] for parameter in parameters] == ["node"]


def test_a_query_never_says_null():
    for path in DOCUMENT["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                assert "null" not in json.dumps(parameter["schema"])


@pytest.mark.asyncio
async def test_the_description_is_served_without_a_key(running):
    async with running() as world, world.client(None) as nobody:
        assert (await nobody.get("/v1/openapi.json")).json() == DOCUMENT


def _references(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)
