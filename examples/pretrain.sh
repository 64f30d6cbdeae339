#!/usr/bin/env bash
# Pretrains a model of configs/ with Megatron-LM, on every node the same command:
#
#   MEGATRON_LM=DIR DATA=PREFIX TOKENIZER=NAME examples/pretrain.sh CONFIG [moonep|alltoall] [FLAG ...]
#
# CONFIG     a line of the table below; its model and parallel sizes stand in configs/CONFIG.yaml
# FLAG ...   more flags of Megatron; they win over those here and in the file
#
# MEGATRON_LM  a checkout of Megatron-LM, of a supported version
# DATA         what --data-path takes: prefixes of .bin and .idx files, with weights if several;
#              or mock: made-up tokens, and no TOKENIZER
# TOKENIZER    a Hugging Face tokenizer, by name or folder
# NODES, GPUS  how many nodes, and GPUs of each (those of the table)
# MASTER       the host name of one of the nodes, if there are several; MASTER_PORT (29500)
#
# The optimizer's settings are a place to start, not those of the published models.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "pretrain.sh: $*" >&2
  exit 2
}

config=${1:-} dispatcher=${2:-moonep}
[[ $config && $config != -* ]] || { sed -n '2,16p' "$0" >&2; exit 2; }
[[ $dispatcher == moonep || $dispatcher == alltoall ]] \
  || fail "unknown dispatcher $dispatcher: moonep or alltoall"
shift $(($# < 2 ? $# : 2))

# Nodes, GPUs of a node, and what is recomputed so that a rank of 141 GB has room. Counted, not run:
# weights, gradients and optimizer states take 18 to 89 GB a rank.
experts="--recompute-granularity selective --recompute-modules moe"
layers="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
case $config in
  tiny)             nodes=1  gpus=4 memory="" ;;
  olmoe_1b_7b)      nodes=1  gpus=8 memory="" ;;
  gpt_oss_20b)      nodes=1  gpus=8 memory="" ;;
  deepseek_v2_lite) nodes=1  gpus=8 memory="" ;;
  qwen3_30b_a3b)    nodes=2  gpus=8 memory="" ;;
  mixtral_8x7b)     nodes=4  gpus=8 memory="" ;;
  mixtral_8x22b)    nodes=8  gpus=8 memory=$experts ;;
  qwen3_235b_a22b)  nodes=16 gpus=8 memory=$experts ;;
  deepseek_v3)      nodes=32 gpus=8 memory=$layers ;;
  kimi_k2)          nodes=64 gpus=8 memory=$layers ;;
  kimi_k3_like)     nodes=64 gpus=8 memory=$layers ;;
  *) fail "unknown config $config: see the table in $0" ;;
esac
read -ra memory <<<"$memory"

nodes=${NODES:-$nodes} gpus=${GPUS:-$gpus}
[[ ${MEGATRON_LM:-} ]] || fail "set MEGATRON_LM to a checkout of Megatron-LM"
[[ -f $MEGATRON_LM/pretrain_gpt.py ]] || fail "MEGATRON_LM=$MEGATRON_LM holds no pretrain_gpt.py"
[[ ${DATA:-} ]] || fail "set DATA to what --data-path takes, or to mock"
if [[ $DATA == mock ]]; then
  data=(--mock-data --tokenizer-type NullTokenizer)
else
  [[ ${TOKENIZER:-} ]] || fail "set TOKENIZER to a Hugging Face tokenizer, or DATA to mock"
  read -ra data <<<"--data-path $DATA"
  data+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
fi
if ((nodes == 1)); then
  meeting=(--standalone)
else
  [[ ${MASTER:-} ]] || fail "set MASTER to the host name of one of the $nodes nodes, or NODES to 1"
  meeting=(--rdzv-backend c10d --rdzv-id "$config")
  meeting+=(--rdzv-endpoint "$MASTER:${MASTER_PORT:-29500}")
fi

command=(
  torchrun --nnodes "$nodes" --nproc-per-node "$gpus" "${meeting[@]}"
  -m moonep_megatron.run --arguments "$root/configs/$config.yaml" "$MEGATRON_LM/pretrain_gpt.py"
  --moe-token-dispatcher-type "$dispatcher" # the one line that differs from alltoall
  "${data[@]}" "${memory[@]}"
  --global-batch-size 1024 --train-iters 10000
  --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 200
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --log-interval 1 --eval-interval 1000 --eval-iters 10
  "$@"
)
printf '%q ' "${command[@]}" && echo
exec "${command[@]}"
