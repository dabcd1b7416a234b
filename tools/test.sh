#!/usr/bin/env bash
# The tests: set up with the test extra, then pytest. Arguments are passed on. Tests that need more than pip packages
# (slurm, browser, userns, root, gpu) are skipped and listed with the command that enables them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_venv.sh test
exec .venv/bin/python -m pytest -rs "$@"
