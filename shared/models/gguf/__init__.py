"""GGUF files: one file with the weights, the tokenizer and the settings of a model.

`reader` checks and reads the header, `config` and `tokenizer` turn its metadata into what `config.json`,
`tokenizer.json` and `tokenizer_config.json` of a directory hold. Imports numpy, `shared.errors` and nothing of the
services; the numbers of the tensors are read by the worker.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
