#!/usr/bin/env bash
# Everything that is owed for a GPU, by one command on a machine that has one:
#   benchmarks/gpu.sh [OUT]        figures to OUT-*/, by default benchmarks/results/DATE-gpu; runs and log to runs/gpu
#   DRY=1 benchmarks/gpu.sh        prints the commands and runs nothing
# A command that fails is noted in the log, and the next one runs. Compared kernels of others are timed where they are
# installed: pip install 'stateline[gpu,fla,mamba]'. Text is read from DATA, by default Python's own library.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-benchmarks/results/$(date +%F)-gpu}
RUNS=runs/gpu
BIN=${BIN:-.venv/bin}
TEXT="text(length=1024, batch_size=32${DATA:+, path=$DATA})"
PAPER="--rows 8 --d_model 1024 --lengths 256 1024 2048 8192 32768"
failed=0

run() {
  if [ -n "${DRY:-}" ]; then printf '%q ' "$@"; echo; return; fi
  echo "+ $*" | tee -a "$RUNS/log.txt"
  PATH="$BIN:$PATH" "$@" 2>&1 | tee -a "$RUNS/log.txt" || { failed=$((failed + 1)); echo "failed: $*" >> "$RUNS/log.txt"; }
}

[ -n "${DRY:-}" ] || mkdir -p "$RUNS"

# The kernels are right on this device.
run python -m pytest -q -n 0 --device cuda -m "" tests/ops tests/test_gpu.py tests/generate/test_graphs.py

# Convolutions against cuFFT, attention by FlashAttention, selective scans against mamba-ssm, the core of H3 against the memory floor.
for dtype in bfloat16 float32; do
  run stateline bench ops --device cuda --dtype $dtype $PAPER --out "$OUT-ops-$dtype"
done
run stateline bench layers --device cuda --dtype bfloat16 --rows 8 --d_model 1024 --lengths 1024 2048 8192 \
  --patterns h3 s4d mamba mamba2 attention --out "$OUT-layers"
# Block-State against Block-Recurrent, window 128.
run stateline bench layers --device cuda --dtype bfloat16 --rows 8 --d_model 1024 --lengths 4096 16384 \
  --patterns "block_state(window=128, variant=mf)" "block_state(window=128, variant=sh)" "block_recurrent(window=128)" \
  --out "$OUT-block-state"
# Decoding at 1.3 billion parameters, graphs on both sides.
run stateline bench decode --device cuda --dtype bfloat16 --d_model 2048 --vocab_size 50304 --batches 1 64 --lengths 512 1536 \
  --patterns "transformer=attention(position=rope, n_heads=16)*24" "hybrid=h3*8 attention(n_heads=16) h3*7 attention(n_heads=16) h3*7" \
  --out "$OUT-decode"
run stateline bench train --device cuda --d_model 512 --out "$OUT-train"

# Training: a hybrid of 125M parameters; six architectures of 30M within half an hour.
run stateline train h3-125m --task "$TEXT" --device cuda --train.precision bfloat16 --train.compile true \
  --train.steps 1000 --train.log_every 50 --out "$RUNS/h3-125m"
run stateline compare "attention(position=rope)*6" "h3*6" "h3 attention h3*4" "s4d*6" "mamba*6" "gated_delta_net*6" \
  --tasks "$TEXT" --parameters 30000000 --steps 2000 --precision bfloat16 --device cuda --out "$RUNS/six-30m"

# What was run small on a laptop, at the size of the papers.
for recipe in recipes/staircase/paper/{random_walk,algorithm}_*.yaml recipes/repeat_after_me/paper/copying_*.yaml; do
  run stateline train "$recipe" --device cuda --out "$RUNS/$(basename "$recipe" .yaml)"
done
if [ -d data/books ] || [ -n "${DRY:-}" ]; then
  for recipe in recipes/block_state/window_*.yaml recipes/books/*.yaml; do
    run stateline train "$recipe" --device cuda --out "$RUNS/$(basename "$recipe" .yaml)"
  done
fi
[ -n "${DRY:-}" ] || echo "$failed commands failed; the log is $RUNS/log.txt"
