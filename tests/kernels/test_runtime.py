"""The driver's side without a GPU: refusals in words; what is launched, told by a fake driver.

The fake is called as the real one is, by the C conventions, and reads what lies at the addresses.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.compiler import Cubin, CudaError
from gptoss_kernels.cuda.quantise import quantise

CUBIN = Cubin(b"image", 0, 0, 0, 0, warnings=())


def function(call: Callable[..., int], *kinds: type) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)


class Driver:
    """libcuda.so.1 as far as it is used; `launched` has (stream, grid, threads, first argument)."""

    def __init__(
        self,
        version: int = 13000,
        launch_status: int = 0,
        encode_status: int = 0,
        context: int = 5,
    ) -> None:
        self.launched: list[tuple[int, int, int, int]] = []
        self.encoded: list[tuple[int, ...]] = []
        self.context = context  # of the thread
        self.launch_status = launch_status
        self.encode_status = encode_status
        pointer, number = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
        text = ctypes.POINTER(ctypes.c_char_p)

        def write(target: Any, value: Any) -> int:
            target[0] = value
            return 0

        self.cuDriverGetVersion = function(lambda target: write(target, version), number)
        words = b"an illegal memory access was encountered"
        self.cuGetErrorString = function(
            lambda status, target: write(target, words), ctypes.c_int, text
        )
        self.cuLaunchKernelEx = function(self.launch, pointer, pointer, pointer, pointer)
        self.cuCtxSetCurrent = function(self.enter, pointer)
        number = ctypes.c_int
        self.cuTensorMapEncodeTiled = function(
            self.encode, *(pointer, number, ctypes.c_uint32), *[pointer] * 5, *[number] * 4
        )

    def encode(self, target: int, kind: int, rank: int, address: int, *others: int) -> int:
        sizes, pitches, box, steps, interleave, swizzle, promotion, fill = others
        assert target % 64 == 0
        assert (interleave, promotion, fill) == (0, 3, 0)
        ctypes.memset(target, len(self.encoded) + 1, 128)
        self.encoded.append(
            (
                *(kind, address, swizzle),
                *(ctypes.c_uint64 * rank).from_address(sizes),
                *(ctypes.c_uint64 * (rank - 1)).from_address(pitches),
                *(ctypes.c_uint32 * rank).from_address(box),
                *(ctypes.c_uint32 * rank).from_address(steps),
            )
        )
        return self.encode_status

    def enter(self, context: int) -> int:
        self.context = context
        return 0

    def launch(self, config: int, kernel: int, arguments: int, extra: int | None) -> int:
        if self.context != 5:
            return 201
        found = runtime._LaunchConfig.from_address(config)
        first = ctypes.c_void_p.from_address(arguments).value
        assert first is not None
        value = ctypes.c_int.from_address(first).value
        self.launched.append((found.stream or 0, found.grid[0], found.block[0], value))
        return self.launch_status


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Driver], Driver]]:
    """Put a driver where the real one would be loaded."""
    for cached in (runtime._driver, runtime.require_hopper):
        cached.cache_clear()

    def put(driver: Driver) -> Driver:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        return driver

    yield put
    for cached in (runtime._driver, runtime.require_hopper):
        cached.cache_clear()


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return pretend


# ---- refusals ----------------------------------------------------------------------------------


def test_no_driver_is_said_so(install, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaError, match=r"no driver is installed here: libcuda\.so\.1: cannot"):
        runtime.require_hopper(0)


@pytest.mark.parametrize(("version", "words"), [(12080, r"12\.8"), (12090, r"12\.9")])
def test_an_old_driver_is_said_so(install, version: int, words: str) -> None:
    install(Driver(version))
    with pytest.raises(CudaError, match=rf"supports CUDA {words}, Hopper kernels need 13\.0: upd"):
        runtime.require_hopper(0)


@pytest.mark.parametrize("version", [13000, 13010])
def test_the_minimum_driver_will_do(install, pretend_gpu, version: int) -> None:
    pretend_gpu()
    install(Driver(version))
    runtime.require_hopper(0)


@pytest.mark.parametrize(
    ("built_for", "words"), [("13.0", "PyTorch finds none"), (None, "built without CUDA")]
)
def test_no_gpu_is_said_so(
    install, monkeypatch: pytest.MonkeyPatch, built_for: str | None, words: str
) -> None:
    install(Driver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(CudaError, match=f"need an NVIDIA GPU, and .*{words}"):
        runtime.require_hopper(0)


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "NVIDIA A100"), ((10, 0), "NVIDIA B200")]
)
def test_another_architecture_is_said_so(
    install, pretend_gpu, capability: tuple[int, int], name: str
) -> None:
    install(Driver())
    pretend_gpu(capability, name)
    found = f"{name} has {capability[0]}.{capability[1]}"
    with pytest.raises(CudaError, match=rf"need compute capability 9\.0 .*{found}"):
        runtime.require_hopper(0)


def test_loading_under_capture_is_refused_in_words(
    install, pretend_gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Driver())
    pretend_gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CudaError, match=r"fill cannot be loaded .* before the capture"):
        runtime.Kernel(CUBIN, "fill", shared_bytes=0, device=0)


def test_a_capture_is_told_by_the_driver(install, monkeypatch: pytest.MonkeyPatch) -> None:
    class Capturing(Driver):
        def cuStreamGetCaptureInfo_v2(self, stream, status, identity, *others):  # noqa: N802
            assert (stream.value, others) == (77, (None, None, None))
            status._obj.value, identity._obj.value = 1, 2**40 + 5
            return 0

    install(Capturing())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert runtime.capture_id(0) == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert runtime.capture_id(0) == 2**40 + 5


# ---- tensor maps -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_known_maps() -> None:
    runtime._encode.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "kind", "size"),
    [(torch.float8_e4m3fn, 0, 1), (torch.float32, 7, 4), (torch.bfloat16, 9, 2)],
)
def test_a_matrix_is_described_by_its_columns_first(
    install, dtype: torch.dtype, kind: int, size: int
) -> None:
    driver = install(Driver())
    matrix = torch.zeros(6, 32, dtype=dtype)[:, :16]
    described = runtime.tensor_map(matrix, (4, 8), 128)
    assert driver.encoded == [(kind, matrix.data_ptr(), 3, 16, 6, 32 * size, 8, 4, 1, 1)]
    assert bytes(described) == b"\x01" * 128


def test_three_dimensions_are_described_from_the_innermost_one(install) -> None:
    driver = install(Driver())
    tensor = torch.zeros(5, 6, 16, dtype=torch.bfloat16)
    runtime.tensor_map(tensor, (3, 2, 8), 128)
    sizes, pitches, box, steps = (16, 6, 5), (32, 192), (8, 2, 3), (1, 1, 1)
    assert driver.encoded == [(9, tensor.data_ptr(), 3, *sizes, *pitches, *box, *steps)]


def test_a_matrix_is_described_once(install) -> None:
    driver = install(Driver())
    matrix = torch.zeros(6, 32)
    first = runtime.tensor_map(matrix, (4, 8), 0)
    assert runtime.tensor_map(matrix.view(6, 32), (4, 8), 0) is first
    others = (
        *((matrix[:5], (4, 8), 0), (matrix[:, :31], (4, 8), 0), (matrix[1:], (4, 8), 0)),
        *((matrix[::2], (4, 8), 0), (matrix, (3, 8), 0), (matrix, (4, 4), 0)),
        (matrix, (4, 8), 32),
    )
    for arguments in others:
        assert bytes(runtime.tensor_map(*arguments)) != bytes(first)
    assert len(driver.encoded) == 1 + len(others)


def test_a_matrix_that_the_driver_refuses_is_named(install) -> None:
    install(Driver(encode_status=1))
    with pytest.raises(CudaError, match="could not describe a tensor of 6 x 32 in boxes of 4 x 8"):
        runtime.tensor_map(torch.zeros(6, 32), (4, 8), 0)


# ---- launches ----------------------------------------------------------------------------------


class Value(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int),)


class Operator:
    """Launches a kernel that is told the rows of x, as operators do; counts its preparations."""

    def __init__(self, driver: Driver) -> None:
        self.kernel: Any = SimpleNamespace(
            _library=driver,
            function=ctypes.c_void_p(1),
            context=ctypes.c_void_p(5),
            shared_bytes=0,
        )
        self.prepared = 0

    def __call__(self, *tensors: Tensor, options: object = None) -> None:
        def prepare() -> runtime.Launch:
            self.prepared += 1
            rows = Value(tensors[0].shape[0])
            return runtime.Launch(self.kernel, grid=7, threads=128, arguments=(rows,))

        runtime.launch(options, tensors, prepare)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current device, that of tensors without a GPU at first, and stream."""
    now = SimpleNamespace(device=-1, stream=0, entered=[])

    @contextmanager
    def entering(device: int) -> Iterator[None]:
        before, now.device = now.device, device
        now.entered.append(device)
        yield
        now.device = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now.device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: now.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(runtime, "_launches", {})
    return now


