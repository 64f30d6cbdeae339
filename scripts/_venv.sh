# Sourced by demo.sh and test.sh: finds a Python and fills .venv beside the README.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

fail() {
  echo "error: $*" >&2
  exit 1
}

# Prints the first Python >= 3.12 that runs (a pyenv shim may be on PATH and still not run).
find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    usable_python "$PYTHON" || fail "PYTHON=$PYTHON does not run or is older than 3.12: name another"
    echo "$PYTHON"
    return
  fi
  for candidate in python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    if usable_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "found no Python >= 3.12 on PATH or in pyenv: install one, or name it with PYTHON=/path"
}

usable_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# prepare_venv [EXTRA]: installs the package, with the extra, unless this pyproject.toml's is there.
prepare_venv() {
  local extra="${1:-}" python stamp requirement
  # Never in $(...) of a local: its failure would be lost.
  python="$(find_python)" || exit 1
  stamp="$VENV/installed${extra:+-$extra}"
  if [[ -f "$stamp" ]] && cmp -s "$ROOT/pyproject.toml" "$stamp" && usable_python "$VENV/bin/python"
  then
    return
  fi
  if ! usable_python "$VENV/bin/python"; then
    "$python" -m venv --clear "$VENV" \
      || fail "$python cannot make $VENV: install its venv module, or set PYTHON"
  fi
  requirement="$ROOT${extra:+[$extra]}"
  echo "Installing $requirement into .venv (the first time: several GB, some minutes) ..."
  constrain_torch
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$VENV/constraints.txt" --editable "$requirement" \
    || fail "pip could not install the package; its message stands above"
  cp "$ROOT/pyproject.toml" "$stamp"
}

# Where no torch is installed yet, take the release that the project is tested with.
constrain_torch() {
  if "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    : >"$VENV/constraints.txt"
  else
    echo "torch==2.11.0" >"$VENV/constraints.txt"
  fi
}
