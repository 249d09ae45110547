"""Serve gRPC: the Open Inference Protocol (KServe v2) and Triton's stream."""
