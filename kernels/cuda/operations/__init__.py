"""Operations of the CUDA backend that have kernels, rooms and work items of their own; `backend` puts them together."""
