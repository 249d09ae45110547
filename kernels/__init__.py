"""The operations of the model's forward pass: one interface (`kernels.ops`), several backends."""
