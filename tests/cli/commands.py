"""Command lines in documents, held against the commands that there are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click

from baton.cli import make_app


def _command(name: str) -> Any:
    """A command like `up`, or `bench overlap`; raises KeyError for one that is none."""
    command: Any = make_app(name.split(maxsplit=1)[0])
    for word in name.split():
        command = command.commands[word]
    return command


def options(name: str) -> dict[str, bool]:
    """The options of a command, and whether each takes a value; raises KeyError for one that is none."""
    return {
        option: not getattr(parameter, "is_flag", False)
        for parameter in _command(name).params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-")
    } | {"--help": False}


def arguments(name: str) -> int:
    """How many words a command takes beside its options."""
    return sum(1 for parameter in _command(name).params if parameter.param_type_name == "argument")


def problems(words: list[str]) -> Iterator[str]:
    """What is wrong with the words after `baton`."""
    verb, *rest = words
    if verb == "bench" and rest:
        verb, *rest = f"bench {rest[0]}", *rest[1:]
    try:
        known, num_arguments = options(verb), arguments(verb)
    except KeyError:
        yield f"there is no baton {verb}"
        return
    given, num_words = [], 0
    while rest:
        word = rest.pop(0)
        if word == "--":  # the rest is another program's
            break
        if not word.startswith("-"):
            num_words += 1
            continue
        name, equals, _ = word.partition("=")
        given.append(name)
        if name not in known:
            yield f"baton {verb} has no {name}"
        elif name.endswith("-args") and rest:
            yield from problems(["serve", *shlex.split(rest.pop(0))])
        elif known[name] and not equals:
            if not rest or re.match(r"-\S+$", rest[0]):
                yield f"baton {verb} {name} has no value"
            else:
                rest.pop(0)
    if num_words > num_arguments:
        yield f"baton {verb} takes {num_arguments} words beside its options, not {num_words}"
    yield from (f"baton {verb} has {name} twice" for name in set(given) if given.count(name) > 1)
    yield from _bad_values(verb, words[len(verb.split()) :])


def _bad_values(verb: str, line: list[str]) -> Iterator[str]:
    """Values that the command's own parser refuses. Placeholders in capitals stand for any value."""
    if any(re.fullmatch(r"[A-Z][A-Z_]*", word) for word in line):
        return
    try:
        _command(verb).make_context(verb, line, resilient_parsing=False)
    except click.exceptions.Exit:  # --help
        return
    except click.MissingParameter:  # an excerpt of a line
        return
    except click.ClickException as error:
        yield f"baton {verb}: {error.format_message()}"


def in_shell(script: str) -> Iterator[list[str]]:
    """The words after `baton` of every such command in a script."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "VALUE", line), posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in (*lexer, ";"):
            if set(word) <= set(";&|()"):
                yield from [command[1:]] if command and command[0].rpartition("/")[2] == "baton" else []
                command = []
            else:
                command.append(word)
