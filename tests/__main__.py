"""All tests, in two runs of pytest side by side: `python -m tests [options of pytest]`.

Tests of backends start processes and wait for them most of the time; they run beside the others, which show their
progress.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BESIDE = "tests/backends"


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    # Each run looks for what its own tests leave in the temporary folder.
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        beside = subprocess.Popen(
            [*pytest, "-p", "no:cacheprovider", BESIDE],
            env={**os.environ, "TMPDIR": folder},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:  # Ctrl-C reaches both, and both clean up
            code = subprocess.call([*pytest, f"--ignore={BESIDE}"])
        finally:
            code_beside = beside.wait()
            log.seek(0)
            print(log.read())
    return code or code_beside


if __name__ == "__main__":
    sys.exit(main())
