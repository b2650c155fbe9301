"""All tests, in two runs of pytest side by side: `python -m tests [options of pytest]`.

Tests that start whole programs wait most of the time, so they run beside the others, which show their progress.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

APART = [
    "tests/backends/test_several_hosts.py",
    "tests/test_cli.py",
    "tests/test_examples.py",
    "tests/test_readme.py",
]


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    # Each run looks for what its own tests leave in the temporary folder.
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        apart = subprocess.Popen(
            [*pytest, "-p", "no:cacheprovider", *APART],
            env={**os.environ, "TMPDIR": folder},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:  # Ctrl-C reaches both, and both clean up
            code = subprocess.call([*pytest, *(f"--ignore={path}" for path in APART)])
        finally:
            code_apart = apart.wait()
            log.seek(0)
            print(log.read())
    return code or code_apart


if __name__ == "__main__":
    sys.exit(main())
