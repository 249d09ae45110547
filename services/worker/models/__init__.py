"""The decoder: `registry` and `config` describe it, `checkpoint` and `weights` load it, `layers` and `decoder` compute.

`matrices` names what a config wants of a checkpoint. Imports go `decoder` -> `layers` -> `weights` -> `matrices` and
`rope` -> `config` -> `registry`, and to `quantization`, `parallel.state` and `kernels.ops`; nothing here knows a slot,
a request or the server.
"""
