"""Runs CUDA C++ kernels on the CPU: the same .cu sources, compiled by g++ with the headers in include/.

`program.Program` compiles a source and launches its kernels by name; `device.EmulatedDevice` puts streams, events and
memory around that. docs/kernels-cuda.md says what they find and what not.
"""
