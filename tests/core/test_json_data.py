"""Documents from outside: what is refused, and in which words."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Literal

import pytest

from rollmill.core.errors import DataError, UsageError
from rollmill.core.json_data import parse_json, parse_object
from rollmill.core.schema import read_as
from wordings import raises


@dataclass(frozen=True)
class Layers:
    sizes: tuple[int, ...] = (64,)
    kernels: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Settings:
    name: str
    count: int = 1
    rate: float = 0.5
    limit: float | None = None
    anneal: bool = True
    kind: Literal["mlp", "gru"] | None = "mlp"
    layers: Layers = field(default_factory=Layers)
    parts: dict[str, Layers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"count={self.count} must be at least 1.")


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000

REFUSED_DOCUMENTS = [
    (b"", "it is not valid JSON (input data was truncated)"),
    (b'{"a": ', "it is not valid JSON (input data was truncated)"),
    (b'{"a": NaN}', "JSON is malformed: invalid character (byte 6)"),
    (b'{"a": Infinity}', "JSON is malformed: invalid character (byte 6)"),
    (b"\xff\xfe", "JSON is malformed: invalid character (byte 0)"),
    (b'{"a": 1} 2', "JSON is malformed: trailing characters (byte 10)"),
    (b'{"a": 18446744073709551616}', "18446744073709551616 does not fit into 64 bits"),
    (b'{"a": [-9223372036854775809]}', "-9223372036854775809 does not fit into 64 bits"),
    (b'{"a": 1e999}', "number out of range"),
    (b'{"a": ' + b"1" * 5000 + b"}", "integer value out of range"),
    (b"[" * 34 + b"]" * 34, "it is nested deeper than 32 levels"),
    (DEEP, "it is nested deeper than 32 levels"),
    (b"[" * 100_000, "it is nested deeper than 32 levels"),
    (b'"' + b"x" * 1_000_001 + b'"', "its 1,000,003 bytes exceed the limit of 1,000,000"),
]


@pytest.mark.parametrize(("document", "reason"), REFUSED_DOCUMENTS)
def test_a_document_is_refused_in_one_sentence(document, reason):
    with pytest.raises(DataError) as caught:
        parse_json(document, where="run/config.json", limit=1_000_000)
    message = str(caught.value)
    assert message.startswith("run/config.json cannot be read: ") and message.endswith(".")
    assert reason in message and "\n" not in message and len(message) < 200


def test_a_document_is_read_as_python_reads_it():
    document = {"a": [1, -(2**63), 2**64 - 1, 0.1, None, True, "ü\n", {}, []], "b": {"c": 1e-300}}
    assert parse_json(json.dumps(document), where="x") == document
    assert parse_json(json.dumps(document).encode(), where="x") == document
    assert parse_json(b"[" * 33 + b"]" * 33, where="x")


@pytest.mark.parametrize("document", ["[1]", "1", "null"])
def test_an_object_is_asked_for(document):
    held = re.escape(document)
    with pytest.raises(ZeroDivisionError, match=f"^x cannot be read: expected a JSON object, got {held}.$"):
        parse_object(document, where="x", error=ZeroDivisionError)


REFUSED_VALUES = [
    ({"count": "8"}, 'c.count="8" must be an integer'),
    ({"count": 8.0}, "c.count=8.0 must be an integer"),
    ({"count": None}, "c.count=null must be an integer"),
    ({"count": [8]}, "c.count=[8] must be an integer"),
    ({"count": True}, "c.count=true must be an integer"),
    ({"rate": "x"}, 'c.rate="x" must be a number'),
    ({"rate": "nan"}, 'c.rate="nan" must be a number'),
    ({"limit": "x"}, 'c.limit="x" must be a number or null'),
    ({"anneal": "no"}, 'c.anneal="no" must be true or false'),
    ({"anneal": 0}, "c.anneal=0 must be true or false"),
    ({"kind": "cnn"}, "c.kind=\"cnn\" must be 'mlp' or 'gru' or null"),
    ({"layers": 3}, "c.layers=3 must be an object"),
    ({"layers": {"sizes": [1, "a"]}}, 'c.layers.sizes[1]="a" must be an integer'),
    ({"layers": {"kernels": [[1, 2]]}}, "c.layers.kernels[0]=[1, 2] must be a list of length 3"),
    ({"layers": {"size": []}}, "c.layers.size is unknown. Did you mean sizes?"),
    ({"parts": {"a": {}, "b": {"sizes": 3}}}, "c.parts.b.sizes=3 must be a list"),
    ({"parts": {"a": {"x": 1}}}, "c.parts.a.x is unknown. Known: kernels, sizes"),
    ({"\x1b[31m\n": 1}, 'c."\\u001b[31m\\n" is unknown'),
    ({"name": ["\x1b[31m"]}, 'c.name=["\\u001b[31m"] must be a string'),
    ({"other": 1}, "c.other is unknown. Known: anneal, count"),
    ({"name": None}, "c.name=null must be a string"),
    ({"name": 3 * ["x" * 50]}, "must be a string"),
]


@pytest.mark.parametrize(("values", "reason"), REFUSED_VALUES)
def test_a_value_of_another_type_is_named(values, reason):
    with pytest.raises(DataError) as caught:
        read_as(Settings, {"name": "a", **values}, where="f.json", field="c")
    message = str(caught.value)
    assert message.startswith("f.json: ") and reason in message and message.endswith((".", "?"))
    assert len(message) < 200


def test_a_missing_field_and_another_kind_of_document_are_named():
    with raises("is-missing", "f.json: c.name", kind=DataError):
        read_as(Settings, {}, where="f.json", field="c")
    with pytest.raises(DataError, match=r"^f.json: \[\] must be an object.$"):
        read_as(Settings, [], where="f.json")


def test_a_value_that_fits_becomes_the_dataclass():
    values = {"name": "a", "rate": 1, "limit": "-inf", "layers": {"kernels": [[1, 2, 3]]}, "parts": {"p": {}}}
    settings = read_as(Settings, values, where="f.json")
    expected = Settings("a", rate=1.0, limit=-math.inf, layers=Layers(kernels=((1, 2, 3),)), parts={"p": Layers()})
    assert settings == expected and type(settings.rate) is float


def test_the_checks_of_the_dataclass_run():
    with raises("must-be-at-least-1", "count", "0"):
        read_as(Settings, {"name": "a", "count": 0}, where="f.json")
