#!/usr/bin/env bash
# The tests: set up with the test extra, then pytest. Arguments are passed on. Tests that need more than pip packages
# (slurm, browser, userns, root, gpu) are skipped and listed with the command that enables them.
# Without a choice of tests, those that mostly wait (mark `patient`) run beside the others and are shown after them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_venv.sh test
for argument in "$@"; do
  case $argument in --durations=*|-rs|-q|-v) ;; *) exec .venv/bin/python -m pytest -rs "$@" ;; esac
done
patient=$(mktemp)
.venv/bin/python -m pytest -rs -m patient "$@" >"$patient" 2>&1 </dev/null &
waiting=$!
trap 'kill $waiting 2>/dev/null || true; rm -f "$patient"' EXIT
status=0 late=0
.venv/bin/python -m pytest -rs -m "not patient" "$@" || status=$?
wait "$waiting" || late=$?
printf '\n==== the tests that mostly wait\n'
cat "$patient"
[ "$status" = 0 ] || exit "$status"
exit "$late"
