"""CPU kernels in C, called through ctypes. Each has a fallback in torch or numpy with the same
result.

    layers     RMSNorm, SwiGLU, and rotary embeddings of the trainer, forward and backward
    segments   the segments of a weights patch

``build`` compiles them: when the wheel is built, and by ``scripts/kernel`` in a checkout. A library
is named for the content of its source, so a library of other code is never loaded.
"""
