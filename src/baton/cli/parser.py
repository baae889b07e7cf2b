"""Commands made from functions: each parameter is an option, and a dataclass stands for those in its fields.

An option is stated once: default, metavar, help, bounds, further names, and what it sets in EngineConfig. Its
type and its first name are those of the parameter or field; a bool that is not false by default also has a
`--no-` form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource


def option(
    default: Any,
    metavar: str | None,
    help: str,
    *names: str,
    sets: str | None = "",
    read: Callable[[Any], object] | None = None,
    alone: int | None = None,
    **bounds: float,
) -> Any:
    """An option, required if its default is MISSING.

    `sets` is the field of EngineConfig that it sets, "" that of its own name; `read` makes its value; `alone`
    is its value where no number follows it.
    """
    details = {"metavar": metavar, "help": help, "names": names, "sets": sets, "read": read, "bounds": bounds}
    details["alone"] = alone
    return field(default=default, metadata=details)


def flag(help: str, sets: str = "", read: Callable[[Any], object] | None = None) -> Any:
    """An option without a value."""
    return option(False, None, help, sets=sets, read=read)


def argument(metavar: str, default: Any = MISSING) -> Any:
    """A word without a name, or with () as its default any number; the function's docstring explains it."""
    return field(default=default, metadata={"metavar": metavar})


def like(stated: Any, default: Any, help: str = "") -> Any:
    """An option that differs from another one by its default, and perhaps its help."""
    return field(default=default, metadata={**stated.metadata, **({"help": help} if help else {})})


def given(options: Any) -> dict[str, Any]:
    """What the command line gave, of a dataclass of options with a field `given`."""
    return {name: getattr(options, name) for name in options.given}


def override(options: Any, values: dict[str, Any]) -> Any:
    """The options with further values, as if the command line had given these too."""
    return replace(options, **values, given=tuple(dict.fromkeys((*options.given, *values))))


def engine_fields(options: Any) -> dict[str, Any]:
    """Fields of EngineConfig that a dataclass of options sets; None leaves one as it is."""
    values = {}
    for stated in fields(options):
        details, value = stated.metadata, getattr(options, stated.name)
        if details and details["sets"] is not None and value is not None:
            values[details["sets"] or stated.name] = details["read"](value) if details["read"] else value
    return values


def words(**values: object) -> list[str]:
    """The command line that gives these options; None is left out."""
    line: list[str] = []
    for name, value in values.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif value is not None:
            line += (f"--{dashed}", str(value))
    return line


def command(function: Callable[..., Any], *, remedies: Mapping[str, str] | None = None) -> click.Command:
    """A command that calls the function; its help is the function's docstring.

    `remedies` says what to write in place of options that other commands have and this one does not.
    """
    params = [_parameter(*stated) for stated in _parameters(function)]
    made = _Command(
        function.__name__,
        callback=lambda **values: _call(function, values, click.get_current_context()),
        params=sorted(params, key=lambda parameter: not parameter.required),
        help=function.__doc__,
        context_settings={"show_default": True},
    )
    made.remedies = remedies or {}
    return made


def parse(kind: Any, line: Sequence[str]) -> Any:
    """A dataclass of options from a command line; raises click.ClickException."""
    params = [_parameter(*stated) for stated in _parameters(kind)]
    context = _Command(None, params=params, add_help_option=False).make_context(None, list(line))
    return _call(kind, context.params, context)


class _Option(click.Option):
    """An option that may have a value of its own where no number follows it."""

    alone: int | None = None


class _Command(click.Command):
    remedies: Mapping[str, str] = MappingProxyType({})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without this, click takes the next word as the option's value."""
        alone = {
            name: option.alone
            for option in self.params
            if isinstance(option, _Option) and option.alone is not None
            for name in option.opts
        }
        stop = args.index("--") if "--" in args else len(args)
        for word in args[:stop]:
            if word in self.remedies:
                raise click.UsageError(f"{self.name} has no option {word}; {self.remedies[word]}")
        words = [
            f"{word}={alone[word]}"
            if word in alone and index < stop and not "".join(args[index + 1 : index + 2]).isdecimal()
            else word
            for index, word in enumerate(args)
        ]
        return super().parse_args(ctx, words)


def _hints(target: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of what a function or a dataclass takes."""
    hints = get_type_hints(target)
    if is_dataclass(target):
        yield from ((stated.name, hints[stated.name], stated) for stated in fields(target))
    else:
        for name, parameter in inspect.signature(target).parameters.items():
            yield name, hints[name], parameter.default


def _parameters(target: Any) -> Iterator[tuple[str, Any, Field[Any]]]:
    for name, hint, stated in _hints(target):
        if is_dataclass(hint):
            yield from _parameters(hint)
        elif name != "given":
            yield name, hint, stated


def _parameter(name: str, hint: Any, stated: Field[Any]) -> click.Parameter:
    details, word = stated.metadata, name.strip("_").replace("_", "-")
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]
    is_repeated, is_flag = get_origin(hint) is tuple, hint is bool
    kind = _click_type(get_args(hint)[0] if is_repeated else hint, details.get("bounds"))
    common: dict[str, Any] = {"metavar": details["metavar"], "type": None if is_flag else kind}
    if "help" not in details and is_repeated:
        return click.Argument([name], nargs=-1, **common)
    # Newer releases of click take a required parameter with a default, be it None, for given.
    common |= {"required": True} if stated.default is MISSING else {"default": stated.default}
    if "help" not in details:
        return click.Argument([name], **common)
    has_no_form = is_flag and stated.default is not False
    made = _Option(
        [name, f"--{word}/--no-{word}" if has_no_form else f"--{word}", *details["names"]],
        is_flag=is_flag or None,  # False would allow an option without its value
        multiple=is_repeated,
        help=details["help"],
        **common,
    )
    made.alone = details["alone"]
    return made


def _click_type(hint: Any, bounds: dict[str, Any] | None) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if hint is Path:
        return click.Path(path_type=Path)
    if bounds:
        return (click.IntRange if hint is int else click.FloatRange)(**bounds)
    return hint


def _call(target: Any, values: dict[str, Any], context: click.Context) -> Any:
    """Calls a function, or makes a dataclass, with the values of its options."""
    arguments: dict[str, Any] = {}
    for name, hint, _ in _hints(target):
        if is_dataclass(hint):
            arguments[name] = _call(hint, values, context)
        elif name == "given":
            sources = {stated.name: context.get_parameter_source(stated.name) for stated in fields(target)}
            arguments[name] = tuple(
                n for n, source in sources.items() if source is ParameterSource.COMMANDLINE
            )
        else:
            arguments[name] = values[name]
    return target(**arguments)
