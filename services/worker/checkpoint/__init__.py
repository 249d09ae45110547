"""The files of a model: `source` reads tensors, `stored` says how matrices are quantized, `fingerprint` digests all.

`quantization` and `models` build on this package. `stored` needs no torch: the launcher reads it. Imports `kernels` and
`parallel.state`, nothing else of the worker.
"""
