"""Failures of the example programs that a user can understand, each with its exit code."""

from __future__ import annotations


class Failed(Exception):
    """A failure that a user can understand. The message says what is wrong and what to do."""

    exit_code = 1


class GitFailed(Failed):
    """Git could not answer. The message holds what was asked and what git said."""


class NotUnderstood(Failed):
    """Git wrote something that the parser does not understand."""


class OtherSource(Failed):
    """The shard was filled from another source; going on would mix two collections."""

    exit_code = 3


class Differs(Failed):
    """The shard's contents differ from their source."""

    exit_code = 4
