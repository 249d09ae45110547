"""The GPUs of a machine, and checks that driver, torch and kernels fit them. Standard library only: `make` asks before
it installs."""
