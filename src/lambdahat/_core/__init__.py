"""What every other room uses: errors, random generators, progress, precision, storage and
CUDA-graph capture.
"""
