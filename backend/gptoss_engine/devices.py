"""On what device the engine runs, and in a sentence why not on a GPU."""

import ctypes
import logging
import warnings

import torch

from gptoss_engine.config import EngineConfig, InvalidConfig, has_gpu

log = logging.getLogger(__name__)

HOPPER = (9, 0)


def choose_device(config: EngineConfig) -> torch.device:
    """auto: a GPU where there is one that can serve, else the CPU, with a warning why.

    On a GPU that is not Hopper gemm and attention must be chosen: nothing slower is taken unasked.
    Raises InvalidConfig where a GPU is asked for and none can serve.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    fault = _fault() or _kernel_fault(config)
    if not fault:
        return torch.device("cuda")
    if config.device == "cuda":
        raise InvalidConfig(f"device must be auto or cpu here, got cuda: {fault}")
    if has_gpu():
        log.warning("device auto is the CPU: %s", fault)
    return torch.device("cpu")


def _fault() -> str:
    """Why PyTorch has no GPU here; empty if it has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own words for what is said here
        if torch.cuda.is_available():
            return ""
    if torch.version.cuda is None:
        return f"no CUDA device was found: this PyTorch ({torch.__version__}) knows no CUDA"
    driver = _driver_version()
    if driver is None:
        return "no CUDA device was found: no NVIDIA driver is installed"
    built_for = tuple(map(int, torch.version.cuda.split(".")[:2]))
    if driver[0] < built_for[0]:  # within a major version older drivers serve
        return (
            f"the NVIDIA driver supports CUDA {driver[0]}.{driver[1]}, and this PyTorch "
            f"({torch.__version__}) needs CUDA {built_for[0]}: update the driver"
        )
    return "no CUDA device was found"


def _kernel_fault(config: EngineConfig) -> str:
    if "auto" not in (config.gemm, config.attention):
        return ""
    try:
        capability = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
    except RuntimeError as error:
        return f"CUDA cannot be started: {str(error).splitlines()[0]}"
    if capability == HOPPER:
        return ""
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, and our kernels need "
        f"{HOPPER[0]}.{HOPPER[1]} (H100, H200); with gemm and attention triton or reference it can "
        "serve, at less speed"
    )


def _driver_version() -> tuple[int, int] | None:
    """The CUDA that the driver supports; None where no driver is installed."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
