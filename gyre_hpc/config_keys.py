"""Keys of a configuration schema: which exist, what they mean, which one a mistyped key meant, what its value may be.

Pure functions over dataclasses whose fields are values or sections (dataclasses of their own). A key is a dotted path,
"cluster.cell.ranks". `key_error` makes the ConfigError that names key, value and what to do.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from dataclasses import Field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gyre_hpc.errors import ConfigError

Schema = type[Any]
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[str]": "a list of texts, as in [a,b]",
    "dict[str, str]": "a mapping of texts, as in {a: b}",
}
"""Field types in words."""
LIKE_SECTION = 0.6
"""How alike two names of one section must be (difflib ratio) to be offered as what was meant."""
LIKE_ANYWHERE = 0.75
"""The same for a name looked up in all sections: stricter, because more names compete."""


def section_type(item: Field[Any]) -> Schema | None:
    """The dataclass of a field that is a section of its own, else None."""
    factory: Any = item.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def known_keys(schema: Schema, prefix: str = "") -> dict[str, Field[Any]]:
    """Every key with its field, sections before what they contain."""
    keys: dict[str, Field[Any]] = {}
    for item in fields(schema):
        keys[prefix + item.name] = item
        section = section_type(item)
        if section is not None:
            keys |= known_keys(section, f"{prefix}{item.name}.")
    return keys


def _closest(name: str, names: list[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), "")


def _names_in(schema: Schema, section: str) -> list[str]:
    """Names directly inside `section` ("" = the top)."""
    keys = (key.rpartition(".") for key in known_keys(schema))
    return [name for parent, _, name in keys if parent == section]


def nearest_key(schema: Schema, key: str) -> str:
    """The key most probably meant, "" if none is close: same section first, then a mistyped section, then anywhere."""
    known = known_keys(schema)
    if key in known:
        return key
    section, _, name = key.rpartition(".")
    if not section or section in known:
        close = _closest(name, _names_in(schema, section), LIKE_SECTION)
        if close:
            return f"{section}.{close}" if section else close
    else:
        meant = nearest_key(schema, section)
        close = _closest(name, _names_in(schema, meant), LIKE_SECTION) if meant else ""
        if close:
            return f"{meant}.{close}"
    by_name: dict[str, str] = {}
    for other in known:
        by_name.setdefault(other.rpartition(".")[2], other)
    return by_name.get(_closest(name, list(by_name), LIKE_ANYWHERE), "")


def expected(schema: Schema, key: str) -> str:
    """What the value of a known key may be, in words."""
    item = known_keys(schema)[key]
    if section_type(item) is not None:
        return f"a section with {', '.join(_names_in(schema, key))}"
    return WORDS.get(str(item.type), str(item.type))


def _advice(schema: Schema, key: str, verb: str) -> str:
    known = known_keys(schema)
    section = key.rpartition(".")[0]
    if section in known and str(known[section].type).startswith("dict"):
        return f"to add an entry: +{key}=VALUE"
    near = nearest_key(schema, key)
    if near:
        return f"did you mean '{near}'?"
    if section in known and section_type(known[section]) is not None:
        return f"{section} has: {', '.join(_names_in(schema, section))}"
    return f"{verb} --help lists all keys"


def key_error(
    schema: Schema, key: str, reason: str, value: str | None = None, verb: str = "gyre train"
) -> ConfigError:
    """What is wrong with `key` and what to do; `reason` is the checker's word, used where the key exists."""
    key = re.sub(r"\[.*", "", key)
    if key not in known_keys(schema):
        return ConfigError(f"config key '{key}': no such key", fix=_advice(schema, key, verb))
    given = key if value is None else f"{key}={value}"
    return ConfigError(f"{given}: {reason}", fix=f"{key} is {expected(schema, key)}")


def omegaconf_error(schema: Schema, error: OmegaConfBaseException) -> ConfigError:
    """The same from OmegaConf's exception."""
    missing = isinstance(error, MissingMandatoryValue)
    reason = "a value is required" if missing else str(error).splitlines()[0]
    return key_error(schema, str(error.full_key or ""), reason)


def field_docs(section: Schema) -> dict[str, str]:
    """The string under each field of a configuration dataclass."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(following, ast.Expr)
        ):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[item.target.id] = " ".join(value.value.split())
    return docs


def reference(section: Schema, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key, sections expanded."""
    docs, rows = field_docs(section), []
    for item in fields(section):
        inner = section_type(item)
        if inner is not None:
            rows += reference(inner, f"{prefix}{item.name}.")
            continue
        default = item.default_factory() if callable(item.default_factory) else item.default
        shown = "required" if default == MISSING else repr(default)
        rows.append((prefix + item.name, shown, docs.get(item.name, "")))
    return rows
