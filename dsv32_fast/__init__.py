"""The optimised MI355X path: options, metadata builder and the kernels behind AITER's signatures."""
