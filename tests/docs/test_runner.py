"""The runner of snippets notices what is not so, and leaves out nothing in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("runner.py")


def run(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    (folder / "page.md").write_text(page)
    command = [sys.executable, "-I", str(RUNNER), "page.md"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


RIGHT = """
# A page

```python
import os
word = "made by Python"
open("file", "w").write(word + "\\n")  # how long it is, in words
[len(word)]  # [14]
with open("file") as file:
    file.read()  # 'made by Python\\n'
print("one", os.getpid(), "two")
```

```text title="output"
one … two
```

1. In a list:

   ```bash
   cat file
   echo more
   ```

   ```text title="output"
   made by Python
   …
   ```

```console
$ cat file; \\
  echo again
made by Python
again
$ ls nowhere
ls: …
```

```python title="not run: needs a cluster"
1 / 0
```

```json
{}
```
"""


def test_what_is_so_passes(tmp_path: Path) -> None:
    done = run(tmp_path, RIGHT)
    assert (done.returncode, done.stdout) == (0, "3 snippets\n"), done.stderr


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("$ ls nowhere\nls: …\n", "$ ls nowhere\n", "exit status 2"),  # it fails, and the page does not show it
        ("[14]", "[15]", "line 8 says [15], and it is [14]"),
        ("one … two", "two", "the page shows\ntwo"),
        ("   made by Python\n   …", "   more", "and it prints\nmade by Python\nmore"),
        ("again\n$", "once\n$", "once"),
        ("   cat file", "   cat fil", "the bash at line"),
        ("import os", "import nonsense", "ModuleNotFoundError"),
        ("not run: needs a cluster", "not run", "say why it is not run"),
        ("not run: needs a cluster", "", "ZeroDivisionError"),
        ("```json", "```py", "```py is not known"),
        ("{}\n```", "{}", "never closed"),
    ],
)
def test_what_is_not_so_is_told_with_its_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    page = RIGHT.replace(old, new)
    assert page != RIGHT
    done = run(tmp_path, page)
    assert done.returncode == 1, done.stdout
    assert says in done.stderr