def test_the_same_buffers_are_prepared_once(current: SimpleNamespace) -> None:
    driver = Driver()
    operator = Operator(driver)
    x, out = torch.zeros(5, 64), torch.zeros(5, 64)
    for current.stream in (11, 12, 12):
        operator(x, out)
    operator(x.view(5, 64), out[:])  # other objects, the same memory
    assert operator.prepared == 1
    assert driver.launched == [(stream, 7, 128, 5) for stream in (11, 12, 12, 12)]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, out: (x[:4], out),
        lambda x, out: (x[:, :4], out),
        lambda x, out: (x.t(), out),
        lambda x, out: (x.view(torch.int32), out),
        lambda x, out: (x.view(-1), out),
        lambda x, out: (x.clone(), out),
        lambda x, out: (x[1:], out),
        lambda x, out: (x, out[:4]),
        lambda x, out: (x, out.t()),
        lambda x, out: (x, out.view(torch.int32)),
        lambda x, out: (x, out.as_strided((8, 8), (4, 1))),
        lambda x, out: (out, x),
    ],
    ids=[
        *("rows", "columns", "strides", "dtype", "dimensions", "address", "offset"),
        *("rows of out", "strides of out", "dtype of out", "pitch of out", "exchanged"),
    ],
)
def test_a_change_at_the_same_address_is_seen(change, current: SimpleNamespace) -> None:
    driver = Driver()
    operator = Operator(driver)
    x, out = torch.zeros(8, 8), torch.zeros(8, 8)
    changed = change(x, out)
    operator(x, out)
    operator(*changed)
    assert operator.prepared == 2
    assert driver.launched[-1][-1] == changed[0].shape[0]
    operator(x, out)
    assert driver.launched[-1][-1] == 8


