"""Every reason why no GPU serves, in a sentence."""

import logging
import warnings

import pytest
import torch

from gptoss_engine import devices
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.devices import choose_device
from gptoss_engine.runner import load_operators
from gptoss_kernels.cuda import operators
from gptoss_kernels.cuda.compiler import CudaError

from .sources import model_config


class Machine:
    """What PyTorch and the driver say here; an H200 that is in order unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.has(available=True, built_for="13.0", driver=(13, 0))
        self.has_capability((9, 0), "NVIDIA H200")
        monkeypatch.setattr(devices, "has_gpu", lambda: True)

    def has(self, available: bool, built_for: str | None, driver: tuple[int, int] | None) -> None:
        self._patch.setattr(torch.cuda, "is_available", lambda: available)
        self._patch.setattr(torch.version, "cuda", built_for)
        self._patch.setattr(torch, "__version__", "2.11.0")
        self._patch.setattr(devices, "_driver_version", lambda: driver)

    def has_capability(self, capability: tuple[int, int], name: str) -> None:
        self._patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        self._patch.setattr(torch.cuda, "get_device_name", lambda: name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_hopper_gpu_is_taken(machine: Machine):
    for device in ("auto", "cuda"):
        assert choose_device(EngineConfig.from_mapping({"device": device})).type == "cuda"
    assert choose_device(EngineConfig(device="cpu")).type == "cpu"


NO_GPU = [
    ((False, None, None), "no CUDA device was found: this PyTorch (2.11.0) knows no CUDA"),
    ((False, "13.0", None), "no CUDA device was found: no NVIDIA driver is installed"),
    (
        (False, "13.0", (12, 4)),
        "the NVIDIA driver supports CUDA 12.4, and this PyTorch (2.11.0) needs CUDA 13: update the "
        "driver",
    ),
    ((False, "12.8", (12, 4)), "no CUDA device was found"),
]


@pytest.mark.parametrize(("state", "fault"), NO_GPU, ids=["torch", "none", "old", "hidden"])
def test_why_there_is_no_gpu(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    state: tuple[bool, str | None, tuple[int, int] | None],
    fault: str,
):
    machine.has(*state)
    with pytest.raises(InvalidConfig) as refused:
        choose_device(EngineConfig(device="cuda"))
    assert str(refused.value) == f"device must be auto or cpu here, got cuda: {fault}"
    with caplog.at_level(logging.WARNING):
        assert choose_device(EngineConfig()).type == "cpu"
    assert caplog.messages == [f"device auto is the CPU: {fault}"]


def test_a_machine_without_a_gpu_is_not_warned_about(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    machine.has(available=False, built_for=None, driver=None)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert choose_device(EngineConfig()).type == "cpu"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("keys", "is_taken"),
    [
        ({}, False),
        ({"gemm": "triton"}, False),
        ({"attention": "reference"}, False),
        ({"gemm": "triton", "attention": "triton"}, True),
        ({"gemm": "reference", "attention": "reference"}, True),
    ],
)
def test_another_gpu_is_taken_if_its_kernels_are_chosen(
    machine: Machine, keys: dict[str, str], is_taken: bool
):
    machine.has_capability((8, 0), "NVIDIA A100")
    found = choose_device(EngineConfig.from_mapping(keys))
    assert found.type == ("cuda" if is_taken else "cpu")
    config = EngineConfig.from_mapping({**keys, "device": "cuda"})
    if is_taken:
        assert choose_device(config).type == "cuda"
        return
    with pytest.raises(InvalidConfig) as refused:
        choose_device(config)
    assert str(refused.value) == (
        "device must be auto or cpu here, got cuda: NVIDIA A100 has compute capability 8.0, and "
        "our kernels need 9.0 (H100, H200); with gemm and attention triton or reference it can "
        "serve, at less speed"
    )


def test_a_gpu_that_cannot_be_started_is_a_sentence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    def refuse() -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    with pytest.raises(InvalidConfig, match=r"cannot be started: CUDA error: .* encountered$"):
        choose_device(EngineConfig(device="cuda"))


def test_pytorchs_own_warning_is_not_repeated(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    def warn() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert choose_device(EngineConfig()).type == "cpu"


def test_the_driver_of_this_machine():
    found = devices._driver_version()
    assert found is None or found > (9, 0)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("nvrtc_version", "Hopper kernels are compiled by NVRTC 13, which cannot be loaded"),
        ("require_hopper", "the NVIDIA driver supports CUDA 12.8, Hopper kernels need 13.0"),
    ],
)
@pytest.mark.parametrize("key", ["gemm", "attention"])
def test_what_our_kernels_lack_is_said_before_weights_are_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, key: str, what: str, fault: str
):
    def missing(*_: object) -> None:
        raise CudaError(fault)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(operators, "require_hopper", lambda device: None)
    monkeypatch.setattr(operators, what, missing)
    config = EngineConfig.from_mapping({"gemm": "reference", "attention": "reference", key: "cuda"})
    with pytest.raises(InvalidConfig, match=fault):
        load_operators(config, torch.device("cuda"), torch.bfloat16, model_config())
