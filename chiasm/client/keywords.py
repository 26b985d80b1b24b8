"""Misspelt options are answered with the name that was meant. Knows signatures, not what the options say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from chiasm.errors import MAX_SHOWN, Fact, InvalidRequest

C = TypeVar("C", bound=Callable[..., Any])

_NOWHERE: Mapping[str, str] = MappingProxyType({})


def known_keywords(elsewhere: Mapping[str, str] = _NOWHERE) -> Callable[[C], C]:
    """Decorates a function or a class: a keyword it does not take is InvalidRequest UNKNOWN_FIELD, which names the
    nearest one it takes. Signatures stay what they are.

    Args:
        elsewhere: options that callers look for here, and how they are given instead.
    """

    def decorate(subject: C) -> C:
        function = subject.__init__ if isinstance(subject, type) else subject  # type: ignore[misc]
        name = subject.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]

        def check(options: Mapping[str, Any]) -> None:
            for option in options:
                if option not in known:
                    raise _unknown(name, option, known, elsewhere)

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            check(options)
            return function(*args, **options)

        @wraps(function)
        async def awaited(*args: Any, **options: Any) -> Any:
            check(options)
            return await function(*args, **options)

        if isinstance(subject, type):
            subject.__init__ = checked  # type: ignore[misc]
            return subject
        return awaited if inspect.iscoroutinefunction(function) else checked  # type: ignore[return-value]

    return decorate


def _unknown(name: str, option: str, known: list[str], elsewhere: Mapping[str, str]) -> InvalidRequest:
    shown = option[:MAX_SHOWN]
    facts: dict[str, Fact] = {"field": shown}
    message = f"{name} takes no option {shown!r}"
    if option in elsewhere:
        return InvalidRequest("UNKNOWN_FIELD", f"{message}; it is given as {elsewhere[option]}", facts=facts)
    if nearest := get_close_matches(shown, known, n=1):
        facts["nearest"] = nearest[0]
        message += f"; the nearest is {nearest[0]}"
    else:
        message += f"; it takes {', '.join(known)}"
    return InvalidRequest("UNKNOWN_FIELD", message, facts=facts)
