"""YAML text to ``TrainConfig``; every fault becomes one ``ConfigError`` that names key, rule and value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer_rank.errors import ConfigError
from trainer_rank.training.config import TrainConfig


def load_config(path: Path) -> TrainConfig:
    """Return the validated configuration in the YAML file ``path``.

    Raises:
        ConfigError: The file cannot be read, is not YAML, repeats a key, or breaks a rule. All faults are listed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); give the path of a YAML file") from error
    return parse_config(text, name=str(path))


def parse_config(text: str, *, name: str = "config") -> TrainConfig:
    """Return the validated configuration in ``text``; ``name`` stands for the file in messages.

    Raises:
        ConfigError: As ``load_config``.
    """
    try:
        entries = yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{where}: is not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: is not valid YAML: {error}") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{name}: must be a mapping of keys such as 'model:' and 'data:', got {_show(entries)}")
    try:
        return TrainConfig.model_validate(entries)
    except ValidationError as error:
        faults = [_explain(fault) for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{name}: {fault}" for fault in faults)) from error


def dump_config(config: TrainConfig) -> str:
    """Return ``config`` with every default filled in, as YAML that ``parse_config`` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def key_list(section: type[BaseModel] = TrainConfig, prefix: str = "") -> list[str]:
    """Return every key a configuration may have, dotted, in order of definition."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        nested = section_in(field.annotation)
        keys += [f"{prefix}{name}"] if nested is None else key_list(nested, f"{prefix}{name}.")
    return keys


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, where PyYAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section of keys that a field holds, alone or beside null; None for a field of another kind."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _explain(fault: ErrorDetails) -> str:
    location = [str(part) for part in fault["loc"]]
    key, value, kind = ".".join(location), fault["input"], fault["type"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r}{_suggestion(location)}"
    if kind == "missing":
        return f"the key {key!r} is required"
    if kind == "value_error":
        message = str(fault["ctx"]["error"])
        if isinstance(value, Mapping | BaseModel):
            return f"{key}: {message}" if key else message
        return f"{key}: {message} (got {_show(value)})" if repr(value) not in message else f"{key}: {message}"
    return f"{key}: {_rule(fault)}, got {_show(value)}"


def _rule(fault: ErrorDetails) -> str:
    rule = fault["msg"].removeprefix("Input ")
    if fault["type"] in ("model_type", "model_attributes_type"):
        return "must be a mapping of keys"
    return rule.replace("should be", "must be").replace("should have", "must have")


def _suggestion(location: list[str]) -> str:
    """Return ``; did you mean ...?`` with the nearest key, first among its siblings and then anywhere."""
    prefix, name = location[:-1], location[-1]
    keys = key_list()
    siblings = _children(keys, prefix)
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {'.'.join([*prefix, *close])!r}?"
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    close = difflib.get_close_matches(name, [key.rpartition(".")[2] for key in keys], n=1, cutoff=0.8)
    if close:
        return f"; did you mean {next(key for key in keys if key.rpartition('.')[2] == close[0])!r}?"
    return f"; the keys here are {', '.join(siblings)}"


def _children(keys: Iterable[str], prefix: list[str]) -> list[str]:
    start = "".join(f"{part}." for part in prefix)
    return list(dict.fromkeys(key[len(start) :].partition(".")[0] for key in keys if key.startswith(start)))


def _show(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} of type {type(value).__name__}"
