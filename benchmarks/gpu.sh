#!/usr/bin/env bash
# Everything that is owed for a GPU, by one command on a machine that has one; the most valuable steps come first.
#   benchmarks/gpu.sh              all steps
#   benchmarks/gpu.sh ops decode   the steps whose names begin so
#   benchmarks/gpu.sh wheels       downloads into .wheels what a machine with PyTorch but without network lacks
#   DRY=1 benchmarks/gpu.sh        prints names and commands, and runs nothing
#   SMOKE=1 benchmarks/gpu.sh      every command on the CPU at a tiny size, to see that it runs
# Figures, runs and the log are kept in RUNS (runs/gpu); at the end all but checkpoints is packed into OUT/gpu.tar.gz
# (benchmarks/results). A step that is done is not done again, and training that was stopped continues: BUDGET=570 ends the
# call after so many seconds, LIMIT=300 ends each command; start the script again until it says that nothing is left. On
# another machine, PACKED=FILE continues from what was packed. A step that fails is noted, and the next one runs; a step
# that has failed three times or was not finished in three calls is given up; training goes on. Without .venv, PYTHON (python3) runs with the
# packages of .wheels. Kernels of others are timed where they are installed: pip install 'stateline[gpu,fla,mamba]'. Text
# is read from DATA, by default Python's own library.
set -uo pipefail
out=${OUT:+$(realpath -m "$OUT")} packed=${PACKED:+$(realpath -m "$PACKED")}
cd "$(dirname "$0")/.."
if [ -n "${SMOKE:-}" ]; then
  DEVICE=cpu HALF=float32 DTYPES=float32 RUNS=${RUNS:-runs/gpu-smoke}
  SIZES=(--device cpu --rows 1 --d_model 32 --seconds 0 --force) LENGTHS="128" LONG="128" FEW="16 32"
  DECODE=(--device cpu --d_model 32 --vocab_size 64 --batches 1 2 --lengths 8 --force)
  TEXT="text(length=16, batch_size=2, held_out_bytes=200, path=pyproject.toml)"
  LAYERS=("h3 attention s4 s4d mamba mamba2") VARIANTS="mf"
  TRAIN=(--device cpu --train.steps 1) HYBRID=(--model.d_model 24) COMPARE=(--parameters 30k --steps 1 --timing none)
else
  DEVICE=cuda HALF=bfloat16 DTYPES="bfloat16 float32" RUNS=${RUNS:-runs/gpu}
  SIZES=(--device cuda --rows 8 --d_model 1024 --seconds 0.1 --force)
  LENGTHS="256 512 1024 2048 4096 8192 16384 32768" LONG="4096 16384" FEW="256 512 1024 2048 4096 8192 16384 32768"
  DECODE=(--device cuda --d_model 2048 --vocab_size 50304 --batches 1 64 --lengths 512 1024 1536 --backends auto --force)
  TEXT="text(length=1024, batch_size=32${DATA:+, path=$DATA})"
  LAYERS=("h3 attention" "s4 attention" s4d mamba mamba2) VARIANTS="mf sh mh"
  TRAIN=(--device cuda) HYBRID=(--model.d_model 768 --train.precision bfloat16 --train.compile true --train.steps 1000)
  COMPARE=(--parameters 30m --steps 2000 --precision bfloat16)
fi
RUNS=$(realpath -m "$RUNS") out=${out:-$PWD/benchmarks/results}
own=.venv/bin/python
[ -x "$own" ] || own=python3
PYTHON=${PYTHON:-$own}
export PYTHONPATH=$PWD/src:$RUNS/site${PYTHONPATH:+:$PYTHONPATH}
wanted=("$@")
failed=0 left=0 given_up=0

if [ "${1:-}" = wheels ]; then
  # What the package needs besides PyTorch, NumPy and numba, and its tests need besides pytest.
  exec "$PYTHON" -m pip download --no-deps --only-binary=:all: --python-version "${TARGET:-3.12}" -d .wheels \
    jsonargparse typeshed-client docstring-parser typing-extensions importlib-resources rich markdown-it-py mdurl pygments \
    msgspec altair narwhals jsonschema jsonschema-specifications referencing rpds-py attrs jaxtyping wadler-lindig jinja2 \
    markupsafe pyyaml safetensors beartype hypothesis sortedcontainers pytest-xdist execnet
