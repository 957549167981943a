"""How chains run: together, one by one, in processes, or in a CUDA graph."""
