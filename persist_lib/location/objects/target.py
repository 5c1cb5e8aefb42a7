"""URLs of places in object stores: which cloud, which bucket, and below which prefix.

    s3://bucket/prefix?endpoint=http://host:9000&region=eu-central-1&path_style=true&ca=/etc/ca.pem&profile=name
                      &checksums=when_required
    gs://bucket/prefix?endpoint=http://host:4443&ca=/etc/ca.pem
    az://container/prefix?account=name&endpoint=https://host/name&ca=/etc/ca.pem

With `+cas` behind the name of the cloud, as in `gs+cas://bucket/prefix`, a location has its consensus there as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

from persist_lib.errors import InvalidName, InvalidUsage

LONGEST_PREFIX = 200
LONGEST_KEY = 1024
ANY: Final[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Cloud:
    """One cloud's object store: what people call it and its buckets, its class and extra, and the options of its URLs.

    The values of an option are any text, unless some are named.
    """

    name: str
    bucket: str
    kind: tuple[str, str]
    extra: str
    options: Mapping[str, tuple[str, ...]]


CLOUDS: Mapping[str, Cloud] = {
    "s3": Cloud(
        "S3", "bucket", ("persist_lib.location.s3.objects", "S3Objects"), "s3",
        {
            "ca": ANY, "checksums": ("when_supported", "when_required"), "endpoint": ANY,
            "path_style": ("true", "false"), "profile": ANY, "region": ANY,
        },
    ),
    "gs": Cloud(
        "GCS", "bucket", ("persist_lib.location.gcs.objects", "GcsObjects"), "gcs", {"ca": ANY, "endpoint": ANY}
    ),
    "az": Cloud(
        "Azure", "container", ("persist_lib.location.azure.objects", "AzureObjects"), "azure",
        {"account": ANY, "ca": ANY, "endpoint": ANY},
    ),
}  # fmt: skip
"""By the schemes of their URLs."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where objects are: a bucket, a prefix without slashes around it, how to reach them, and on which cloud."""

    bucket: str
    prefix: str
    options: Mapping[str, str]
    scheme: str = "s3"

    @property
    def cloud(self) -> Cloud:
        """Whose store it is."""
        return CLOUDS[self.scheme]

    @property
    def where(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def path(self, *parts: str) -> str:
        """Return the object's name for a key of ours. Raises InvalidName if it is too long for the store."""
        name = "/".join([self.prefix, *parts] if self.prefix else parts)
        if len(name.encode()) > LONGEST_KEY:
            raise InvalidName(
                f"{name!r} is longer than {self.cloud.name}'s {LONGEST_KEY} bytes; use a shorter prefix", key=name
            )
        return name


def is_on_cloud(place: str) -> bool:
    """Whether a text is the URL of a place in an object store, such as `gs://…`, but not of a consensus there."""
    return "://" in place and place.partition(":")[0] in CLOUDS


def parse_url(url: str) -> Target:
    """Parse a URL. Raises InvalidUsage if it is invalid or has unknown options."""
    scheme, _, rest = url.partition(":")
    cloud = CLOUDS[scheme.removesuffix("+cas")]
    place, _, query = rest.partition("?")
    bucket, _, prefix = place.removeprefix("//").partition("/")
    prefix = unquote(prefix).strip("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(cloud.options))
    if not place.startswith("//") or not bucket:
        article = "an" if cloud.name[0] in "AS" else "a"
        raise InvalidUsage(f"{article} {cloud.name} location is {scheme}://{cloud.bucket}/prefix: got {url!r}", url=url)
    if unknown:
        raise InvalidUsage(f"{url}: unknown options {unknown}; known are {', '.join(cloud.options)}", url=url)
    for name, given in options.items():
        if (values := cloud.options[name]) and given not in values:
            raise InvalidUsage(f"{url}: {name} must be {' or '.join(values)}", url=url)
    if len(prefix.encode()) > LONGEST_PREFIX or "//" in prefix:
        raise InvalidUsage(f"{url}: the prefix must be at most {LONGEST_PREFIX} bytes and have no '//'", url=url)
    return Target(bucket, prefix, options, scheme.removesuffix("+cas"))


def canonical(url: str) -> str:
    """Return one spelling for all equal URLs. Raises InvalidUsage for an invalid one."""
    target = parse_url(url)
    query = urlencode(sorted(target.options.items()))
    place = f"{url.partition(':')[0]}://{target.bucket}/{quote(target.prefix)}"
    return f"{place}?{query}" if query else place
