#!/usr/bin/env bash
# The main job on this machine: set up, then `gyre train experiment=quickstart`. Arguments are passed on as overrides:
#   tools/quickstart.sh schedule.steps=10 seed=3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_venv.sh
exec .venv/bin/gyre train experiment=quickstart "$@"
