"""Failures of the example programs that a user can understand, each with its exit code."""

from __future__ import annotations


class Failed(Exception):
    """The message says what is so and what to do."""

    exit_code = 1


class GitFailed(Failed):
    """Git could not answer. The message holds what was asked and what git said."""


class NotUnderstood(Failed):
    """Git wrote something that is not understood here."""


class OtherSource(Failed):
    """The shard was filled from something else; going on would mix two collections."""

    exit_code = 3


class Differs(Failed):
    """The shard's contents are not what their source says."""

    exit_code = 4
