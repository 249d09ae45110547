"""Model families: a config, a checkpoint, one decoder. A new architecture touches only this folder."""
