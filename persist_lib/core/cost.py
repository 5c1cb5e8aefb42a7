"""What location operations cost, in counts, bytes and dollars."""

from __future__ import annotations

import msgspec

from persist_lib.arguments import UNREADABLE, check_type, did_you_mean, parse_number, shown
from persist_lib.errors import InvalidUsage

GIB = 2**30


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices in dollars. The defaults are S3's list prices (us-east-1, standard, 2026). Never negative.

    `commit` and `query` are the prices of operations of a Consensus that is no object store. They are 0 by default, as
    a database is usually paid by the hour; set them for one that is paid by the request (DynamoDB, Aurora's I/O).
    `egress_gib` is the price of a GiB read: 0 within a region, and 0.09 to the Internet.
    """

    put: float = 5e-6
    get: float = 4e-7
    list: float = 5e-6
    delete: float = 0.0
    gib_month: float = 0.023
    egress_gib: float = 0.0
    commit: float = 0.0
    query: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            price = getattr(self, name)
            try:
                parse_number(price, name)
            except InvalidUsage:
                text = f"a price is a number of dollars, 0 or more: got {name}={shown(price)}"
                raise InvalidUsage(text, price=name) from None


S3_LIST = Prices()
FREE = Prices(put=0.0, get=0.0, list=0.0, delete=0.0, gib_month=0.0)
"""The prices of a disk, of memory, and of a server that runs anyway."""
NAMED = {
    "s3": S3_LIST,
    "gcs": Prices(gib_month=0.02),
    "azure": Prices(put=5.5e-6, list=5.5e-6, get=4.4e-7, gib_month=0.0184),
    "free": FREE,
}
"""List prices: of S3 (us-east-1, standard), Google Cloud Storage (us-central1, standard), Azure (East US, hot, LRS)."""


def parse_prices(text: str) -> Prices:
    """Parse `s3`, `gcs`, `azure`, `free`, or a JSON object of what differs from S3's: `{"egress_gib": 0.09}`."""
    try:
        return NAMED.get(text) or msgspec.json.decode(text, type=Prices)
    except UNREADABLE as error:
        names, fields = ", ".join(map(repr, NAMED)), ", ".join(Prices.__struct_fields__)
        raise InvalidUsage(
            f"prices are {names} or a JSON object of {fields}; got {text!r}: {error}. {_meant(text)}",
            prices=text,
        ) from error


def _meant(text: str) -> str:
    """The name or field that was meant, as the end of a message."""
    try:
        given = msgspec.json.decode(text)
    except UNREADABLE:
        return did_you_mean(text, NAMED).rstrip()
    unknown = [name for name in given if name not in Prices.__struct_fields__] if isinstance(given, dict) else []
    return did_you_mean(unknown[0], Prices.__struct_fields__).rstrip() if unknown else ""


class Cost(msgspec.Struct, frozen=True):
    """Requests, bytes, and dollars for them. Costs add up, pickle, and travel between processes.

    Gets, puts, lists and deletes are requests to an object store, by price class (a HEAD is a get, and each piece of a
    large upload is a put), or operations of a Blob that has no requests. Commits and queries are operations of a
    Consensus that is no object store. Bytes are those of objects and rows, without headers.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    gets: int = 0
    puts: int = 0
    lists: int = 0
    deletes: int = 0
    commits: int = 0
    queries: int = 0
    dollars: float = 0.0

    @property
    def requests(self) -> int:
        """The number of all requests and operations together."""
        return self.gets + self.puts + self.lists + self.deletes + self.commits + self.queries

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def priced(self, prices: Prices) -> Cost:
        """The same with dollars from a price table."""
        check_type(prices, Prices, "prices", "persist.Prices()")
        dollars = (
            self.gets * prices.get + self.puts * prices.put + self.lists * prices.list + self.deletes * prices.delete
            + self.commits * prices.commit + self.queries * prices.query + self.bytes_read / GIB * prices.egress_gib
        )  # fmt: skip
        return msgspec.structs.replace(self, dollars=dollars)


def storage_dollars(size: int, prices: Prices) -> float:
    """Dollars a month for `size` bytes."""
    return size / GIB * prices.gib_month
