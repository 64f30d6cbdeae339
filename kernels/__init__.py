"""CuTe DSL kernels of the symmetric backend, one kernel and its launcher a file."""
