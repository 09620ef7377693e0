#!/usr/bin/env bash
# Install what is missing, test, train each plugin, and end in a table; fail if anything has. With GPUs: the full recipe
# of every plugin on all of them or, with DUMMY=1, a few epochs on generated images, for which nothing is downloaded.
# Without: the latter, of torch_ddp with two processes. To be set from outside: DUMMY, DATA, NPROC, PLUGINS (as in
# "gemini torch_ddp"), TARGET_ACC (0.82 for a JPEG copy of CIFAR-10: more than four standard deviations below the mean),
# and RUNS, an absolute path without spaces, to keep the checkpoints and logs in.
set -euo pipefail
cd "$(dirname "$0")"

runs=${RUNS:-$(mktemp -d)}
[ -n "${RUNS:-}" ] || trap 'rm -rf "$runs"' EXIT
if [[ $runs = *[[:space:]]* ]]; then
  echo "error: set RUNS to a path without spaces, at which colossalai run breaks" >&2
  exit 1
fi

pip show --quiet colossalai || pip install -r requirements.txt
pytest

trap 'exit 130' INT # and not on to the next plugin
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
plugins="torch_ddp torch_ddp_fp16 low_level_zero gemini" epochs=80 target=0.84 dummy=
if [ "$gpus" -eq 0 ]; then
  plugins=torch_ddp epochs=3 target=0.5 dummy=--dummy # single epochs fall to 56 %
elif [ "${DUMMY:-0}" != 0 ]; then
  epochs=10 target=0.5 dummy=--dummy # after 3 on 8 GPUs, 12 steps each, the running statistics are still off
fi

results=
for plugin in ${PLUGINS:-$plugins}; do
  run=$runs/$plugin result=failed
  rm -f "$run/metrics.jsonl" # of an earlier run
  if colossalai run --nproc_per_node "${NPROC:-$((gpus ? gpus : 2))}" train.py --plugin "$plugin" --epochs "$epochs" \
    --interval 20 --checkpoint "$run" --log_dir "$run" --target_acc "${TARGET_ACC:-$target}" $dummy &&
    python eval.py --checkpoint "$run" --epoch all $dummy; then
    result=passed
  fi
  results="$results $plugin=$result"
done

python - "$runs" $results <<'EOF'
import sys
from pathlib import Path
from statistics import median

from resnet_cifar10 import metrics

row = "{:<16}{:<8}{:>10}{:>12}{:>13}".format
print("\n" + row("plugin", "result", "accuracy", "s an epoch", "peak memory"))
for plugin, result in (words.rsplit("=", 1) for words in sys.argv[2:]):
    epochs = metrics.read(Path(sys.argv[1], plugin))
    accuracy, memory = (epochs[-1][name] if epochs else None for name in ("accuracy", "peak_memory_mib"))
    seconds = f"{median(epoch['seconds'] for epoch in epochs):.2f}" if epochs else "-"
    accuracy = "-" if accuracy is None else f"{100 * accuracy:.2f} %"
    print(row(plugin, result, accuracy, seconds, "-" if memory is None else f"{memory:,.0f} MiB"))
sys.exit(len(sys.argv) == 2 or any(words.endswith("=failed") for words in sys.argv[2:]))
EOF
