"""Every check of the operator's kit: `python tests/operations/run.py`. Gets the tools first; more arguments are pytest's."""

import subprocess
import sys

import tools

if __name__ == "__main__":
    tools.install()
    command = [sys.executable, "-m", "pytest", "-m", "operations", "tests/operations", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=tools.ROOT, check=False).returncode)
