"""The schedules' own options as flags: read from their signatures, so that none is forgotten."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from ..schedules import NUM_COUNTS, by_name
from .values import count

Given = dict[str, int | bool]


def options_of(schedule: str) -> dict[str, inspect.Parameter]:
    """The options of one schedule by their names in Python."""
    parameters = inspect.signature(by_name[schedule], eval_str=True).parameters
    return dict(list(parameters.items())[NUM_COUNTS:])


def owners_of(option: str) -> list[str]:
    """The schedules that have this option."""
    return [name for name in by_name if option in options_of(name)]


def flag_of(option: str) -> str:
    """The option's name on the command line: "num_chunks" is "--chunks"."""
    return "--" + option.removeprefix("num_").replace("_", "-")


def require_owned(schedules: Iterable[str], options: Given) -> None:
    """Refuses options that none of these schedules has."""
    names = list(schedules)
    for option in options:
        owners = owners_of(option)
        if not set(names) & set(owners):
            subject = names[0] if len(names) == 1 else "other schedules"
            raise ValueError(
                f"{flag_of(option)} must go with {', '.join(owners)}, got {subject}. Omit it, or "
                "choose such a schedule"
            )


def with_schedule_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for every option of every schedule.

    Args:
        command: Its parameter `options` gets the given options, by their names in Python.

    Returns:
        The command for typer, with flags in the place of `options`.
    """
    flags = {
        option: parameter for name in by_name for option, parameter in options_of(name).items()
    }
    signature = inspect.signature(command, eval_str=True)

    def run(**arguments: Any) -> None:
        given = {option: arguments.pop(option) for option in flags}
        command(
            **arguments,
            options={option: value for option, value in given.items() if value is not None},
        )

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        as_flags = [as_flag(option, kind) for option, kind in flags.items()]
        parameters += as_flags if parameter.name == "options" else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def as_flag(option: str, parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter that makes typer show and read the flag; its default is None."""
    about = about_option(option)
    if parameter.annotation is bool:
        kind: Any = Annotated[bool | None, typer.Option(flag_of(option), help=about)]
    else:
        shown = typer.Option(flag_of(option), help=about, parser=count, metavar="N")
        kind = Annotated[int | None, shown]
    return inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def about_option(option: str) -> str:
    """The beginnings of the schedules' docstrings on an option, each with its schedules."""
    owners: dict[str, list[str]] = {}
    for name in owners_of(option):
        told = re.search(rf"^ *{option}: ([^.;(]*)", by_name[name].__doc__ or "", re.MULTILINE)
        sentence = " ".join(told[1].split()) if told else option
        owners.setdefault(sentence, []).append(name)
    return " ".join(f"{sentence} ({', '.join(names)})." for sentence, names in owners.items())


def of_schedule(name: str, options: Mapping[str, int | bool]) -> Given:
    """The given options that this schedule has."""
    own = options_of(name)
    return {option: value for option, value in options.items() if option in own}