def test_a_tensor_that_is_changed_in_place_is_seen(current: SimpleNamespace) -> None:
    operator = Operator(Driver())
    x, out = torch.zeros(8, 8), torch.zeros(8, 8)
    operator(x, out)
    operator(x.t_(), out)
    operator(x.t_(), out.resize_(4, 8))
    operator(x.resize_(4, 8), out)
    assert operator.prepared == 4


def test_another_device_at_the_same_address_is_seen(
    current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a GPU's memory was given back and the address became another's, or the host's."""
    operator = Operator(Driver())
    x = torch.zeros(8, 8)
    operator(x)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 1)
    operator(x)
    assert operator.prepared == 2
    assert current.entered == [1, 1]  # to prepare, and to launch


def test_batches_of_other_sizes_in_the_same_buffers_do_not_displace_each_other(
    current: SimpleNamespace,
) -> None:
    operator = Operator(Driver())
    x, out = torch.zeros(8, 8), torch.zeros(8, 8)
    for _ in range(3):
        for rows in range(1, 9):
            operator(x[:rows], out[:rows])
    assert operator.prepared == 8


def test_other_options_are_another_launch(current: SimpleNamespace) -> None:
    operator = Operator(Driver())
    x = torch.zeros(8, 8)
    for options in ("a", "b", "a", ("a", 1.0), ("a", 2.0)):
        operator(x, options=options)
    assert operator.prepared == 4


def test_a_launch_goes_to_the_device_of_its_tensors(current: SimpleNamespace) -> None:
    driver = Driver()
    operator = Operator(driver)
    x = torch.zeros(8, 8)
    operator(x)
    assert current.entered == []
    current.device = 0
    operator(x)
    assert current.entered == [-1]
    assert len(driver.launched) == 2


def test_buffers_that_never_come_back_do_not_fill_the_memory(
    current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_MAXIMUM_LAUNCHES", 4)
    operator = Operator(Driver())
    x = torch.zeros(64, 8)
    for row in range(20):
        operator(x[row:])
        assert len(runtime._launches) <= 4
    assert operator.prepared == 20


def test_what_could_not_be_prepared_is_tried_again(current: SimpleNamespace) -> None:
    x = torch.zeros(8, 8)

    def refuse() -> runtime.Launch:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            runtime.launch(None, (x,), refuse)
    Operator(Driver())(x)


def test_a_failed_launch_says_why(install, current: SimpleNamespace) -> None:
    operator = Operator(install(Driver(launch_status=700)))
    with pytest.raises(CudaError, match=r"could not launch a kernel: an illegal memory .* \(700\)"):
        operator(torch.zeros(8, 8))


def test_a_thread_that_has_no_context_enters_the_kernels(install, current) -> None:
    driver = install(Driver(context=0))
    operator = Operator(driver)
    for _ in range(2):
        operator(torch.zeros(8, 8))
    assert (driver.context, len(driver.launched)) == (5, 2)


def test_a_context_that_is_none_of_the_kernels_is_not_entered_twice(install, current) -> None:
    operator = Operator(install(Driver(context=0)))
    operator.kernel.context = ctypes.c_void_p(6)
    with pytest.raises(CudaError, match=r"could not launch a kernel: .* \(201\)"):
        operator(torch.zeros(8, 8))


@pytest.mark.gpu
def test_a_new_thread_may_launch() -> None:
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    expected = quantise(x)[0]
    out = contracts.empty_quantised(3, 256, x.device)
    torch.cuda.synchronize()
    with ThreadPoolExecutor() as pool:
        pool.submit(quantise, x, out=out).result()
    torch.cuda.synchronize()
    assert torch.equal(out[0].view(torch.uint8), expected.view(torch.uint8))


def test_kernels_that_allow_the_next_one_first_are_those_of_the_rule() -> None:
    """hopper.cuh names them: what follows them must read less before its wait."""
    folder = Path(runtime.__file__).parent
    wait, allow = "wait_for_previous_kernels();", "allow_next_kernel();"
    found = set()
    for path in folder.glob("*.cu"):
        kernel = path.read_text().split("__global__", 1)[-1]
        name = re.search(r"\b(\w+)\(const __grid", kernel)
        # dispatch_place waits in a function above its kernel.
        if name and allow in kernel and wait not in kernel.split(allow)[0]:
            found.add(name[1])
    rule = (folder / "hopper.cuh").read_text().split("but for the kernels named below")[1]
    named = set(re.findall(r"\w+", rule.split("// - ")[1].split(" allow first")[0])) - {"and"}
    assert found == named
