#!/usr/bin/env bash
# Everything that is owed for a GPU, by one command on a machine that has one:
#   benchmarks/gpu.sh              all steps
#   benchmarks/gpu.sh ops decode   the steps whose names begin so
#   DRY=1 benchmarks/gpu.sh        prints names and commands, and runs nothing
#   SMOKE=1 benchmarks/gpu.sh      every command on the CPU at a tiny size, to see that it runs
# Figures go to $OUT-*/ (benchmarks/results/DATE-gpu), runs and log to $RUNS (runs/gpu). A step that is done is not done
# again; training that was stopped continues. LIMIT=570 stops every command after so many seconds: start the script again
# until it says that nothing is left. A command that fails is noted, and the next one runs. Kernels of others are timed
# where they are installed: pip install 'stateline[gpu,fla,mamba]'. Text is read from DATA, by default Python's own library.
set -uo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
if [ -n "${SMOKE:-}" ]; then
  DEVICE=cpu HALF=float32 DTYPES=float32 OUT=${OUT:-runs/gpu-smoke/results} RUNS=${RUNS:-runs/gpu-smoke}
  SIZES=(--device cpu --rows 1 --d_model 32 --seconds 0 --force) LENGTHS="128" LONG="128" FEW="16 32"
  DECODE=(--device cpu --d_model 32 --vocab_size 64 --batches 1 2 --lengths 8 --force)
  TEXT="text(length=16, batch_size=2, held_out_bytes=200, path=pyproject.toml)"
  LAYERS=("h3 attention s4d mamba mamba2") VARIANTS="mf"
  TRAIN=(--device cpu --train.steps 1) HYBRID=(--model.d_model 24) COMPARE=(--parameters 30k --steps 1 --timing none)
else
  DEVICE=cuda HALF=bfloat16 DTYPES="bfloat16 float32" OUT=${OUT:-benchmarks/results/$(date +%F)-gpu} RUNS=${RUNS:-runs/gpu}
  SIZES=(--device cuda --rows 8 --d_model 1024 --seconds 0.1 --force) LENGTHS="1024 2048 8192 32768" LONG="4096 16384" FEW="1024 2048 8192"
  DECODE=(--device cuda --d_model 2048 --vocab_size 50304 --batches 1 64 --lengths 512 1536 --backends auto --force)
  TEXT="text(length=1024, batch_size=32${DATA:+, path=$DATA})"
  LAYERS=("h3 attention" s4d mamba mamba2) VARIANTS="mf sh"
  TRAIN=(--device cuda) HYBRID=(--model.d_model 768 --train.precision bfloat16 --train.compile true --train.steps 1000)
  COMPARE=(--parameters 30m --steps 2000 --precision bfloat16)
fi
wanted=("$@")
failed=0 left=0

step() {  # step NAME COMMAND...
  local name=$1 prefix chosen="" status
  shift
  for prefix in "${wanted[@]-}"; do [[ $name == "$prefix"* ]] && chosen=1; done
  [ -n "$chosen" ] || return 0
  if [ -n "${DRY:-}" ]; then printf '%s: ' "$name"; printf '%q ' "$@"; echo; return; fi
  [ -e "$RUNS/done/$name" ] && return
  mkdir -p "$RUNS/done"
  echo "+ $name: $*" | tee -a "$RUNS/log.txt"
  PATH="$BIN:$PATH" timeout --signal INT --kill-after 30 "${LIMIT:-0}" "$@" 2>&1 | tee -a "$RUNS/log.txt"
  status=${PIPESTATUS[0]}
  case $status in
    0) touch "$RUNS/done/$name" ;;
    124 | 130 | 137) left=$((left + 1)); echo "not finished: $name" | tee -a "$RUNS/log.txt" ;;
    *) failed=$((failed + 1)); echo "failed ($status): $name" | tee -a "$RUNS/log.txt" ;;
  esac
}

bench() { step "$1" stateline bench "${@:2}" --out "$OUT-$1"; }

