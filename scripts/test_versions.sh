#!/usr/bin/env bash
# The suite under every supported Megatron-Core, and that an older one is refused by name; nightly.
#
#   scripts/test_versions.sh [--megatron-lm DIR] [PYTEST ARGUMENT ...]
#
# DIR: a checkout of Megatron-LM, such as its main, to test beside the releases.
# Each has a folder of its own in .versions/, found before the environment of scripts/test.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

RELEASES=(0.18.2 0.19.2) # the last of each supported minor version
REFUSED=0.17.1

checkout=
if [[ "${1:-}" == --megatron-lm ]]; then
  [[ -f "${2:-}/megatron/core/package_info.py" ]] || fail "--megatron-lm ${2:-} holds no Megatron-LM"
  checkout="$(cd "$2" && pwd)"
  shift 2
fi

prepare_venv dev
python="$VENV/bin/python"
failed=0

# install VERSION: prints the folder that holds it.
install() {
  local folder="$ROOT/.versions/$1"
  if [[ ! -f "$folder/installed" ]]; then
    rm -rf "$folder"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
      "megatron-core==$1" >&2 || fail "pip could not install megatron-core $1"
    touch "$folder/installed"
  fi
  echo "$folder"
}

# run_suite NAME FOLDER ARGUMENT ...: one line of what became of it; its output is kept beside.
run_suite() {
  local name folder="$2" log="$ROOT/.versions/$1.log" verdict=ok
  name="$(PYTHONPATH="$folder" "$python" -c 'import megatron.core as m; print(m.__version__)' 2>/dev/null)"
  shift 2
  (cd "$ROOT" && PYTHONPATH="$folder" "$VENV/bin/pytest" -n 2 --dist loadfile "$@") >"$log" 2>&1 \
    || { verdict=FAILED; failed=1; }
  echo "megatron-core $name: $verdict, $(tail -n 1 "$log" | tr -d '=') (${log#"$ROOT"/})"
}

mkdir -p "$ROOT/.versions"
for version in "${RELEASES[@]}"; do
  folder="$(install "$version")" || exit 1
  run_suite "$version" "$folder" "$@"
done
[[ -z "$checkout" ]] || run_suite "checkout" "$checkout" "$@"

folder="$(install "$REFUSED")" || exit 1
said="$(PYTHONPATH="$folder" "$python" -c 'import moonep_megatron; moonep_megatron.enable()' 2>&1)" \
  && fail "megatron-core $REFUSED was not refused"
line="$(tail -n 1 <<<"$said")"
[[ "$line" == *"megatron-core $REFUSED is not supported"* ]] || fail "megatron-core $REFUSED: $line"
echo "megatron-core $REFUSED: refused (${line})"
exit "$failed"
