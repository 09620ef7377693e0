"""What train.py and eval.py share: data, evaluation, checkpoints, and what ColossalAI lacks on a CPU.

Import it before PyTorch, whose compiler, unused here, would else start a process per core, each with its own traceback
at Ctrl-C.
"""

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
