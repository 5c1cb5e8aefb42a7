"""Where a program is told what to use: its options, then the environment, then `persist.toml`. One parser for all.

    location = "file:./data"                # or s3://bucket/prefix; a relative path is relative to this file
    consensus = "postgresql://host/db"      # if it is not at the location; passwords belong elsewhere, as in ~/.pgpass
    prices = "s3"                           # what requests cost: s3, free, or a table as in { get = 5e-7 }

    [config]                                # fields of persist.Config
    part_bytes = 67108864

`persist.toml` is looked for in the current folder, then in its parents up to the root of the repository (the folder
with .git) or the home folder, whichever comes first. Outside of both, only the current folder counts: a parent that
others may write to, such as /tmp, must not decide where data goes.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from persist_lib.arguments import UNPARSED, did_you_mean, shown
from persist_lib.errors import InvalidUsage

FILE = "persist.toml"
EXAMPLE = '{"part_bytes": 67108864}'
PLACES = ("location", "consensus", "prices")
"""What is one text. Each has an option `--name` and a variable `PERSIST_NAME`."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_ALLOWED: Mapping[str, tuple[tuple[type, ...], str]] = {
    "location": ((str,), 'text, as in location = "file:./data"'),
    "consensus": ((str,), 'text, as in consensus = "postgresql://host/db"'),
    "prices": ((str, dict), 'text or a table, as in prices = "s3" or prices = { get = 5e-7 }'),
    "config": ((dict,), "a table, as in [config] and below it part_bytes = 67108864"),
}


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and where it came from: `--location`, `$PERSIST_LOCATION`, a file's path, or `default`."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What is in force. `config` has a value for each field of `persist.Config` that was given, and no other."""

    location: Given | None = None
    consensus: Given | None = None
    prices: Given | None = None
    config: Mapping[str, Given] = field(default_factory=dict)
    file: Path | None = None

    def text(self, name: str) -> str | None:
        """The location, consensus or prices; None if it was not given."""
        given: Given | None = getattr(self, name)
        return None if given is None else str(given.value)

    def config_values(self) -> dict[str, Any]:
        """The given fields of `persist.Config`, unchecked."""
        return {name: given.value for name, given in self.config.items()}


def resolve(options: Mapping[str, str | None], environ: Mapping[str, str], folder: Path | None = None) -> Settings:
    """Find out what is in force. Options are `location`, `consensus`, `prices` and `config` (JSON); None: not given.

    A Consensus counts together with the location: one of `persist.toml` is not used beside a location that was given by
    an option or by the environment, as it belongs to another place. Raises InvalidUsage for what cannot be right, which
    names the option, variable or file. It opens nothing.
    """
    path = find_file(folder)
    stored = read_file(path) if path else {}
    found = {name: _first(name, options.get(name), environ, stored, str(path)) for name in PLACES}
    location, consensus = found["location"], found["consensus"]
    if consensus and consensus.source == str(path) and location and location.source != str(path):
        found["consensus"] = None
    config = {name: Given(value, str(path)) for name, value in stored.get("config", {}).items()}
    for source, text in (("$PERSIST_CONFIG", environ.get("PERSIST_CONFIG")), ("--config", options.get("config"))):
        config |= {name: Given(value, source) for name, value in parse_config(text, source).items()}
    settings = Settings(found["location"], found["consensus"], found["prices"], config, path)
    check_config(settings.config)
    return settings


def _first(
    name: str, option: str | None, environ: Mapping[str, str], stored: Mapping[str, Any], path: str
) -> Given | None:
    for source, value in ((f"--{name}", option), (f"$PERSIST_{name.upper()}", environ.get(f"PERSIST_{name.upper()}"))):
        if value is None:
            continue
        if not value.strip():
            raise empty(source)
        return Given(value, source)
    return Given(stored[name], path) if name in stored else None


def empty(source: str) -> InvalidUsage:
    """The error for an option or variable without a value."""
    return InvalidUsage(
        f"{source} is empty: perhaps a variable is not set. Nothing was opened. Set it, or leave it out", source=source
    )


