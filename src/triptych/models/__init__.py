"""One file a family: how its encoder is called, how placeholders and positions are laid. The rest is transformers'."""
