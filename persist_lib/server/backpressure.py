"""How much a server takes on at a time, of all its clients and of each of them."""

from __future__ import annotations

from collections import Counter

from persist_lib.errors import Overloaded

COMMANDS_MOST = 4096
"""The most commands and other calls under way."""
COMMANDS_OF_A_CLIENT = 1024
BYTES_MOST = 256 << 20
"""The most bytes of messages under way; the values made of them take a few times that."""
BYTES_OF_A_CLIENT = 96 << 20
"""One message of the largest size fits in."""


class Load:
    """What is under way, by client. For one thread: a server's loop."""

    def __init__(
        self, commands: int = COMMANDS_MOST, commands_of_a_client: int = COMMANDS_OF_A_CLIENT,
        size: int = BYTES_MOST, size_of_a_client: int = BYTES_OF_A_CLIENT,
    ) -> None:  # fmt: skip
        self._bounds = (("commands", commands, commands_of_a_client), ("bytes", size, size_of_a_client))
        self.commands = self.bytes = 0
        self._of: dict[str, Counter[str]] = {"commands": Counter(), "bytes": Counter()}

    @property
    def clients(self) -> int:
        """How many clients have something under way."""
        return len(self._of["commands"])

    def take(self, client: str, commands: int, size: int) -> None:
        """Count a call of so many commands and bytes. Raises Overloaded, and counts nothing, if it is too much."""
        for (what, most, of_a_client), more in zip(self._bounds, (commands, size), strict=True):
            for has, bound, whose in (
                (self._of[what][client], of_a_client, client),
                (getattr(self, what), most, "all clients"),
            ):
                if has + more > bound:
                    raise Overloaded(
                        f"{has} {what} of {whose} are under way in this server, and at most {bound} may be. This call "
                        f"of {more} was not taken, and nothing was done; wait for an answer, and try again",
                        waiting=has, most=bound,
                    )  # fmt: skip
        self._add(client, commands, size)

    def give_back(self, client: str, commands: int, size: int) -> None:
        """Count a call no more. It was taken before."""
        self._add(client, -commands, -size)

    def _add(self, client: str, commands: int, size: int) -> None:
        self.commands += commands
        self.bytes += size
        for counted, more in zip(self._of.values(), (commands, size), strict=True):
            counted[client] += more
            if not counted[client]:
                del counted[client]
