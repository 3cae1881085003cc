"""The FP8 operators in Triton-lang: for every GPU that multiplies e4m3, and for its interpreter.

No instruction of one architecture is used; the copy engine is where a device has one (device.py). A
kernel is compiled at its first use by the compiler that Triton-lang brings: with neither NVRTC nor
nvcc. `operators` has all of them.
"""
