"""Code that train.py and eval.py share. Import it before PyTorch and ColossalAI: it silences harmless warnings."""

import logging
import os
import warnings

# PyTorch's compiler is not used. It would start a process per core, and each would print a traceback at Ctrl-C.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

for category, message in (
    # Optional packages that are not used
    (UserWarning, "Please install the latest tensornvme"),
    (UserWarning, "Please install apex from source"),
    # Outdated code in ColossalAI 0.5.0
    (SyntaxWarning, "invalid escape sequence"),
    (UserWarning, "TypedStorage is deprecated"),
    (FutureWarning, r"`torch\.cuda\.amp\.GradScaler"),
    (UserWarning, r"barrier\(\): using the device under current context"),
    # Shown once, before a CUDA graph is captured
    (UserWarning, "The AccumulateGrad node's stream does not match"),
    (UserWarning, "Attempting to run cuBLAS, but there was no current CUDA context"),
):
    warnings.filterwarnings("ignore", message=message, category=category)

# ColossalAI imports bitsandbytes, which warns that a 4-bit kernel is missing
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in record.getMessage()
)
