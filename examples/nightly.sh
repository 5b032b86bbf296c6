#!/usr/bin/env bash
# One night anywhere: run a matrix, compare it with the last good night, leave the reports in ./night. From cron:
#
#   17 2 * * * cd /srv/matrices && FOLDER=/data/nightly MATRIX=my.yaml /srv/trtllm-pipeline/examples/nightly.sh
#
# FOLDER       what stays from night to night: the workspace, and the baseline of each matrix
# MATRIX       matrix file, or the name of a shipped one
# BASELINE     report to compare with in place of the last good night's, which then stays what it is
# REF          branch that is run, if it is not the main one: it gets its own workspace, and the baseline stays what it is
# FAIL_ON      conditions of `pipeline compare`
# NIGHT        what the run is called, another every night
#
# The exit code is that of `pipeline run`, or else of `pipeline compare`: 1 if a cell failed or a condition does not hold, 4
# if the baseline was measured under other conditions. .github/workflows/nightly.yml does the same on GitHub.
set -euo pipefail

FOLDER=${FOLDER:-$HOME/trtllm-pipeline}
MATRIX=${MATRIX:-nightly}
FAIL_ON=${FAIL_ON:-ttft_p50:+10%,tpot_p50:+10%,output_tps:-5%,accuracy:-2%}
NIGHT=${NIGHT:-night-$(date +%Y%m%d-%H%M%S)}
export PIPELINE_WORKSPACE=$FOLDER/${REF:+refs/$REF/}workspace
kept=$FOLDER/$(basename "$MATRIX" .yaml).json

rm -rf night
mkdir night
pipeline plan --matrix "$MATRIX" --format markdown | tee night/plan.md

run=0
pipeline run --matrix "$MATRIX" --name "$NIGHT" || run=$?
# There is nothing to compare and to report if it was stopped, or if it never began: no hub was reached, for instance.
{ [ "$run" -le 1 ] && pipeline status --run "$NIGHT" > /dev/null 2>&1; } || exit "$run"

gate=0
if [ -n "${BASELINE:-}" ] || [ -e "$kept" ]; then
  pipeline compare "$NIGHT" "${BASELINE:-$kept}" --fail-on "$FAIL_ON" --format markdown | tee night/compare.md || gate=$?
fi

pipeline report --run "$NIGHT" --format markdown --output night/report.md
pipeline report --run "$NIGHT" --format json --output night/report.json
pipeline report --run "$NIGHT" --format junit --output night/junit.xml
page=$(pipeline report --run "$NIGHT" --format html) # in the folder of the run, where its lock file is too
cp -r "$page" "$(dirname "$page")/lock" night/
pipeline store prune --unused-for 30d

[ "$run" -eq 0 ] || exit "$run"
[ "$gate" -eq 0 ] || exit "$gate"
[ -n "${BASELINE:-}${REF:-}" ] || pipeline report --run "$NIGHT" --format json --output "$kept"
