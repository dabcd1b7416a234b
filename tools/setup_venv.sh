#!/usr/bin/env bash
# Make .venv beside the project and install gyre_hpc into it; sourced by quickstart.sh and test.sh.
#   setup_venv.sh [EXTRA]     EXTRA: test
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "gyre_hpc needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
  exit 2
}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
want="$(cat setup.cfg pyproject.toml | sha256sum | cut -c1-16) ${1:-}"
if [ "$(cat .venv/installed 2>/dev/null)" != "$want" ]; then
  # 2.13.0 is the version the project is checked with; a CPU build suffices. An installed torch >= 2.6 is kept.
  .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/pip install --quiet 'torch==2.13.0'
  .venv/bin/pip install --quiet --editable ".${1:+[$1]}"
  # Without its dependencies: it declares torch with CUDA, of which region transport needs nothing.
  if [ "${1:-}" = test ] && ! .venv/bin/pip install --quiet --no-deps 'nixl-cu12==1.5.1'; then
    echo "NIXL has no wheel for this machine: its tests will be skipped" >&2
  fi
  echo "$want" >.venv/installed
fi
