"""One file a family: how its encoder is called, how its placeholders and positions are laid. Model code is transformers'."""
