"""One file a kind of diffusion model, over the stock diffusers components. `load.load_kind` is the way in."""