# The kernels are right on this device, and so is everything that computes on it. Kernels compile on all cores.
if [ -z "${SMOKE:-}" ]; then
  PYTEST=(python -m pytest -q -n "$(($(nproc) < 12 ? $(nproc) : 12))" --dist worksteal --device cuda)
  step tests-kernels "${PYTEST[@]}" -m gpu tests/ops/test_triton.py tests/test_gpu.py tests/{generate/test_graphs,train/test_usage}.py
  step tests-parts "${PYTEST[@]}" -m "not slow and not cpu and not gpu" tests/{ops,layers,generate,models,train,parity} \
    tests/{bench,compare,hf,hf_check,probe,runs} tests/test_{capacity,compare,evaluate}.py
  step check stateline check --backends --device cuda
fi

# Convolutions against cuFFT (backend torch); the core of H3 against the memory floor and FlashAttention; selective scans
# against mamba-ssm.
OPS=${OPS:-${SMOKE:+attention diagonal_ssm}}
OPS=${OPS:-$("$BIN/python" -c "from stateline.ops import OPS; print(*sorted(OPS, key=lambda o: 'triton' not in OPS[o].backends))")}
for dtype in $DTYPES; do
  for op in $OPS; do
    bench "ops-$dtype-$op" ops --only "$op" --dtype "$dtype" --lengths $LENGTHS "${SIZES[@]}"
  done
done
for layers in "${LAYERS[@]}"; do
  bench "layers-${layers%% *}" layers --patterns $layers --dtype $HALF --lengths $FEW "${SIZES[@]}"
done

# Block-State against Block-Recurrent, window 128.
for variant in $VARIANTS; do
  bench "block-state-$variant" layers --dtype $HALF --lengths $LONG "${SIZES[@]}" \
    --patterns "block_state(window=128, variant=$variant)" "block_recurrent(window=128)"
done

# Decoding at 1.3 billion parameters, with CUDA graphs on both sides; states in float32 and in bfloat16.
for states in float32 bfloat16; do
  bench "decode-$states" decode --dtype $HALF --state_dtype $states "${DECODE[@]}" --patterns \
    "transformer=attention(position=rope, n_heads=16)*24" \
    "hybrid=h3*8 attention(n_heads=16) h3*7 attention(n_heads=16) h3*7"
done

# Training: updates of small models, a hybrid of 125 million parameters, six architectures of 30 million.
bench train train --device $DEVICE --force ${SMOKE:+--d_model 16 --seconds 0 --tasks associative_recall}
step hybrid-125m stateline train "h3*8 attention(n_heads=12) h3*8" --task "$TEXT" "${TRAIN[@]}" "${HYBRID[@]}" \
  --train.log_every 50 --out "$RUNS/hybrid-125m"
step six-30m stateline compare "attention(position=rope)*6" "h3*6" "h3 attention h3*4" "s4d*6" "mamba*6" \
  "gated_delta_net*6" --protocol quick --tasks "$TEXT" --device $DEVICE "${COMPARE[@]}" --out "$RUNS/six-30m"

# What was run small on a laptop, at the size of the papers: Random Walk, Algorithm, copying, Block-State on books.
if [ -z "${SMOKE:-}" ]; then
  for recipe in recipes/staircase/paper/{random_walk,algorithm}_*.yaml recipes/repeat_after_me/paper/copying_*.yaml \
    recipes/block_state/window_*.yaml recipes/books/*.yaml; do
    case $recipe in recipes/block_state/* | recipes/books/*) [ -d data/books ] || [ -n "${DRY:-}" ] || continue ;; esac
    name=$(basename "$recipe" .yaml)
    step "recipe-$name" stateline train "$recipe" "${TRAIN[@]}" --out "$RUNS/$name"
  done
fi

[ -n "${DRY:-}" ] || echo "$failed steps failed, $left are not finished; the log is $RUNS/log.txt"
[ "$failed" = 0 ]
