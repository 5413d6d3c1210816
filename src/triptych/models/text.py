"""Text-only causal language models: any decoder whose attention goes through transformers' attention interface."""

from __future__ import annotations

from triptych.models.layouts import TextLayout
from triptych.models.served import StockModel

Layout = TextLayout
Served = StockModel
