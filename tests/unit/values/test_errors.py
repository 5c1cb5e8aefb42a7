"""Exceptions: one tree, fields that can be read, and the same on the other side of a pickle."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from persist_lib import errors
from persist_lib.errors import Corrupt, Determinate, PersistError, TimedOut, UpperMismatch
from persist_lib.frontier import TOP, at

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PersistError)]


@pytest.mark.parametrize("kind", ALL)
def test_an_exception_keeps_its_type_message_and_fields_in_another_process(kind):
    error = kind("what was asked, what is so", shard="orders", expected=at(3), actual=TOP, key=None)
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(same) is kind
        assert str(same) == "what was asked, what is so"
        assert same.fields == error.fields
        assert (same.expected, same.actual, same.key) == (at(3), TOP, None)


def test_a_field_that_was_not_given_is_no_attribute():
    error = UpperMismatch("no", expected=at(1))
    assert error.expected == at(1)
    assert not hasattr(error, "actual")
    with pytest.raises(AttributeError):
        _ = error.actual


def test_a_timeout_is_determinate_and_damage_is_not_retried_by_mistake():
    assert issubclass(TimedOut, Determinate)
    assert not issubclass(Corrupt, (Determinate, errors.Indeterminate))
    assert not issubclass(errors.Indeterminate, Determinate)


@pytest.mark.parametrize("kind", ALL)
def test_every_exception_says_what_it_is_for(kind):
    assert kind.__doc__
    assert kind.__doc__ != kind.__bases__[0].__doc__
