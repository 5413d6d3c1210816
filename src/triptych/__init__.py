"""Triptych: multimodal model serving. Understand, generate and converse on one frame."""

__version__ = "0.1.0"
