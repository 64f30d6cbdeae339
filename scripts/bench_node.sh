#!/usr/bin/env bash
# Everything that is measured on one machine, on all its GPUs: tests, kernels, layers.
#
#   scripts/bench_node.sh OUT [tests|kernels|layers|published ...]
#
# Writes logs, JSON and pictures to OUT. Without sections: all but published, which repeats the shapes of
# published figures (S 8192 and 1024, E 384 and 896, maxvio 0.2 to 20) and wants eight GPUs, or four.
# Every part has a time limit of its own; the exit status is that of the worst.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -ge 1 ]] || { sed -n '2,8p' "$0" >&2; exit 2; }
out=$1 && shift
sections=("$@")
[[ $# -ge 1 ]] || sections=(tests kernels layers)
for section in "${sections[@]}"; do
  [[ " tests kernels layers published " == *" $section "* ]] || {
    echo "unknown section $section: of tests, kernels, layers, published" >&2
    exit 2
  }
done
mkdir -p "$out"
worst=0

# part NAME SECONDS COMMAND...: runs it, its output in OUT/NAME.log, and says how it ended.
part() {
  local name=$1 limit=$2 status=0 begin=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  echo "$name: exit $status, $((SECONDS - begin)) s"
  ((status <= worst)) || worst=$status
}

nvidia-smi --query-gpu=index,name,driver_version --format=csv >"$out/gpus.csv"
part warm 300 python scripts/warm_kernels.py
for section in "${sections[@]}"; do
  case $section in
    tests) part tests 900 python -m pytest -q -n 0 tests/gpu ;;
    kernels) part kernels 240 python scripts/bench_kernels.py --json "$out/kernels.json" ;;
    layers)
      part layers 600 python scripts/bench_layer.py \
        --json "$out/layers.json" --png "$out/layers.png" --trace "$out/overlap.json"
      ;;
    published)
      part published-kernels 300 python scripts/bench_kernels.py --sms 16,32 --maxvio 0.2,1,10,20 \
        --shape 8192,7168,8,384 --shape 8192,7168,8,896 --shape 1024,7168,8,384 \
        --shape 1024,7168,8,896 --json "$out/published-kernels.json"
      part published-layers 480 python scripts/bench_layer.py --cases one,even --factors 1,2 \
        --maxvio 0.2,1,10,20 --slots 16 --iterations 8 \
        --shape E384:7168,2048,384,8,8192 --shape E896:7168,2048,896,8,8192 \
        --shape E896-short:7168,2048,896,8,1024 \
        --json "$out/published-layers.json" --png "$out/published-layers.png"
      ;;
  esac
done
exit "$worst"
