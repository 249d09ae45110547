"""The decoder: `registry` and `config` describe it, `checkpoint` and `weights` load it, `layers` and `decoder` compute.

Imports go `decoder` -> `layers` -> `weights` -> `config` -> `registry`, and to `quantization`, `parallel.state` and
`kernels.ops`; nothing here knows a slot, a request or the server.
"""
