"""C kernels for the CPU: training ops and the decoding step, compiled on first use.

The readable modules in core/ are the definition. Each kernel computes the same, and has its formula in torch beside it;
where a kernel is unavailable, or does not support a tensor, torch computes it.

    build        compile, load and check the two libraries        layout      their structs and constants
    memory       huge pages, lazily mapped zeros
    linear, attention, norm, dropout, loss, embedding, adamw8bit              the training kernels
    decode       the decoding step
"""
