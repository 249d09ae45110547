"""The decoder: `registry` and `config` describe it, `weights` loads it, `layers` and `decoder` compute.

`matrices` names what a config wants of a checkpoint, `gguf` gives a GGUF file's tensors these names. Imports go
`decoder` -> `layers` -> `weights` -> `matrices` and `rope` -> `config` -> `registry`, and to `quantization`,
`checkpoint`, `parallel.state` and `kernels.ops`; nothing here knows a slot, a request or the server.
"""