def find_file(folder: Path | None = None) -> Path | None:
    """The `persist.toml` that counts in a folder (default: the current one), by the rule at the top of this module."""
    try:
        folder = (folder or Path.cwd()).resolve()
        home = Path.home().resolve()
    except (OSError, RuntimeError):  # the folder was deleted, or nobody knows where home is
        return None
    above = [folder, *folder.parents]
    last = next((place for place, one in enumerate(above) if one == home or _is_there(one / ".git")), 0)
    return next((path for one in above[: last + 1] if _is_there(path := one / FILE)), None)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that we may not look into
        return False


def read_file(path: Path) -> dict[str, Any]:
    """The values of a `persist.toml`. Paths in URLs are absolute then, and prices are text.

    Raises InvalidUsage that names the file and the key for a key that is not known, and for a value of a wrong type.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNPARSED) as error:
        raise InvalidUsage(f"{path} cannot be read: {error}", path=str(path)) from error
    for key, value in found.items():
        if key not in _ALLOWED:
            raise InvalidUsage(
                f"{path}: there is no key {shown(key)}. {did_you_mean(key, _ALLOWED)}It may have "
                f"{', '.join(_ALLOWED)}, and the fields of persist.Config go below [config]",
                path=str(path), key=key,
            )  # fmt: skip
        types, allowed = _ALLOWED[key]
        if not isinstance(value, types) or (isinstance(value, str) and not value.strip()):
            raise InvalidUsage(f"{path}: {key} must be {allowed}: got {shown(value)}", path=str(path), key=key)
    for key in ("location", "consensus"):
        if key in found:
            found[key] = _beside(found[key], path.parent)
    cache = found.get("config", {}).get("cache")
    if isinstance(cache, dict) and isinstance(cache.get("path"), str):
        cache["path"] = os.path.normpath(path.parent / cache["path"])
    if isinstance(found.get("prices"), dict):
        found["prices"] = json.dumps(found["prices"])
    return found


def _beside(url: str, folder: Path) -> str:
    """The URL or path with a relative path of a file taken as relative to this folder."""
    scheme, path = ("file:", url[5:]) if url.startswith("file:") else ("", url)
    if path.startswith(("/", "~")) or (not scheme and _SCHEME.match(path)):
        return url
    return scheme + os.path.normpath(folder / path)


def parse_config(text: str | None, source: str = "PERSIST_CONFIG") -> dict[str, Any]:
    """The fields of `persist.Config` in a JSON object; none for None or an empty text. Raises InvalidUsage."""
    try:
        found = json.loads(text or "{}")
    except UNPARSED as error:
        raise InvalidUsage(
            f"{source} must be a JSON object, such as {EXAMPLE}: {error}. Got {shown(text)}", source=source
        ) from error
    if not isinstance(found, dict):
        raise InvalidUsage(f"{source} must be a JSON object, such as {EXAMPLE}: got {shown(text)}", source=source)
    return found


def config_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `persist.Config` in PERSIST_CONFIG, checked; for programs that do not look for a `persist.toml`."""
    found = parse_config(environ.get("PERSIST_CONFIG"))
    check_config({name: Given(value, "PERSIST_CONFIG") for name, value in found.items()})
    return found


def check_config(config: Mapping[str, Given]) -> None:
    """Raise InvalidUsage, with the source, for a field that `persist.Config` lacks and a value that it refuses."""
    if not config:
        return
    from persist_lib.config import CacheConfig, Config  # noqa: PLC0415 - completion and `--help` do without pydantic

    for name, given in config.items():
        _check_name(name, Config.model_fields, given.source)
        if name == "cache" and isinstance(given.value, Mapping):
            for inner in given.value:
                _check_name(inner, CacheConfig.model_fields, given.source)
        try:
            Config.model_validate({name: given.value})
        except InvalidUsage as error:
            raise InvalidUsage(f"{given.source}: {error.message}", source=given.source, key=name) from error


def _check_name(name: str, known: Iterable[str], source: str) -> None:
    if name not in known:
        meant = did_you_mean(name, known)
        raise InvalidUsage(
            f"{source}: there is no setting {shown(name)}. {meant}There are {', '.join(known)}", source=source, key=name
        )
