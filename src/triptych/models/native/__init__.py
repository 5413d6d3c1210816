"""The fast CPU path: C++ kernels for decoders of the Llama kind and vision towers of the SigLIP and CLIP kinds.

`accelerate(served, runner)` is the whole interface: it returns a served model that computes the same, and says in
`choice` what was chosen and why. What the kernels do not serve stays with the stock modules.
"""

from triptych.models.native.build import NativeUnavailable
from triptych.models.native.choose import RUNNERS, Accelerated, Choice, accelerate

__all__ = ["RUNNERS", "Accelerated", "Choice", "NativeUnavailable", "accelerate"]
