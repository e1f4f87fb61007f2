"""Every check of the operator's kit, after getting the tools: `python tests/operations/run.py [PYTEST ARGUMENTS]`."""

import subprocess
import sys

import tools

if __name__ == "__main__":
    tools.install()
    command = [sys.executable, "-m", "pytest", "-m", "operations", "tests/operations", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=tools.ROOT, check=False).returncode)
