"""What location operations cost, in counts, bytes and dollars."""

from __future__ import annotations

import msgspec


class Prices(msgspec.Struct, frozen=True):
    """Dollars. The defaults are S3's list prices (us-east-1, standard, 2026)."""

    put: float = 5e-6
    get: float = 4e-7
    list: float = 5e-6
    delete: float = 0.0
    gib_month: float = 0.023


class Cost(msgspec.Struct, frozen=True):
    """Requests, bytes, and dollars for them. Costs add up."""

    bytes_read: int = 0
    bytes_written: int = 0
    gets: int = 0
    puts: int = 0
    dollars: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.gets + other.gets,
            self.puts + other.puts,
            self.dollars + other.dollars,
        )

    def priced(self, prices: Prices) -> Cost:
        """The same with dollars from a price table."""
        return msgspec.structs.replace(self, dollars=self.gets * prices.get + self.puts * prices.put)


def storage_dollars(size: int, prices: Prices) -> float:
    """Dollars a month for `size` bytes."""
    return size / 2**30 * prices.gib_month
