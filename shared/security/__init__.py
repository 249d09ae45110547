"""API keys, files of certificates, and gRPC channels with mutual TLS."""
