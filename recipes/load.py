"""Reads a config: TorchTitan's ConfigManager, with errors that name the key, the rule and the value."""

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tomli
from torchtitan.config import ConfigManager, JobConfig

# So that a TorchTitan TOML runs as it is: the modules that add our sections and our model families.
_OUR_MODULES = {
    ("job", "custom_config_module"): "recipes.config",
    ("experimental", "custom_import"): "recipes.families",
}


class ConfigError(ValueError):
    """A config that cannot run. The text is one line for the user."""


def did_you_mean(value: str, valid: Iterable[str], beginning: str = "") -> str:
    """For the end of an error: the valid one that is nearest, or nothing."""
    near = difflib.get_close_matches(value, list(valid), n=1)
    return f"; did you mean {beginning}{near[0]}?" if near else ""


def has_argument(args: Iterable[str], key: str) -> bool:
    """Whether a command line sets a key, "section.key"."""
    return any(arg.split("=")[0].replace("-", "_") == f"__{key}" for arg in args)


def load_config(args: list[str]) -> JobConfig:
    """Reads the TOML named by --job.config_file and the overrides behind it.

    Args:
        args: command line without the program, as TorchTitan takes it.

    Raises:
        ConfigError: the file is missing or no TOML, or a key or value is not valid.
        SystemExit: --help, or a value on the command line that does not parse; its message is printed.
    """
    path = _config_path(args)
    values = _read_toml(path) if path else {}
    for (section, key), module in _OUR_MODULES.items():
        configured = values.get(section, {}).get(key) if isinstance(values.get(section, {}), dict) else None
        if not configured and not has_argument(args, f"{section}.{key}"):
            args = [*args, f"--{section}.{key}={module}"]
    manager = _ReadConfigManager(values)
    try:
        config_class = manager._maybe_add_custom_config(args, values)
    except Exception as error:  # whatever importing the user's module raises
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"[job] custom_config_module must be a module with a JobConfig that can be imported: {reason}"
        ) from error
    _check_values(config_class, values, (), path)
    _check_arguments(config_class, args)
    return manager.parse_args(args)


class _ReadConfigManager(ConfigManager):
    """TorchTitan's, on a TOML that has been read."""

    def __init__(self, values: dict[str, Any]):
        super().__init__()
        self._values = values

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any]:
        return self._values


def known_keys(config_class: type, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every (section, ..., key) of a config class, with its type."""
    for f in fields(config_class):
        if isinstance(f.type, type) and is_dataclass(f.type):
            yield from known_keys(f.type, (*prefix, f.name))
        else:
            yield (*prefix, f.name), f.type


def _config_path(args: list[str]) -> str | None:
    for index, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name.replace("-", "_") == "__job.config_file":
            if value or index + 1 < len(args):
                return value or args[index + 1]
            raise ConfigError("--job.config_file must name a TOML file, got nothing")
    return None


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomli.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin with a mark
    except IsADirectoryError:
        raise ConfigError(f'--job.config_file must be a TOML file, got "{path}", which is a folder') from None
    except FileNotFoundError:
        raise ConfigError(
            f'--job.config_file must be a TOML file, got "{path}", which does not exist{_similar(path)}'
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--job.config_file must be readable, got "{path}": {error}') from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path} must be valid TOML: {error}") from None


def _similar(path: str) -> str:
    folder = Path(path).parent
    names = os.listdir(folder) if folder.is_dir() else []
    return did_you_mean(Path(path).name, [n for n in names if n.endswith(".toml")], f"{folder}/")


def _check_values(config_class: type, values: dict[str, Any], section: tuple[str, ...], path: str | None) -> None:
    valid = {f.name: f.type for f in fields(config_class)}
    for key, value in values.items():
        where = f"{path}: [{'.'.join(section)}] {key}" if section else f"{path}: [{key}]"
        if key not in valid:
            raise ConfigError(f"{where} is not a known {'key' if section else 'section'}{_nearest(config_class, key)}")
        expected = valid[key]
        if isinstance(expected, type) and is_dataclass(expected):
            if not isinstance(value, dict):
                raise ConfigError(f"{where} must be a section, got {value!r}")
            _check_values(expected, value, (*section, key), path)
        elif not _fits(value, expected):
            raise ConfigError(f"{where} must be {_describe(expected)}, got {value!r}")


def _nearest(config_class: type, key: str) -> str:
    here = [f.name for f in fields(config_class)]
    return did_you_mean(key, here) or f"; it has {', '.join(here)}"


def _check_arguments(config_class: type, args: list[str]) -> None:
    valid = {".".join(key): kind for key, kind in known_keys(config_class)}
    is_value = is_list = False  # of the key before it
    key_before: tuple[str, Any] = "", str
    for index, arg in enumerate(args):
        if arg == "--help":
            continue
        if arg == "--" or not arg.startswith("--"):
            if not is_value:
                raise ConfigError(f"arguments must be --section.key VALUE or --section.key=VALUE, got {arg!r}")
            _check_argument(*key_before, arg)
            is_value = is_list
            continue
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        *section, key = name.split(".")
        positive = ".".join([*section, key.removeprefix("no_")])
        if name not in valid and valid.get(positive) is not bool:
            raise ConfigError(f"--{name} is not a known key{did_you_mean(name, valid, '--')}")
        kind = valid.get(name, bool)
        if kind is bool and equals:
            raise ConfigError(
                f"--{name} takes no value: write --{name} for true, --{'.'.join([*section, 'no_' + key])} for false"
            )
        is_followed = index + 1 < len(args) and not args[index + 1].startswith("--")
        is_value = not equals and kind is not bool
        # A list of text is one argument with commas to TorchTitan, any other list is several arguments.
        is_list = is_value and get_origin(kind) is list and get_args(kind) != (str,)
        key_before = name, kind
        if kind is not bool and (equals or not is_followed):
            _check_argument(name, kind, value)


def _check_argument(name: str, kind: Any, value: str) -> None:
    if not _parses(value, kind):
        raise ConfigError(f"--{name} must be {_describe(kind)}, got {value!r}")


def _parses(text: str, expected: Any) -> bool:
    """Whether text on the command line can be a value of a type."""
    if expected in (int, float):
        try:
            expected(text)
        except ValueError:
            return False
        return True
    if get_origin(expected) is Literal:
        return text in get_args(expected)
    if get_origin(expected) in (Union, UnionType):
        return any(text == "None" if option is NoneType else _parses(text, option) for option in get_args(expected))
    if get_origin(expected) is list and get_args(expected) != (str,):
        return _parses(text, get_args(expected)[0])
    return True


def _fits(value: Any, expected: Any) -> bool:
    origin, inner = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, expected) if isinstance(expected, type) else True


def _describe(expected: Any) -> str:
    origin, inner = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return " or ".join(_describe(option) for option in inner if option is not NoneType)
    if origin is Literal:
        return "one of " + ", ".join(f'"{option}"' for option in inner)
    if origin is list:
        return f"a list, each {_describe(inner[0])}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(
        expected, str(expected)
    )
