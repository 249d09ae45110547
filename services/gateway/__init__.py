"""HTTP and gRPC in, tokens out: the API that clients speak, in front of Redis."""