fi
if [ -z "${DRY:-}" ]; then
  mkdir -p "$RUNS/done" "$RUNS/tries" || exit 2
  [ -z "$packed" ] || tar xzf "$packed" -C "$RUNS" || exit 2
  # Only the wheels that are missing here, each by itself: one that does not fit this machine costs itself alone.
  for wheel in .wheels/*.whl; do
    [ -e "$wheel" ] || continue
    name=$(basename "${wheel%%-*}")
    "$PYTHON" -c "import importlib.metadata as m, sys; m.version(sys.argv[1])" "$name" 2>/dev/null ||
      "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$RUNS/site" "$wheel"
  done
  if ! reason=$("$PYTHON" -c "import stateline.cli" 2>&1); then
    echo "gpu.sh needs what stateline imports, got from $PYTHON: ${reason##*$'\n'}; where there is a network, run: benchmarks/gpu.sh wheels, and bring .wheels" >&2
    exit 2
  fi
fi

pack() {
  mkdir -p "$out" && tar czf "$out/gpu.tar.gz.part" -C "$RUNS" --exclude site --exclude checkpoints . &&
    mv "$out/gpu.tar.gz.part" "$out/gpu.tar.gz"
}

seconds_left() {  # how long a command may run now
  local rest=$((${BUDGET:-1000000} - SECONDS - 10))
  echo $((rest < ${LIMIT:-1000000} ? rest : ${LIMIT:-1000000}))
}

step() {  # step NAME COMMAND...
  local name=$1 prefix chosen="" status tries seconds
  shift
  for prefix in "${wanted[@]-}"; do [[ $name == "$prefix"* ]] && chosen=1; done
  [ -n "$chosen" ] || return 0
  if [ -n "${DRY:-}" ]; then printf '%s: ' "$name"; printf '%q ' "$@"; echo; return; fi
  [ -e "$RUNS/done/$name" ] && return
  tries=$(cat "$RUNS/tries/$name" 2>/dev/null || echo 0)
  if [ "$tries" -ge 3 ]; then
    given_up=$((given_up + 1))
    echo "given up after three calls: $name" | tee -a "$RUNS/log.txt"
    return
  fi
  seconds=$(seconds_left)
  if [ "$seconds" -lt 5 ]; then left=$((left + 1)); return; fi
  echo "+ $name: $*" | tee -a "$RUNS/log.txt"
  [ "$1" != stateline ] || set -- -m "$@"
  timeout --signal INT --kill-after 10 "$seconds" "$PYTHON" "$@" 2>&1 | tee -a "$RUNS/log.txt"
  status=${PIPESTATUS[0]}
  case $status in
    0) touch "$RUNS/done/$name" ;;
    124 | 130 | 137)
      left=$((left + 1)); echo "not finished: $name" | tee -a "$RUNS/log.txt"
      [[ $name == train-* ]] && tries=-1 ;;
    *) failed=$((failed + 1)); echo "failed ($status): $name" | tee -a "$RUNS/log.txt" ;;
  esac
  echo $((tries + 1)) >"$RUNS/tries/$name"
  pack
}

bench() { step "$1" stateline bench "${@:2}" --out "$RUNS/results/$1"; }

ops() {  # ops DTYPE: a step for each op, those with kernels of Triton first
  local op
  for op in $OPS; do
    bench "ops-$1-$op" ops --only "$op" --dtype "$1" --lengths $LENGTHS "${SIZES[@]}"
  done
}

# Which kernels can run here.
[ -n "${SMOKE:-}" ] || step check stateline check --backends --device cuda

# Convolutions against cuFFT (backend torch); the core of H3 against the memory floor and FlashAttention; selective scans
# against mamba-ssm. Each figure has its error against float64.
OPS=${OPS:-${SMOKE:+attention diagonal_ssm}}
OPS=${OPS:-$("$PYTHON" -c "from stateline.ops import OPS; print(*sorted(OPS, key=lambda o: 'triton' not in OPS[o].backends))")}
[ -n "$OPS" ] || { echo "gpu.sh: the ops could not be listed" >&2; exit 2; }
ops "${DTYPES%% *}"
for layers in "${LAYERS[@]}"; do
  bench "layers-${layers%% *}" layers --patterns $layers --dtype $HALF --lengths $FEW "${SIZES[@]}"
done

# Decoding at 1.3 billion parameters, with CUDA graphs on both sides; states in float32 and in bfloat16.
for states in float32 bfloat16; do
  bench "decode-$states" decode --dtype $HALF --state_dtype $states "${DECODE[@]}" --patterns \
    "transformer=attention(position=rope, n_heads=16)*24" \
    "hybrid=h3*8 attention(n_heads=16) h3*7 attention(n_heads=16) h3*7"
done

# Block-State against Block-Recurrent, window 128; Staircase and its relatives against Transformer-XL's layer.
for variant in $VARIANTS; do
  bench "block-state-$variant" layers --dtype $HALF --lengths $LONG "${SIZES[@]}" \
    --patterns "block_state(window=128, variant=$variant)" "block_recurrent(window=128)"
done
bench staircase layers --dtype $HALF --lengths ${LONG%% *} "${SIZES[@]}" --patterns "sliding_attention(window=256)" \
  "staircase(sliding_attention(window=256), passes=4, chunk_len=64)" "ladder(sliding_attention(window=256), passes=4)"

# Every kernel and everything that computes is right on this device, a step for each folder. Kernels compile on all cores.
if [ -z "${SMOKE:-}" ]; then
  PYTEST=(-m pytest -q -n "$(($(nproc) < 12 ? $(nproc) : 12))" --dist worksteal --device cuda)
  for tests in ops/test_triton.py test_gpu.py generate/test_graphs.py train/test_usage.py; do
    name=$(basename "$tests" .py)
    step "tests-gpu-${name#test_}" "${PYTEST[@]}" -m gpu "tests/$tests"
  done
  for tests in ops layers generate models train parity bench compare hf hf_check probe runs; do
    step "tests-$tests" "${PYTEST[@]}" -m "not slow and not cpu and not gpu" "tests/$tests"
  done
fi

# Training: updates of small models, a hybrid of 125 million parameters, six architectures of 30 million.
bench updates train --device $DEVICE --force ${SMOKE:+--d_model 16 --seconds 0 --tasks associative_recall}
step train-hybrid-125m stateline train "h3*8 attention(n_heads=12) h3*8" --task "$TEXT" "${TRAIN[@]}" "${HYBRID[@]}" \
  --train.log_every 50 --out "$RUNS/hybrid-125m"
step train-six-30m stateline compare "attention(position=rope)*6" "h3*6" "h3 attention h3*4" "s4d*6" "mamba*6" \
  "gated_delta_net*6" --protocol quick --tasks "$TEXT" --device $DEVICE "${COMPARE[@]}" --out "$RUNS/six-30m"

for dtype in $DTYPES; do [ "$dtype" = "${DTYPES%% *}" ] || ops "$dtype"; done

[ -z "${DRY:-}" ] || exit 0
pack
echo "$failed steps failed, $left are not finished, $given_up were given up; the log is $RUNS/log.txt, all is packed in $out/gpu.tar.gz"
[ "$failed" = 0 ]
