"""Puts the changed code of a function in the place of its own, in this process, without importing anything again.

What was imported from a module are its functions: so it is their code that is exchanged, and not the functions. What
has run when the module was imported stays as it was.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from types import CodeType, FunctionType

Functions = dict[tuple[str, str, int], list[FunctionType]]
"""All functions that are loaded, by file, name and first line."""


class Unplantable(Exception):
    """The changed code does not fit in the place of the function's own."""


def functions(folder: str) -> Functions:
    """All functions of the files below a folder that are loaded now."""
    gc.unfreeze()
    found: Functions = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(folder):
            found[_place(one.__code__)].append(one)
    gc.freeze()
    return found


def plant(path: str, before: str, after: str, loaded: Functions) -> int:
    """Exchange the code of all functions of a file that two sources differ in; return how many function objects had it.

    Raises Unplantable if the sources differ in which functions they have, if a function uses other variables of those
    around it, or if nothing that is loaded has the code.
    """
    pairs = _changed(compile(before, path, "exec"), compile(after, path, "exec"))
    if pairs is None:
        raise Unplantable("the source has other functions")
    planted = 0
    for one, other in pairs:
        for function in loaded.get(_place(one), ()):
            try:
                function.__code__ = other
            except ValueError as error:
                raise Unplantable(str(error)) from None
            planted += 1
    if not planted:
        raise Unplantable("no function that is loaded has this code")
    return planted


def _changed(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The codes that differ, with what becomes of them; outer ones, too, as a code has those within it as constants.

    None where the old one and the new one have other codes within them.
    """
    within = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    if [one.co_qualname for one in within[0]] != [one.co_qualname for one in within[1]]:
        return None
    found: list[tuple[CodeType, CodeType]] = []
    for one, other in zip(*within, strict=True):
        # A comprehension that is gone is a change of the function around it.
        found += [(one, other)] if (inner := _changed(one, other)) is None else inner
    return [*found, (old, new)] if found or _does(old) != _does(new) else []


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _does(code: CodeType) -> tuple[object, ...]:
    """What a code does, without where its lines are; constants have their types, as 1 equals True."""
    values = [repr(one) for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, values
