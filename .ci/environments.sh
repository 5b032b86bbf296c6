# shellcheck shell=bash
# Shared by .ci/run and .ci/nightly: Python environments by uv in "$work", which is removed at the end.
set -euo pipefail

# As on a user's machine: without byte code every process would compile the package again.
unset PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=0

work=$(mktemp -d)
declare -A begun=()
ended() {
  for job in "${begun[@]}"; do
    kill -- "-$job" 2>/dev/null || true
  done
  rm -rf "$work"
}
trap ended EXIT
pyenv_root=$(pyenv root 2>/dev/null || true)
# python VERSION: the path of that Python.
python() {
  local candidate
  for candidate in "python$1" "$pyenv_root"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import sys; raise SystemExit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  echo "needs Python $1" >&2
  return 1
}

# uv is in an environment of this run if the machine has none.
command -v uv >/dev/null || {
  "$(python 3.11)" -m venv "$work/uv"
  "$work/uv/bin/pip" install --quiet uv
  PATH=$work/uv/bin:$PATH
}

# environment NAME VERSION REQUIREMENT...: a new virtual environment with these installed.
environment() {
  uv venv --quiet --seed --python "$(python "$2")" "$work/$1"
  uv pip install --quiet --python "$work/$1/bin/python" "${@:3}"
}

# beside NAME COMMAND...: starts a command beside what follows, in a process group that ends with this run. `joined NAME` waits
# for it, shows what it said, and fails if it failed.
beside() {
  set -m
  ("${@:2}") </dev/null >"$work/$1.log" 2>&1 &
  set +m
  begun[$1]=$!
}
joined() {
  local code=0
  wait "${begun[$1]}" || code=$?
  cat "$work/$1.log"
  return "$code"
}

# checked REASONS COMMAND...: runs a command that runs tests. They may be skipped for these reasons only.
checked() {
  "${@:2}" </dev/null 2>&1 | tee "$work/output"
  if grep '^SKIPPED' "$work/output" | grep -vE "$1"; then
    echo "these tests must run here" >&2
    exit 1
  fi
}
