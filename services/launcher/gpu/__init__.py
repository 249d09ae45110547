"""What a machine says of its GPUs and what must fit. Standard library only: `make` asks before it installs."""
