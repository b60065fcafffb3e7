"""Graph capture and replay of the decode step: real graphs on a GPU, and a CPU model of them that finds faults."""
