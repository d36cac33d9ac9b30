"""Tool declarations as the TypeScript text Kimi-K2.5 was trained on.

Every space counts: the text is part of the prompt. Schemas it has no form for are refused, and the
chat template then shows the tools as compact JSON.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
_ROOT = "parameters"
_DEFS = "#/$defs/"

# Constraints that are shown, by type; the order is that of the text.
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_MEMBERS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class UnsupportedSchemaError(ValueError):
    """A tool's parameter schema has no TypeScript form."""


def sorted_keys(value: Any) -> Any:
    """The same JSON value with the keys of every object in order."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [sorted_keys(item) for item in value]
    return value


def tools_to_typescript(tools: Sequence[Mapping[str, Any]]) -> str:
    """The declarations of all tools of type "function"; empty text if there are none.

    Raises:
        UnsupportedSchemaError: a schema without a TypeScript form, such as `oneOf` alone.
    """
    functions = [
        tool["function"]
        for tool in sorted_keys(tools)
        if tool.get("type") == "function" and tool.get("function")
    ]
    if not functions:
        return ""
    try:
        lines = [_function(function) for function in functions]
    except (AttributeError, LookupError, TypeError) as error:
        raise UnsupportedSchemaError(f"a schema is not laid out as JSON Schema ({error})") from None
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *lines, "}", ""])


def _function(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    types = _Types()
    parameters = types.object(schema, "")
    parts = []
    if types.refers_to_root:
        # The root interface lists its fields in order of name alone, and no additionalProperties.
        required = set(schema.get("required", []))
        fields = [
            types.field(name, field, name in required, _INDENT)
            for name, field in schema.get("properties", {}).items()
        ]
        body = "\n" + ",\n".join(fields) + "\n" if fields else ""
        parts.append(f"interface {_ROOT} {{{body}}}")
        parameters = _ROOT
    for name, definition in list(types.definitions.items()):
        described = _described(definition, "")
        parts.append(f"{described}interface {name} {types.type(definition, '')}")
    if function.get("description"):
        parts.append(_comment(function["description"], ""))
    parts.append(f"type {function.get('name', 'function')} = (_: {parameters}) => any;")
    return "\n".join(parts)


class _Types:
    """Writes the types of one function and remembers what they refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self.reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(member, indent) for member in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        if "type" not in schema:
            if schema:
                raise UnsupportedSchemaError(f"a schema has no type: {', '.join(schema)}")
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(_UNION_MEMBERS[member] for member in kind)
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self.array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def object(self, schema: Mapping[str, Any], indent: str) -> str:
        self.definitions.update(schema.get("$defs") or {})
        inner = indent + _INDENT
        properties, required = schema.get("properties", {}), set(schema.get("required", []))
        order = sorted(properties, key=lambda name: (name not in required, name))
        fields = [self.field(name, properties[name], name in required, inner) for name in order]
        extra = schema.get("additionalProperties")
        if extra is not None:
            written = "never" if extra is False else self.type(extra, inner)
            fields.append(f"{inner}[k: string]: {written}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def field(self, name: str, schema: Any, is_required: bool, indent: str) -> str:
        default = None if isinstance(schema, bool) else schema.get("default")
        shown = ""
        if default is not None:
            is_number = isinstance(default, (bool, int, float))
            text = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
            shown = f"{indent}// Default: {text}\n"
        mark = "" if is_required else "?"
        comments = _comments(schema, indent)
        return f"{comments}{shown}{indent}{name}{mark}: {self.type(schema, indent)}"

    def array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or True
        inner = indent + _INDENT
        if comments := _comments(items, inner):
            return f"Array<\n{comments}{inner}{self.type(items, inner)}\n{indent}>"
        return f"Array<{self.type(items, indent)}>"

    def reference(self, target: str) -> str:
        if target == "#":
            self.refers_to_root = True
            return _ROOT
        name = target.split("/")[-1]
        if not target.startswith(_DEFS) or name not in self.definitions:
            raise UnsupportedSchemaError(f"$ref {target!r} is neither '#' nor one of $defs")
        return name


def _comments(schema: Any, indent: str) -> str:
    """The description's lines, then one line of constraints."""
    if isinstance(schema, bool):
        return ""
    constraints = ""
    if "$ref" not in schema and "anyOf" not in schema and "enum" not in schema:
        kind = schema.get("type")
        names = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
        constraints = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    return _described(schema, indent) + (f"{indent}// {constraints}\n" if constraints else "")


def _described(schema: Any, indent: str) -> str:
    description = "" if isinstance(schema, bool) else schema.get("description")
    return _comment(description, indent) + "\n" if description else ""


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [member for member in kind if member != "null"] or ["null"]
        if len(kind) > 2 or len(kinds) > 1:
            raise UnsupportedSchemaError(f"an enum has the types {kind}, expected one besides null")
        kind = kinds[0]
    expected = _ENUM_TYPES.get(kind, object) if isinstance(kind, str) else object
    for value in schema["enum"]:
        if value is not None and not isinstance(value, expected):
            raise UnsupportedSchemaError(f"enum value {value!r} is not of type {kind!r}")
    return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in schema["enum"])
