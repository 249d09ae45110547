"""Runs CUDA C++ kernels on the CPU: the same .cu sources, compiled by g++ with the headers in include/.

`Program` compiles a source and launches its kernels by name. docs/architecture.md says what it finds and what not.
"""
