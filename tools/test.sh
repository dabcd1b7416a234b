#!/usr/bin/env bash
# The tests: set up with the test extra, then pytest. Arguments are passed on. Tests that need more than pip packages
# (slurm, browser, userns, root, gpu) are skipped and listed with the command that enables them.
# Without a choice of tests, those that mostly wait (marked `patient` or `slurm`) run beside the others and are shown after them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_venv.sh test
for argument in "$@"; do
  case $argument in --durations=*|-rs|-q|-v) ;; *) exec .venv/bin/python -m pytest -rs "$@" ;; esac
done
declare -A pids=()
shown=$(mktemp -d)
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$shown"' EXIT
for mark in patient slurm; do
  [ "$mark" = patient ] && chosen=patient || chosen='slurm and not patient'
  .venv/bin/python -m pytest -rs -m "$chosen" "$@" >"$shown/$mark" 2>&1 </dev/null &
  pids[$mark]=$!
done
failed=0
.venv/bin/python -m pytest -rs -m "not patient and not slurm" "$@" || failed=$?
for mark in patient slurm; do
  status=0
  wait "${pids[$mark]}" || status=$?
  printf '\n==== the tests marked %s\n' "$mark"
  cat "$shown/$mark"
  [ "$status" = 0 ] || failed=$status
done
exit "$failed"
