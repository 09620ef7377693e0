#!/usr/bin/env bash
# Install, test, and smoke-run. With GPUs: the full recipe of every plugin on all of them. Without: torch_ddp with two
# processes on generated images. To be set from outside: DATA, NPROC, PLUGINS (as in "gemini torch_ddp"), TARGET_ACC,
# and RUNS, an absolute path without spaces, to keep the checkpoints and logs in.
set -euo pipefail
cd "$(dirname "$0")"

pip install -r requirements.txt
pytest

if [ -z "${RUNS:-}" ]; then
  RUNS=$(mktemp -d)
  trap 'rm -rf "$RUNS"' EXIT
fi
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -gt 0 ]; then
  nproc=${NPROC:-$gpus} plugins=${PLUGINS:-torch_ddp torch_ddp_fp16 low_level_zero gemini} epochs=80 dummy= target=0.84
else
  nproc=${NPROC:-2} plugins=${PLUGINS:-torch_ddp} epochs=2 dummy=--dummy target=0.9
fi
for plugin in $plugins; do
  colossalai run --nproc_per_node "$nproc" train.py --plugin "$plugin" --epochs "$epochs" --interval 20 \
    --checkpoint "$RUNS/$plugin" --log_dir "$RUNS/$plugin" --target_acc "${TARGET_ACC:-$target}" $dummy
  python eval.py --checkpoint "$RUNS/$plugin" --epoch all $dummy
done
