"""The door: bytes to requests, events to bytes. One file an endpoint; no torch, no knowledge of a model."""
