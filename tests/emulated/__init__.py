"""The emulated accelerator `emu`, and the tests that run on it in a process of theirs.

    device/           the device, in C++: streams, memory, generators, kernels
    emu.py            builds and registers it; `configure`, `counters`
    device_module.py  `torch.emu`, what `torch.cuda` is for CUDA
    library.py        what is compiled

To import `tests.emulated.emu` gives torch an accelerator for the rest of the process:
`torch.accelerator`, autocast and page-locked memory then mean this device. So only
`pytest --device=emu` collects these tests.
"""
