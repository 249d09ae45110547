# Two commands on a fresh machine: `make run` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := protos/queue_pb2.py protos/worker_pb2.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[build,embedded]'
	touch $@

$(PROTOS) &: protos/queue.proto protos/worker.proto $(VENV)/.installed
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/queue.proto protos/worker.proto

protos: $(PROTOS)
.PHONY: protos
