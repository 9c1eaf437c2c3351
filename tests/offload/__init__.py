"""Tests of offloading, on the CPU and again on the emulated device."""
