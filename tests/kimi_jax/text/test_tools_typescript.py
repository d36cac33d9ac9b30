import pytest

from kimi_jax.text.tools_typescript import (
    UnsupportedSchemaError,
    sorted_keys,
    tools_to_typescript,
)


def declared(parameters=None, **function) -> str:
    """The text between `namespace functions {` and `}` for one function called f."""
    function = {"name": "f", **function}
    if parameters is not None:
        function["parameters"] = parameters
    text = tools_to_typescript([{"type": "function", "function": function}])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def field(schema, **more) -> str:
    """The lines of one optional field x, with its indent."""
    text = declared({"type": "object", "properties": {"x": schema}, **more})
    head, tail = "type f = (_: {\n", "\n}) => any;"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def test_whole_text_of_two_functions():
    tools = [
        {"type": "function", "function": {"name": "b", "description": "Does b.\n\nTwice."}},
        {"type": "_plugin", "plugin": {}},
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "required": ["city"],
                    "properties": {
                        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                        "city": {"type": "string", "description": "Name"},
                    },
                },
            },
        },
    ]
    assert tools_to_typescript(tools) == (
        "# Tools\n"
        "\n"
        "## functions\n"
        "namespace functions {\n"
        "// Does b.\n"
        "\n"
        "// Twice.\n"
        "type b = (_: {}) => any;\n"
        "type weather = (_: {\n"
        "  // Name\n"
        "  city: string,\n"
        '  // Default: "C"\n'
        '  unit?: "C" | "F"\n'
        "}) => any;\n"
        "}\n"
    )


@pytest.mark.parametrize("tools", [[], [{"type": "_plugin"}], [{"type": "function"}]])
def test_no_functions_are_empty_text(tools):
    assert tools_to_typescript(tools) == ""


def test_keys_are_sorted_recursively():
    value = {"b": [{"d": 1, "c": 2}], "a": {"z": 0, "y": 0}}
    assert repr(sorted_keys(value)) == "{'a': {'y': 0, 'z': 0}, 'b': [{'c': 2, 'd': 1}]}"


def test_required_fields_first_each_group_by_name():
    properties = {name: {"type": "string"} for name in ("d", "b", "c", "a")}
    text = declared({"type": "object", "properties": properties, "required": ["d", "c"]})
    assert text == (
        "type f = (_: {\n  c: string,\n  d: string,\n  a?: string,\n  b?: string\n}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "  x?: number"),
        ({"type": "number"}, "  x?: number"),
        ({"type": "boolean"}, "  x?: boolean"),
        ({"type": "null"}, "  x?: null"),
        ({}, "  x?: any"),
        (True, "  x?: any"),
        (False, "  x?: null"),
        ({"type": "array"}, "  x?: Array<any>"),
        ({"type": "array", "items": {}}, "  x?: Array<any>"),
        ({"type": "array", "items": {"type": "integer"}}, "  x?: Array<number>"),
        ({"enum": ["a", 1, 1.5, True, None]}, '  x?: "a" | 1 | 1.5 | True | None'),
        ({"enum": ["a", None], "type": ["string", "null"]}, '  x?: "a" | None'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "  x?: string | null"),
        ({"type": ["integer", "null"]}, "  x?: number | null"),
        ({"type": ["object", "array"]}, "  x?: {} | Array<any>"),
        ({"type": "object"}, "  x?: {}"),
        ({"type": "object", "properties": {}}, "  x?: {}"),
    ],
)
def test_types(schema, expected):
    assert field(schema) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {"type": "string", "pattern": "^a", "minLength": 1, "maxLength": 9, "format": "x"},
            "  // maxLength: 9, minLength: 1, pattern: ^a\n  x?: string",
        ),
        (
            {"type": "integer", "minimum": 0, "maximum": 5, "minLength": 1},
            "  // maximum: 5, minimum: 0\n  x?: number",
        ),
        ({"type": "number", "minimum": 0.5}, "  // minimum: 0.5\n  x?: number"),
        (
            {"type": "array", "minItems": 1, "maxItems": 2},
            "  // maxItems: 2, minItems: 1\n  x?: Array<any>",
        ),
        (
            {"type": "integer", "description": "A\n\nB", "minimum": 1, "default": 3},
            "  // A\n\n  // B\n  // minimum: 1\n  // Default: 3\n  x?: number",
        ),
        ({"type": "boolean", "default": False}, "  // Default: False\n  x?: boolean"),
        ({"type": "number", "default": 1e-3}, "  // Default: 0.001\n  x?: number"),
        ({"type": "string", "default": 'é"'}, '  // Default: "é\\""\n  x?: string'),
        ({"type": "array", "default": [1, "a"]}, '  // Default: [1, "a"]\n  x?: Array<any>'),
        ({"type": "string", "default": None}, "  x?: string"),
        ({"anyOf": [{"type": "string"}], "description": "D"}, "  // D\n  x?: string"),
        ({"enum": [1], "type": "integer", "minimum": 1}, "  x?: 1"),
    ],
)
def test_comments_above_a_field(schema, expected):
    assert field(schema) == expected


def test_nested_objects_indent_two_spaces_a_level():
    inner = {"type": "object", "properties": {"y": {"type": "string", "description": "Y"}}}
    assert field(inner) == "  x?: {\n    // Y\n    y?: string\n  }"


def test_array_items_with_comments_stand_on_their_own_lines():
    items = {"type": "string", "description": "one", "minLength": 1}
    assert field({"type": "array", "items": items}) == (
        "  x?: Array<\n    // one\n    // minLength: 1\n    string\n  >"
    )
    items = {"type": "object", "properties": {"y": {"type": "string"}}}
    assert field({"type": "array", "items": items}) == "  x?: Array<{\n    y?: string\n  }>"


@pytest.mark.parametrize(
    ("extra", "expected"), [(True, "any"), (False, "never"), ({"type": "integer"}, "number")]
)
def test_additional_properties_are_the_last_field(extra, expected):
    assert field({"type": "string"}, additionalProperties=extra) == (
        f"  x?: string,\n  [k: string]: {expected}"
    )
    only = declared({"type": "object", "additionalProperties": extra})
    assert only == f"type f = (_: {{\n  [k: string]: {expected}\n}}) => any;"


def test_definitions_come_first_as_interfaces():
    parameters = {
        "type": "object",
        "$defs": {
            "P": {
                "type": "object",
                "description": "A point.",
                "properties": {"x": {"type": "number"}},
            }
        },
        "properties": {"p": {"$ref": "#/$defs/P"}},
    }
    assert declared(parameters, description="Moves.") == (
        "// A point.\n"
        "interface P {\n  x?: number\n}\n"
        "// Moves.\n"
        "type f = (_: {\n  p?: P\n}) => any;"
    )


def test_reference_to_the_root_names_the_parameters():
    parameters = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "a": {"type": "string"}},
        "required": ["next"],
    }
    assert declared(parameters) == (
        "interface parameters {\n  a?: string,\n  next: parameters\n}\n"
        "type f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"const": 1},
        {"$ref": "#/$defs/missing"},
        {"$ref": "other.json"},
        {"enum": ["a"], "type": "integer"},
        {"enum": [1], "type": "string"},
        {"enum": ["a"], "type": ["string", "integer"]},
        {"enum": ["a"], "type": ["string", "integer", "null"]},
        {"type": ["tuple"]},
        {"type": "string", "description": 5},
        {"type": "object", "properties": [1]},
        5,
    ],
)
def test_schemas_without_a_form_are_errors(schema):
    with pytest.raises(UnsupportedSchemaError):
        field(schema)
