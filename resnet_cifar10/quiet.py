"""Keeps from the terminal what ColossalAI 0.5.0 and what it imports say in every run and nobody needs to act on."""

import logging
import warnings

HARMLESS = (
    # Packages that speed up what is not used here
    (UserWarning, "Please install the latest tensornvme"),
    (UserWarning, "Please install apex from source"),
    # What ColossalAI's source does the old way
    (SyntaxWarning, "invalid escape sequence"),
    (UserWarning, "TypedStorage is deprecated"),
    (FutureWarning, r"`torch\.cuda\.amp\.GradScaler"),
    (UserWarning, r"barrier\(\): using the device under current context"),
    # Seen once, on the way to graphs: boosting happens on a stream of its own, training on the default one
    (UserWarning, "The AccumulateGrad node's stream does not match"),
    (UserWarning, "Attempting to run cuBLAS, but there was no current CUDA context"),
)


def silence_the_harmless() -> None:
    """Call before anything else imports ColossalAI. Other warnings, and all errors, are shown as ever."""
    for category, message in HARMLESS:
        warnings.filterwarnings("ignore", message=message, category=category)
    # bitsandbytes, which ColossalAI imports, misses a kernel for 4-bit numbers
    kernels = logging.getLogger("bitsandbytes.backends.cpu.ops")
    kernels.addFilter(lambda record: "gemm_4bit_forward" not in record.getMessage())

    from colossalai.kernel.extensions import cpp_extension, cuda_extension

    # Loading a kernel prints two lines in each process; startup.check_kernels says once what is to be compiled
    for module in (cpp_extension, cuda_extension):
        module.print = lambda line: None if line.startswith("[extension]") else print(line)
